"""A flake8 plugin that judges components in anyone's code: it reads the source, and never imports it.

``flake8 --select SCH path`` runs it; ``docs/how-to/lint-components.md`` shows each code with a before and an after.
"""

from scheduler_components.component_lint.checker import ComponentChecker
from scheduler_components.component_lint.rules import RULES, Limits, Problem, Rule

__all__ = ["RULES", "ComponentChecker", "Limits", "Problem", "Rule"]
