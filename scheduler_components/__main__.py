"""Run the command line with ``python -m scheduler_components``. The command belongs to the wheel of the engine."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points


def main() -> None:
    """Run the console script of this name, or name the wheel that brings it."""
    for script in entry_points(group="console_scripts", name="scheduler-components"):
        script.load()()
    sys.exit("scheduler-components: the command line is not installed; pip install 'scheduler-components[engine]'")


if __name__ == "__main__":
    main()
