"""An exception like that of a signal handler: at any call, or return of a call, in a part of the code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from types import FrameType, ModuleType
from typing import TypeVar

T = TypeVar("T")


class InterruptedAtCallError(BaseException):
    """Raised in place of a handler's exception. Not an Exception, like KeyboardInterrupt."""


@contextmanager
def interrupted_at_call(number: int, *modules: ModuleType) -> Iterator[None]:
    """Raise once in the with block: when the ``number``-th call of the modules begins, in Python or to C, or C returns.

    There Python runs signal handlers. Events in which an exception would skip the ``finally`` of a frame are left
    out: a handler's exception never does.
    """
    paths = {module.__file__ for module in modules}
    left = number

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        skips_finally = event == "return" or (event == "call" and frame.f_code.co_flags & CO_GENERATOR)
        if frame.f_code.co_filename in paths and not skips_finally:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise InterruptedAtCallError(f"{event} in {frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def until_done(call: Callable[[], T]) -> T:
    """Call again after an interruption, as the next step of a scheduler would."""
    try:
        return call()
    except InterruptedAtCallError:
        return call()
