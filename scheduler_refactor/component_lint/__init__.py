"""A flake8 plugin that checks scheduler components in any code. It reads the source and never imports it.

Run it with ``flake8 --select SCH path``. ``docs/how-to/lint-components.md`` shows each code with an example.
"""

from scheduler_refactor.component_lint.checker import ComponentChecker
from scheduler_refactor.component_lint.rules import RULES, Limits

__all__ = ["RULES", "ComponentChecker", "Limits"]
