"""A trouble excuses a log for as long as its recovery may take, whatever happens after it."""

from __future__ import annotations

from worlds.log_troubles import LogTrouble, LogTroubles
from worlds.timeline import Timeline


def test_the_longest_recovery_counts() -> None:
    timeline = Timeline(seed=0)
    troubles = LogTroubles(timeline)
    assert troubles.are_over
    troubles.note(LogTrouble.UNANSWERED)
    timeline.run_until(1.0)
    troubles.note(LogTrouble.RESTARTED)
    assert (troubles.noted_s, troubles.settled_s) == (1.0, LogTrouble.UNANSWERED.value)
    timeline.run_until(LogTrouble.UNANSWERED.value - 0.1)
    assert not troubles.are_over
    timeline.run_until(LogTrouble.UNANSWERED.value + 0.1)
    assert troubles.are_over


def test_no_two_troubles_are_one() -> None:
    """Members of an enumeration with equal values would be aliases."""
    limits_s = [each.value for each in LogTrouble]
    assert len(limits_s) == 6 and limits_s == sorted(limits_s)
