"""The entry point of ``scheduler-components``: run a command and exit with a code and at most one line of error.

Exit codes: 0 success, 1 a check or the engine failed, 2 wrong usage, 3 nothing answers at the address, 130 Ctrl-C,
143 SIGTERM.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import scheduler_components

__all__ = [
    "main",
]

_INTERRUPTED = 130
_GO_ON = "run from another directory (with python -m: add -P), take its directory off PYTHONPATH, or rename it"


def main() -> None:
    """Run one command and exit."""
    try:
        # The imports take half a second. A Ctrl-C during that time must not print a traceback.
        from scheduler_components.reference.cli.commands import run_command
    except KeyboardInterrupt:
        _fail(_INTERRUPTED, "interrupted")
    except ImportError as error:
        if shadow := _shadow():
            _fail(2, f"{shadow} hides this kit's own package observability; {_GO_ON}")
        if not isinstance(error, ModuleNotFoundError):
            raise
        _fail(2, f"{error.name} is missing; pip install 'scheduler-components[engine]'")
    status, complaint = run_command(sys.argv[1:])
    if complaint:
        _fail(status, complaint)
    sys.exit(status)


def _shadow() -> str:
    """Return the file of another package named ``observability`` that Python finds first; empty for none."""
    found = find_spec("observability")
    ours = Path(scheduler_components.__file__).parent.parent / "observability" / "__init__.py"
    if found is None or found.origin is None or Path(found.origin).resolve() == ours.resolve():
        return ""
    return found.origin


def _fail(status: int, text: str) -> NoReturn:
    sys.stderr.write(f"scheduler-components: {text}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
