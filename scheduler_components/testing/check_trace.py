"""How a check fails: it records each step, and raises an error with the steps, the expectation and the finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["CheckTrace", "ConformanceError", "checks_in"]

T = TypeVar("T")

_MAX_SHOWN_CHARACTERS = 400
_SHOWN_ENDS = 20  # A long trace shows this many of its first and last steps.


class ConformanceError(AssertionError):
    """A part breaks the contract of its interface. It is an AssertionError, so that test runners report a failure.

    Args:
        title: the promise that was checked, as a sentence.
        steps: the steps of the check in order; the last one failed. The message omits the middle of a long list.
        expected: the expected result.
        found: the actual result.
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
        listed = "".join(lines)
        super().__init__(f"{title}{listed}\n  expected: {expected}\n  found:    {found}")


class CheckTrace:
    """The steps of one check, recorded as it runs.

    Args:
        title: the promise that is checked, as a sentence.
    """

    __slots__ = ("_steps", "title")

    def __init__(self, title: str) -> None:
        self.title = title
        self._steps: list[str] = []

    def note(self, step: str) -> None:
        """Record one step."""
        self._steps.append(step)

    def call(self, step: str, action: Callable[[], T]) -> T:
        """Record a step, run it and return its result.

        Raises:
            ConformanceError: the step raised an error.
        """
        self.note(step)
        try:
            return action()
        except ConformanceError:
            raise
        except Exception as error:
            raise self.failure("no error", f"{type(error).__name__}: {error}") from error

    def expect(self, expected: object, found: object, meaning: str = "") -> None:
        """Compare two values.

        Raises:
            ConformanceError: they are not equal.
        """
        if expected != found:
            raise self.failure(f"{meaning}: {_shown(expected)}" if meaning else _shown(expected), _shown(found))

    def require(self, holds: bool, expected: str, found: object) -> None:
        """Check a condition.

        Raises:
            ConformanceError: the condition is false.
        """
        if not holds:
            raise self.failure(expected, _shown(found))

    def expect_error(self, step: str, kind: type[Exception], action: Callable[[], object]) -> None:
        """Record and run a step that must raise ``kind``.

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
        """Return an error with the steps so far."""
        return ConformanceError(self.title, tuple(self._steps), expected, found)


def checks_in(namespace: Mapping[str, Any]) -> tuple[Callable[..., None], ...]:
    """Return the functions ``check_...`` that a module has defined so far, in order. Pass ``globals()``."""
    own = (each for name, each in namespace.items() if name.startswith("check_"))
    return tuple(each for each in own if each.__module__ == namespace["__name__"])


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
