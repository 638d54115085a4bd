"""FailureLog counts every failure and logs the start and the end of each episode."""

from __future__ import annotations

import logging

import pytest

from scheduler_components._internal.failure_log import FailureLog

LOGGER = logging.getLogger("test_failure_log")


def test_an_episode_is_logged_at_its_start_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
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


def test_activities_have_separate_episodes(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(LOGGER)
    failures.failed("publishing", OSError("a"))
    failures.failed("closing", OSError("b"))
    failures.succeeded("closing")
    failures.failed("publishing", OSError("c"))
    assert failures.total == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "WARNING"]
    assert repr(failures) == "<FailureLog: 3 failures, failing now: publishing>"


def test_a_guard_suppresses_and_counts_each_failure_and_logs_the_episode_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = FailureLog(LOGGER)
    for _ in range(3):
        with failures.guard("publishing"):
            raise OSError("no route")
    with failures.guard("publishing"):
        pass
    assert failures.counts == {"publishing": 3}
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    logged = caplog.records[0].exc_info
    assert logged is not None
    assert isinstance(logged[1], OSError)


def test_a_failing_guard_leaves_the_default_value() -> None:
    failures = FailureLog(LOGGER)
    size = 0
    with failures.guard("reading"):
        size = int("none")
    assert size == 0


def test_a_guard_can_be_entered_again_while_it_is_active() -> None:
    failures = FailureLog(LOGGER)
    with failures.guard("publishing"):
        with failures.guard("publishing"):
            raise OSError("inner")
        raise OSError("outer")
    assert failures.counts == {"publishing": 2}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_guard_passes_what_ends_the_process(error: type[BaseException]) -> None:
    failures = FailureLog(LOGGER)
    with pytest.raises(error), failures.guard("publishing"):
        raise error
    assert failures.total == 0
