"""How a check fails: it records each step, and raises an error with the steps, the expectation and the finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["CheckTrace", "ConformanceError"]

T = TypeVar("T")

_MAX_SHOWN_CHARACTERS = 400
_SHOWN_ENDS = 20  # A long trace shows this many of its first and last steps.


class ConformanceError(AssertionError):
    """A part does not do what its port promises: the part is to blame. An AssertionError, so that test runners agree.

    Args:
        title: the promise, as a sentence.
        steps: what was done to the part, in order; the last one is where it failed. The message leaves out the middle
            of many.
        expected: what the promise asks for.
        found: what came instead.
    """

    def __init__(self, title: str, steps: tuple[str, ...], expected: str, found: str) -> None:
        self.title = title
        self.steps = steps
        self.expected = expected
        self.found = found
        lines = [f"\n  {number}. {step}" for number, step in enumerate(steps, start=1)]
        if len(lines) > 2 * _SHOWN_ENDS:
            num_left_out = len(lines) - 2 * _SHOWN_ENDS
            lines[_SHOWN_ENDS:-_SHOWN_ENDS] = [f"\n  ... {num_left_out} steps ..."]
        told = "".join(lines)
        super().__init__(f"{title}{told}\n  expected: {expected}\n  found:    {found}")


class CheckTrace:
    """What a check does to a part, told as it goes.

    Args:
        title: the promise that is checked, as a sentence.
    """

    __slots__ = ("_steps", "title")

    def __init__(self, title: str) -> None:
        self.title = title
        self._steps: list[str] = []

    def note(self, step: str) -> None:
        """Tell one step."""
        self._steps.append(step)

    def call(self, step: str, action: Callable[[], T]) -> T:
        """Tell a step and do it.

        Raises:
            ConformanceError: the part raised; the check asks for nothing that may.
        """
        self.note(step)
        try:
            return action()
        except ConformanceError:
            raise
        except Exception as error:
            raise self.failure("no error", f"{type(error).__name__}: {error}") from error

    def expect(self, expected: object, found: object, meaning: str = "") -> None:
        """Compare.

        Raises:
            ConformanceError: the two are not equal.
        """
        if expected != found:
            raise self.failure(f"{meaning}: {_shown(expected)}" if meaning else _shown(expected), _shown(found))

    def require(self, holds: bool, expected: str, found: object) -> None:
        """Raise unless ``holds``.

        Raises:
            ConformanceError: it does not.
        """
        if not holds:
            raise self.failure(expected, _shown(found))

    def expect_error(self, step: str, kind: type[Exception], action: Callable[[], object]) -> None:
        """Tell and do a step that the part must refuse.

        Raises:
            ConformanceError: it did not raise ``kind``.
        """
        self.note(step)
        try:
            answer = action()
        except kind:
            return
        except Exception as error:
            raise self.failure(kind.__name__, f"{type(error).__name__}: {error}") from error
        raise self.failure(kind.__name__, f"it returned {_shown(answer)}")

    def failure(self, expected: str, found: str) -> ConformanceError:
        """The trace so far as an error, to raise."""
        return ConformanceError(self.title, tuple(self._steps), expected, found)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
