"""Failures of collaborators that must not reach the scheduler's step: counted each time, logged once an episode."""

from __future__ import annotations

import logging

__all__ = ["FailureLog"]


class FailureLog:
    """Counts failures by activity and logs the first of each episode, and its end.

    An episode of an activity begins with a failure and ends with the next success. ``counts`` maps an activity to
    all its failures so far; activities are literals in the code, so there are few.
    """

    __slots__ = ("_failing", "_logger", "counts")

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._failing: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    @property
    def total(self) -> int:
        """All failures so far, over all activities."""
        return sum(self.counts.values())

    def failed(self, activity: str, error: BaseException) -> None:
        """Count one failure; log it, with its traceback, when it begins an episode."""
        self.counts[activity] = self.counts.get(activity, 0) + 1
        in_episode = self._failing.get(activity, 0)
        self._failing[activity] = in_episode + 1
        if not in_episode:
            self._logger.error(
                "%s failed; repeats are counted, not logged, until it works again", activity, exc_info=error
            )

    def succeeded(self, activity: str) -> None:
        """End the activity's episode, if there is one. Costs one test of an empty dict when all is well."""
        if self._failing and activity in self._failing:
            self._logger.warning("%s works again after %d failures", activity, self._failing.pop(activity))

    def __repr__(self) -> str:
        return f"<FailureLog: {self.total} failures, failing now: {', '.join(self._failing) or 'nothing'}>"
