"""The entry point of ``scheduler-components``: how a run ends, in one line and a code.

Exit codes: 0 all is well, 1 a check or the engine failed, 2 a person's mistake, 3 nothing answers, 130
Ctrl-C, 143 SIGTERM.
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
        # Half a second of imports, in which a Ctrl-C must not end in a traceback either.
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
    """The file of another package that Python finds first under the name of ours; empty when there is none."""
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
