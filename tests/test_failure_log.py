"""Each failure is counted; an episode of failures is logged when it begins and when it ends."""

from __future__ import annotations

import logging

import pytest

from scheduler_components.errors import FailureLog

LOGGER = logging.getLogger("test_failure_log")


def test_an_episode_is_logged_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(LOGGER)
    with caplog.at_level(logging.INFO, logger=LOGGER.name):
        failures.succeeded("publishing")
        for _ in range(5):
            failures.failed("publishing", OSError("no route"))
        failures.succeeded("publishing")
        failures.succeeded("publishing")
        failures.failed("publishing", OSError("no route"))
    assert failures.counts == {"publishing": 6}
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING", "ERROR"]
    assert "works again after 5 failures" in caplog.records[1].message
    assert caplog.records[0].exc_info is not None


def test_activities_have_episodes_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(LOGGER)
    failures.failed("publishing", OSError("a"))
    failures.failed("closing", OSError("b"))
    failures.succeeded("closing")
    failures.failed("publishing", OSError("c"))
    assert failures.total == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "WARNING"]
    assert repr(failures) == "<FailureLog: 3 failures, failing now: publishing>"
