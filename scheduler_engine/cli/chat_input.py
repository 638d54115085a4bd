"""Read the questions of a chat: edited lines with a history on a terminal, plain lines of a pipe or file.

A terminal in its usual mode cuts a line at 4,095 bytes and offers no editing. prompt_toolkit reads single keys instead.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator
from typing import TextIO

from scheduler_components import StartError
from scheduler_components._internal.extras import naming_extras


class ChatInterruptedError(Exception):
    """Ctrl-C on an empty line. A KeyboardInterrupt of a task would end the event loop instead of the task."""


def is_edited(source: TextIO | None, sink: TextIO) -> bool:
    """Return whether both are a terminal, so that a user can edit lines."""
    return source is not None and source.isatty() and sink.isatty()


async def edited_lines(source: TextIO, sink: TextIO) -> AsyncIterator[str]:
    """Yield lines of any length that a user edits on a terminal, until Ctrl-D. Arrow keys recall earlier lines.

    The history ends with the chat, because questions may be private.

    Raises:
        ChatInterruptedError: Ctrl-C on an empty line. On another line it clears the line.
        MissingExtraError: prompt_toolkit is not installed.
    """
    with naming_extras:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.input import create_input
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
        from prompt_toolkit.output import create_output

    keys = KeyBindings()
    session: PromptSession[str] = PromptSession(
        [("bold", "> ")],
        key_bindings=keys,
        input=create_input(source),
        output=create_output(sink),
        interrupt_exception=ChatInterruptedError,
    )

    @keys.add("c-c", filter=Condition(lambda: bool(session.default_buffer.text)))
    def clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    while True:
        try:
            line = await session.prompt_async()
        except EOFError:
            return
        yield line.strip()


async def read_lines(source: TextIO | None) -> AsyncIterator[str]:
    """Yield lines without line ends; none for a closed standard input. Bytes that are not UTF-8 become U+FFFD.

    A daemon thread reads them, because a blocking read cannot be interrupted.

    Raises:
        StartError: the source cannot be read, for example because it is a directory.
    """
    if source is None:
        return
    if isinstance(source, io.TextIOWrapper):
        source.reconfigure(errors="replace")
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | OSError | None]()

    def put(line: str | OSError | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lines.put_nowait, line)

    def read() -> None:
        try:
            for line in source:
                put(line.strip())
        except OSError as error:
            put(error)
        put(None)

    threading.Thread(target=read, name="questions", daemon=True).start()
    while (line := await lines.get()) is not None:
        if isinstance(line, OSError):
            raise StartError(
                "standard input", line.strerror or str(line), "give a terminal, a pipe or a file"
            ) from line
        yield line
