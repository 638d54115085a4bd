"""FailureLog: count the failures of collaborators that must not stop a step, and log each episode once."""

from __future__ import annotations

import logging
from types import TracebackType

__all__ = ["FailureGuard", "FailureLog"]


class FailureGuard:
    """Context manager of `FailureLog.guard`: suppress an exception of the block and count it as one failure.

    It holds no state of its own, so one guard may be entered again while it is active.
    """

    __slots__ = ("_activity", "_log")

    def __init__(self, log: FailureLog, activity: str) -> None:
        self._log = log
        self._activity = activity

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            if self._log._failing:
                self._log.succeeded(self._activity)
            return False
        if not isinstance(error, Exception):
            return False  # KeyboardInterrupt and SystemExit end the process
        self._log.failed(self._activity, error)
        return True


class FailureLog:
    """Counts failures by activity and logs the start and the end of each episode.

    An episode of an activity begins with a failure and ends with the next success. Activities are literals in the
    code, so there are few of them.

    Attributes:
        counts: activity -> its failures since the log was created.
    """

    __slots__ = ("_failing", "_guards", "_logger", "counts")

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._failing: dict[str, int] = {}
        self._guards: dict[str, FailureGuard] = {}
        self.counts: dict[str, int] = {}

    @property
    def total(self) -> int:
        """All failures since the log was created, over all activities."""
        return sum(self.counts.values())

    def guard(self, activity: str) -> FailureGuard:
        """Return a context manager that suppresses and counts an exception of its block.

        A block that ends without one ends the activity's episode. Set a default before the block for a value that
        the block computes::

            size = 0
            with self.failures.guard("reading the queue"):
                size = self.queue.size()
        """
        guard = self._guards.get(activity)
        if guard is None:
            guard = self._guards[activity] = FailureGuard(self, activity)
        return guard

    def failed(self, activity: str, error: BaseException) -> None:
        """Count one failure; log it with its traceback if it begins an episode."""
        self.counts[activity] = self.counts.get(activity, 0) + 1
        num_in_episode = self._failing.get(activity, 0)
        self._failing[activity] = num_in_episode + 1
        if not num_in_episode:
            self._logger.error(
                "%s failed; repeats are counted, not logged, until it works again", activity, exc_info=error
            )

    def succeeded(self, activity: str) -> None:
        """End the activity's episode, if there is one. Tests one empty dict while nothing fails."""
        if self._failing and activity in self._failing:
            self._logger.warning("%s works again after %d failures", activity, self._failing.pop(activity))

    def __repr__(self) -> str:
        return f"<FailureLog: {self.total} failures, failing now: {', '.join(self._failing) or 'nothing'}>"
