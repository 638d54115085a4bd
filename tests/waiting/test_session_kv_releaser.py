"""The pages of a turn stay locked after its end; those of other requests do not."""

from __future__ import annotations

from kit.session_driver import SessionDriver, Turn

from scheduler_components.values import FinishReason, SessionParams


def test_a_turn_leaves_its_pages_to_its_session_and_another_request_leaves_none_locked() -> None:
    driver = SessionDriver()
    driver.table.open("a", capacity_tokens=40)
    params = SessionParams("a")
    driver.table.begin_turn(params, "r0")
    for turn in (Turn("r0", [1, 2, 3, 4], "a"), Turn("r1", [5, 6, 7, 8], None)):
        driver._run(turn)
        driver._finish(turn, FinishReason.LENGTH)
    driver.check()
    assert [each.holder for each in driver.table.holdings()] == ["a"]
    assert driver.cache.num_locks == 1


def test_a_retraction_frees_pages_and_ends_no_turn() -> None:
    driver = SessionDriver()
    driver.table.open("a", capacity_tokens=40)
    driver.table.begin_turn(SessionParams("a"), "r0")
    turn = Turn("r0", [1, 2, 3, 4], "a")
    driver._run(turn)
    driver.releaser.free(turn)
    assert driver.table.stats().turns == 0
    assert driver.cache.num_locks == 0
