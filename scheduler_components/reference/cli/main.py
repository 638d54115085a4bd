"""The entry point of ``scheduler-components``: how a run ends, in one line and a code.

Exit codes: 0 all is well, 1 a check or the engine failed, 2 a person's mistake, 3 nothing answers, 130
Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = [
    "main",
]

_INTERRUPTED = 130


def main() -> None:
    """Run one command and exit."""
    try:
        # Half a second of imports, in which a Ctrl-C must not end in a traceback either.
        from scheduler_components.reference.cli.commands import run_command
    except KeyboardInterrupt:
        _fail(_INTERRUPTED, "interrupted")
    except ModuleNotFoundError as error:
        _fail(2, f"{error.name} is missing; pip install 'scheduler-components[engine]'")
    status, complaint = run_command(sys.argv[1:])
    if complaint:
        _fail(status, complaint)
    sys.exit(status)


def _fail(status: int, text: str) -> NoReturn:
    sys.stderr.write(f"scheduler-components: {text}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
