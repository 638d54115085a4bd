"""The command line, run in this process with arguments of a user."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from scheduler_engine.cli import main as cli


class Ran(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """What it complains of: one line on standard error, and the command's own name before it."""
        name, _, complaint = self.err.partition(": ")
        assert name == "scheduler-components"
        assert complaint.count("\n") == 1
        return complaint.rstrip()


CommandLine = Callable[..., Ran]


@pytest.fixture(autouse=True)
def log_of_the_tests() -> Iterator[None]:
    """Give the log of this process back after a command has configured it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """``command_line(*arguments)`` runs ``scheduler-components`` with them."""

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["scheduler-components", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, *capsys.readouterr())

    return run
