"""Questions are edited on a terminal, which is a real one here, and read as they are from anything else."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import pytest
from kit.waiting import wait_until

from scheduler_components import StartError
from scheduler_engine.cli.chat_input import ChatInterruptedError, edited_lines, is_edited, read_lines

pytestmark = pytest.mark.threads

UP, LEFT, BACKSPACE, CTRL_C, CTRL_D = b"\x1b[A", b"\x1b[D", b"\x7f", b"\x03", b"\x04"


class Terminal:
    """The user's side of a pseudo terminal."""

    def __init__(self, stack: ExitStack) -> None:
        self._keyboard, device = pty.openpty()
        self.source: TextIO = os.fdopen(os.dup(device), encoding="utf-8")
        self.sink: TextIO = os.fdopen(device, "w", encoding="utf-8")
        self._shown = b""
        reader = threading.Thread(target=self._read)
        reader.start()
        stack.callback(os.close, self._keyboard)
        stack.callback(reader.join)
        stack.callback(self.sink.close)
        stack.callback(self.source.close)

    def _read(self) -> None:
        """Read what the program writes, as a terminal does; otherwise its writes would block."""
        try:
            while data := os.read(self._keyboard, 65_536):
                self._shown += data
                if data.endswith(b"\x1b[6n"):  # it asks where the cursor is
                    os.write(self._keyboard, b"\x1b[1;1R")
        except OSError:  # the other side is closed
            return

    def type_at_prompt(self, number: int, keys: bytes) -> None:
        """Type when the program has begun to read single keys for its ``number``-th line, from 1."""
        wait_until(lambda: self._shown.count(b"\x1b[?2004h") >= number)
        for at in range(0, len(keys), 512):  # the device's buffer holds more
            os.write(self._keyboard, keys[at : at + 512])

    @property
    def shown(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._shown.decode(errors="replace"))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    with ExitStack() as opened:
        yield Terminal(opened)


def read(lines: AsyncIterator[str]) -> list[str]:
    async def collect() -> list[str]:
        return [line async for line in lines]

    return asyncio.run(asyncio.wait_for(collect(), timeout=30))


def lines_typed(terminal: Terminal, *typed: bytes) -> list[str]:
    """Type one part at each prompt; return the lines that were read."""

    def type_all() -> None:
        for number, keys in enumerate(typed, start=1):
            terminal.type_at_prompt(number, keys)

    async def collect() -> list[str]:
        typing = asyncio.create_task(asyncio.to_thread(type_all))
        lines = [line async for line in edited_lines(terminal.source, terminal.sink)]
        await typing
        return lines

    return asyncio.run(asyncio.wait_for(collect(), timeout=30))


def test_a_line_is_edited_and_recalled(terminal: Terminal) -> None:
    assert is_edited(terminal.source, terminal.sink)
    lines = lines_typed(terminal, b"heXlo" + LEFT * 2 + BACKSPACE + b"l\r", UP + b" again\r", CTRL_D)
    assert lines == ["hello", "hello again"]
    assert "> " in terminal.shown


def test_a_line_may_be_longer_than_the_buffer_of_a_terminal(terminal: Terminal) -> None:
    assert lines_typed(terminal, b"x" * 4100 + b"\r", CTRL_D) == ["x" * 4100]  # of 4,096 bytes


def test_ctrl_c_clears_a_line(terminal: Terminal) -> None:
    assert lines_typed(terminal, b"oops" + CTRL_C + b"kept\r", CTRL_D) == ["kept"]


def test_ctrl_c_on_an_empty_line_leaves(terminal: Terminal) -> None:
    with pytest.raises(ChatInterruptedError):
        lines_typed(terminal, CTRL_C)


def test_the_handler_of_ctrl_c_is_kept(terminal: Terminal) -> None:
    before = signal.getsignal(signal.SIGINT)
    lines_typed(terminal, b"a\r", CTRL_D)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("source", [None, io.StringIO("a line\n")])
def test_what_is_no_terminal_is_not_edited(terminal: Terminal, source: TextIO | None) -> None:
    assert not is_edited(source, terminal.sink)
    assert not is_edited(terminal.source, io.StringIO())


def test_lines_are_read_to_their_end() -> None:
    assert read(read_lines(io.StringIO("one\n\n two \nlast"))) == ["one", "", "two", "last"]
    assert read(read_lines(None)) == []


def test_bytes_that_are_not_utf_8_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "questions"
    file.write_bytes(b"caf\xe9\nnext\n")
    with file.open(encoding="utf-8") as source:
        assert read(read_lines(source)) == ["caf\ufffd", "next"]


class Unreadable(io.StringIO):
    def __iter__(self) -> Any:
        raise IsADirectoryError(21, "Is a directory")


def test_a_source_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(StartError, match="standard input: Is a directory"):
        read(read_lines(Unreadable()))
