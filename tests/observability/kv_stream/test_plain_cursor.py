"""The plain rules, one by one. ``test_plain_cursor_network`` has them all at once on a faulty network."""

from __future__ import annotations

import pytest

from observability.kv_stream import Apply, AskReplay, Clear, Instruction, PlainCursor, RetryLater, StreamState


def opened(*, has_replay: bool = True, batches: int = 3, patience: int = 3) -> PlainCursor:
    """A cursor at batch ``batches - 1`` of a publisher that sends b'0', b'1', ...; LIVE where that can be proved."""
    cursor = PlainCursor(has_replay=has_replay, patience=patience)
    cursor.connected()
    if has_replay:
        for seq in range(batches):
            cursor.answered(1, seq, b"%d" % seq)
        cursor.answer_ended(1)
    else:
        for seq in range(batches):
            cursor.live(seq, b"%d" % seq)
    assert cursor.state is (StreamState.LIVE if has_replay else StreamState.PARTIAL)
    return cursor


def kinds(instructions: tuple[Instruction, ...]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def test_late_join_asks_from_zero() -> None:
    cursor = PlainCursor(has_replay=True)
    assert cursor.connected() == (AskReplay(1, 0),)
    assert cursor.state is StreamState.SYNCING
    assert not cursor.listening


def test_an_empty_stream_stays_syncing_until_its_first_batch() -> None:
    cursor = PlainCursor(has_replay=True)
    cursor.connected()
    assert cursor.answer_ended(1) == ()
    assert cursor.state is StreamState.SYNCING
    assert cursor.listening
    assert kinds(cursor.live(0, b"0")) == [Apply]
    assert cursor.state is StreamState.LIVE


def test_a_gap_is_asked_for_from_the_number_that_is_held() -> None:
    cursor = opened()
    assert cursor.live(5, b"5") == (AskReplay(2, 2),)
    assert cursor.state is StreamState.RECOVERING
    assert cursor.answered(2, 2, b"2") == ()
    for seq in (3, 4, 5):
        assert cursor.answered(2, seq, b"%d" % seq) == (Apply(seq, b"%d" % seq, True),)
    cursor.answer_ended(2)
    assert (cursor.state, cursor.last_seq, cursor.counters.gaps) == (StreamState.LIVE, 5, 1)


def test_another_payload_under_the_held_number_is_another_life() -> None:
    cursor = opened()
    cursor.disconnected()
    assert cursor.connected() == (AskReplay(2, 2),)
    assert kinds(cursor.answered(2, 2, b"new 2")) == [Clear, AskReplay]
    assert cursor.counters.restarts == 1


def test_a_restart_at_zero_without_a_reconnect_is_seen() -> None:
    cursor = opened()
    cursor.live(3, b"3")
    assert kinds(cursor.live(0, b"new 0")) == [AskReplay]
    assert kinds(cursor.answer_ended(2)) == [Clear, AskReplay]
    cursor.answered(3, 0, b"new 0")
    cursor.answer_ended(3)
    assert (cursor.state, cursor.last_seq) == (StreamState.LIVE, 0)


def test_a_truncated_window_is_partial_until_a_clear() -> None:
    cursor = PlainCursor(has_replay=True)
    cursor.connected()
    cursor.answered(1, 7, b"7")
    cursor.answer_ended(1)
    assert (cursor.state, cursor.counters.losses) == (StreamState.PARTIAL, 1)
    cursor.live(8, b"clear")
    cursor.cleared()
    assert cursor.state is StreamState.LIVE


def test_a_batch_from_the_future_is_not_kept() -> None:
    cursor = opened()
    cursor.live(4, b"4")
    assert cursor.live(5, b"5") == ()
    cursor.answered(2, 2, b"2")
    cursor.answered(2, 3, b"3")
    assert cursor.answer_ended(2) == (AskReplay(3, 3),)
    assert cursor.last_seq == 3


def test_the_same_hole_twice_is_a_loss() -> None:
    cursor = opened()
    cursor.live(6, b"6")
    for ask in (2, 3):
        cursor.answered(ask, 2, b"2")
        instructions = cursor.answered(ask, 5, b"5")
        if ask == 2:
            assert instructions == ()
            assert cursor.answer_ended(2) == (AskReplay(3, 2),)
    assert kinds(instructions) == [Clear, Apply]
    cursor.answered(3, 6, b"6")
    cursor.answer_ended(3)
    assert (cursor.state, cursor.last_seq) == (StreamState.PARTIAL, 6)


def test_a_silent_replay_channel_ends_in_partial_and_is_retried() -> None:
    cursor = opened(patience=2)
    cursor.live(5, b"5")
    assert cursor.answer_missing(2) == (RetryLater(1),)
    assert cursor.state is StreamState.RECOVERING
    assert cursor.retry() == (AskReplay(3, 2),)
    assert kinds(cursor.answer_missing(3)) == [Clear, RetryLater]
    assert (cursor.state, cursor.listening) == (StreamState.PARTIAL, True)
    assert kinds(cursor.live(6, b"6")) == [Clear, Apply]
    assert cursor.retry() == (AskReplay(4, 0),)


def test_unanswered_probes_cost_the_proof_and_no_block() -> None:
    cursor = opened(patience=2)
    assert cursor.probe() == (AskReplay(2, 2),)
    assert cursor.answer_missing(2) == (RetryLater(1),)
    assert cursor.retry() == (AskReplay(3, 2),)
    assert cursor.answer_missing(3) == (RetryLater(2),)
    assert cursor.state is StreamState.PARTIAL
    assert kinds(cursor.live(3, b"3")) == [Apply]
    cursor.cleared()
    assert cursor.state is StreamState.PARTIAL
    assert cursor.retry() == (AskReplay(4, 3),)
    cursor.answered(4, 3, b"3")
    cursor.answer_ended(4)
    assert cursor.state is StreamState.LIVE


def test_an_empty_stream_whose_replay_falls_silent_is_listened_to_again() -> None:
    cursor = PlainCursor(has_replay=True, patience=1)
    cursor.connected()
    cursor.answer_ended(1)
    cursor.probe()
    cursor.answer_missing(2)
    assert (cursor.state, cursor.listening) == (StreamState.PARTIAL, True)


def test_a_lost_end_marker_is_asked_past() -> None:
    cursor = opened()
    cursor.live(5, b"5")
    cursor.answered(2, 2, b"2")
    cursor.answered(2, 3, b"3")
    assert cursor.answer_missing(2) == (AskReplay(3, 3),)


def test_answers_to_an_older_question_change_nothing() -> None:
    cursor = opened()
    cursor.live(5, b"5")
    assert cursor.answered(1, 3, b"wrong") == ()
    assert cursor.answer_ended(1) == ()
    assert cursor.answer_missing(1) == ()
    assert (cursor.open_ask, cursor.counters.stale_answers) == (2, 1)


@pytest.mark.parametrize("first", [0, 9])
def test_without_replay_nothing_proves_that_no_batch_was_lost(first: int) -> None:
    cursor = PlainCursor(has_replay=False)
    cursor.connected()
    assert cursor.state is StreamState.PARTIAL
    cursor.live(first, b"first")
    cursor.cleared()
    assert cursor.state is StreamState.PARTIAL


def test_without_replay_a_gap_clears_and_goes_on_partial() -> None:
    cursor = opened(has_replay=False)
    assert kinds(cursor.live(5, b"5")) == [Clear, Apply]
    assert (cursor.state, cursor.counters.gaps) == (StreamState.PARTIAL, 1)


def test_an_unreadable_batch_takes_the_live_state_until_a_clear() -> None:
    cursor = opened()
    cursor.live(3, b"3")
    cursor.damaged()
    assert cursor.state is StreamState.PARTIAL
    cursor.live(4, b"4")
    assert cursor.state is StreamState.PARTIAL
    cursor.live(5, b"5")
    cursor.cleared()
    assert cursor.state is StreamState.LIVE


def test_a_dead_publisher_is_forgotten_and_may_come_back() -> None:
    cursor = opened()
    cursor.disconnected()
    assert kinds(cursor.gave_up()) == [Clear]
    assert cursor.state is StreamState.DEAD
    assert cursor.connected() == (AskReplay(2, 0),)


def test_a_repeated_batch_changes_nothing() -> None:
    cursor = opened()
    assert cursor.live(2, b"2") == ()
    assert (cursor.state, cursor.counters.duplicates) == (StreamState.LIVE, 1)


def test_the_first_batch_of_a_clock_based_life_is_no_gap() -> None:
    cursor = PlainCursor(has_replay=True)
    cursor.connected()
    cursor.answer_ended(1)
    assert kinds(cursor.live(1_700_000_000_000, b"clear")) == [AskReplay]
    cursor.answered(2, 1_700_000_000_000, b"clear")
    cursor.cleared()
    cursor.answer_ended(2)
    assert (cursor.state, cursor.counters.gaps) == (StreamState.LIVE, 0)


def test_a_window_that_moved_past_the_held_number_is_a_loss_at_once() -> None:
    cursor = opened()
    cursor.live(9, b"9")
    assert cursor.answered(2, 8, b"8") == (Clear("history before batch 8 is not known"), Apply(8, b"8", True))
    cursor.answer_ended(2)
    assert (cursor.state, cursor.counters.asks) == (StreamState.PARTIAL, 2)


def test_a_publisher_that_keeps_nothing_is_followed_partial() -> None:
    cursor = PlainCursor(has_replay=True)
    cursor.connected()
    cursor.answer_ended(1)
    cursor.live(4, b"4")
    cursor.answer_ended(2)
    cursor.probe()
    cursor.answer_ended(3)
    assert kinds(cursor.live(5, b"5")) == [Clear, Apply]
    assert cursor.state is StreamState.PARTIAL


def test_a_repeated_batch_within_an_answer_is_dropped() -> None:
    cursor = opened()
    cursor.live(4, b"4")
    for seq in (2, 3, 2, 3):
        cursor.answered(2, seq, b"%d" % seq)
    cursor.answered(2, 4, b"4")
    cursor.answer_ended(2)
    assert (cursor.state, cursor.last_seq, cursor.counters.duplicates) == (StreamState.LIVE, 4, 2)


def test_a_lost_connection_closes_the_question() -> None:
    cursor = opened()
    cursor.live(5, b"5")
    cursor.disconnected()
    assert cursor.answered(2, 3, b"3") == ()
    assert cursor.open_ask is None
    assert cursor.connected() == (AskReplay(3, 2),)


def test_without_replay_a_reconnect_begins_anew() -> None:
    cursor = opened(has_replay=False)
    cursor.disconnected()
    assert kinds(cursor.connected()) == [Clear]
    assert kinds(cursor.live(3, b"new 3")) == [Clear, Apply]
    assert cursor.state is StreamState.PARTIAL


def test_batches_that_waited_during_their_own_replay_raise_no_question() -> None:
    cursor = PlainCursor(has_replay=True)
    cursor.connected()
    for seq in range(100):
        cursor.answered(1, seq, b"%d" % seq)
    cursor.answer_ended(1)
    for seq in range(40, 100):
        assert cursor.live(seq, b"%d" % seq) == ()
    assert kinds(cursor.live(100, b"100")) == [Apply]
    assert (cursor.counters.asks, cursor.counters.duplicates) == (1, 1)


def test_a_live_channel_that_goes_back_raises_one() -> None:
    cursor = opened()
    cursor.live(3, b"3")
    assert kinds(cursor.live(1, b"1")) == [AskReplay]


@pytest.mark.parametrize("first", [2, 3, 9], ids=["tail lost", "held batch gone", "window moved on"])
def test_a_probe_that_brings_news_takes_the_live_state_until_its_end(first: int) -> None:
    cursor = opened()
    cursor.probe()
    assert cursor.state is StreamState.LIVE
    for seq in range(first, 11):
        cursor.answered(2, seq, b"%d" % seq)
    assert cursor.state is StreamState.RECOVERING
    cursor.answer_ended(2)
    assert cursor.state is (StreamState.LIVE if first == 2 else StreamState.PARTIAL)
