"""The entry point of ``scheduler-components``: run a command and exit with a code and at most one line of error.

Exit codes: 0 success, 1 a check or the engine failed, 2 wrong usage, 3 nothing answers at the address, 130 Ctrl-C,
141 the reader of the output is gone, 143 SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import scheduler_components

_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report a program that does not handle the signal
_GO_ON = "run from another directory (with python -m: add -P), take its directory off PYTHONPATH, or rename it"


def main() -> None:
    """Run one command and exit."""
    try:
        status, complaint = _run(sys.argv[1:])
        if complaint:
            sys.stderr.write(f"scheduler-components: {complaint}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        status = _BROKEN_PIPE
    sys.exit(status)


def _run(arguments: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the line for standard error, as ``run_command``."""
    if arguments == ["--version"]:  # before the imports, which take a second
        sys.stdout.write(f"{scheduler_components.__version__}\n")
        return 0, ""
    try:
        with _ended_by_sigint():
            from scheduler_engine.cli.commands import run_command
    except ImportError as error:
        if shadow := _shadow():
            return 2, f"{shadow} hides this kit's own package observability; {_GO_ON}"
        if not isinstance(error, ModuleNotFoundError):
            raise
        return 2, f"{error.name} is missing; pip install 'scheduler-components[engine]'"
    return run_command(arguments)


@contextmanager
def _ended_by_sigint() -> Iterator[None]:
    """Let Ctrl-C end the process without Python's traceback, as it ends any program that does not handle the signal."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # a shell started this process in the background
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _discard_output() -> None:
    """Send buffered output to nowhere, so that the interpreter's own flush at exit does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def _shadow() -> str:
    """Return the file of another package named ``observability`` that Python finds first; empty for none."""
    found = find_spec("observability")
    ours = Path(scheduler_components.__file__).parent.parent / "observability" / "__init__.py"
    if found is None or found.origin is None or Path(found.origin).resolve() == ours.resolve():
        return ""
    return found.origin


if __name__ == "__main__":
    main()
