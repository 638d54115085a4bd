"""The plain rules, one per test. ``test_plain_cursor_network`` tests them together on a faulty network."""

from __future__ import annotations

import pytest

from observability.kv_stream import StreamState
from observability.kv_stream.cursor_events import (
    BatchDamaged,
    ClearApplied,
    Connected,
    ConnectionTimedOut,
    Disconnected,
    ProbeDue,
    ReplayBatchReceived,
    ReplayEndReceived,
    ReplayTimedOut,
    RetryDue,
)
from observability.kv_stream.instructions import Apply, Clear, Instruction, RetryLater, SendReplayRequest
from observability.kv_stream.plain_cursor import PlainCursor
from observability.kv_stream.stream_cursor import dispatch


def live_cursor(*, has_replay: bool = True, batches: int = 3, patience: int = 3) -> PlainCursor:
    """Return a cursor at batch ``batches - 1`` of a publisher that sends b'0', b'1', ...; LIVE if it has replay."""
    cursor = PlainCursor(has_replay=has_replay, patience=patience)
    dispatch(cursor, Connected())
    if has_replay:
        for seq in range(batches):
            dispatch(cursor, ReplayBatchReceived(1, seq, b"%d" % seq))
        dispatch(cursor, ReplayEndReceived(1))
    else:
        for seq in range(batches):
            cursor.on_live_batch(seq, b"%d" % seq)
    assert cursor.state is (StreamState.LIVE if has_replay else StreamState.PARTIAL)
    return cursor


def kinds(instructions: tuple[Instruction, ...]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def test_a_late_join_requests_from_zero() -> None:
    cursor = PlainCursor(has_replay=True)
    assert dispatch(cursor, Connected()) == (SendReplayRequest(1, 0),)
    assert cursor.state is StreamState.SYNCING
    assert not cursor.is_accepting_live


def test_an_empty_stream_stays_syncing_until_its_first_batch() -> None:
    cursor = PlainCursor(has_replay=True)
    dispatch(cursor, Connected())
    assert dispatch(cursor, ReplayEndReceived(1)) == ()
    assert cursor.state is StreamState.SYNCING
    assert cursor.is_accepting_live
    assert kinds(cursor.on_live_batch(0, b"0")) == [Apply]
    assert cursor.state is StreamState.LIVE


def test_a_gap_is_requested_from_the_held_number() -> None:
    cursor = live_cursor()
    assert cursor.on_live_batch(5, b"5") == (SendReplayRequest(2, 2),)
    assert cursor.state is StreamState.RECOVERING
    assert dispatch(cursor, ReplayBatchReceived(2, 2, b"2")) == ()
    for seq in (3, 4, 5):
        assert dispatch(cursor, ReplayBatchReceived(2, seq, b"%d" % seq)) == (Apply(seq, b"%d" % seq, True),)
    dispatch(cursor, ReplayEndReceived(2))
    assert (cursor.state, cursor.last_seq, cursor.counters.gaps) == (StreamState.LIVE, 5, 1)


def test_another_payload_under_the_held_number_is_a_restart() -> None:
    cursor = live_cursor()
    dispatch(cursor, Disconnected())
    assert dispatch(cursor, Connected()) == (SendReplayRequest(2, 2),)
    assert kinds(dispatch(cursor, ReplayBatchReceived(2, 2, b"new 2"))) == [Clear, SendReplayRequest]
    assert cursor.counters.restarts == 1


def test_a_restart_at_zero_without_a_reconnect_is_detected() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(3, b"3")
    assert kinds(cursor.on_live_batch(0, b"new 0")) == [SendReplayRequest]
    assert kinds(dispatch(cursor, ReplayEndReceived(2))) == [Clear, SendReplayRequest]
    dispatch(cursor, ReplayBatchReceived(3, 0, b"new 0"))
    dispatch(cursor, ReplayEndReceived(3))
    assert (cursor.state, cursor.last_seq) == (StreamState.LIVE, 0)


def test_a_truncated_replay_buffer_is_partial_until_a_clear() -> None:
    cursor = PlainCursor(has_replay=True)
    dispatch(cursor, Connected())
    dispatch(cursor, ReplayBatchReceived(1, 7, b"7"))
    dispatch(cursor, ReplayEndReceived(1))
    assert (cursor.state, cursor.counters.losses) == (StreamState.PARTIAL, 1)
    cursor.on_live_batch(8, b"clear")
    dispatch(cursor, ClearApplied())
    assert cursor.state is StreamState.LIVE


def test_a_batch_from_the_future_is_not_kept() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(4, b"4")
    assert cursor.on_live_batch(5, b"5") == ()
    dispatch(cursor, ReplayBatchReceived(2, 2, b"2"))
    dispatch(cursor, ReplayBatchReceived(2, 3, b"3"))
    assert dispatch(cursor, ReplayEndReceived(2)) == (SendReplayRequest(3, 3),)
    assert cursor.last_seq == 3


def test_the_same_hole_twice_is_a_loss() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(6, b"6")
    for request_id in (2, 3):
        dispatch(cursor, ReplayBatchReceived(request_id, 2, b"2"))
        instructions = dispatch(cursor, ReplayBatchReceived(request_id, 5, b"5"))
        if request_id == 2:
            assert instructions == ()
            assert dispatch(cursor, ReplayEndReceived(2)) == (SendReplayRequest(3, 2),)
    assert kinds(instructions) == [Clear, Apply]
    dispatch(cursor, ReplayBatchReceived(3, 6, b"6"))
    dispatch(cursor, ReplayEndReceived(3))
    assert (cursor.state, cursor.last_seq) == (StreamState.PARTIAL, 6)


def test_a_silent_replay_channel_ends_in_partial_and_is_retried() -> None:
    cursor = live_cursor(patience=2)
    cursor.on_live_batch(5, b"5")
    assert dispatch(cursor, ReplayTimedOut(2)) == (RetryLater(1),)
    assert cursor.state is StreamState.RECOVERING
    assert dispatch(cursor, RetryDue()) == (SendReplayRequest(3, 2),)
    assert kinds(dispatch(cursor, ReplayTimedOut(3))) == [Clear, RetryLater]
    assert (cursor.state, cursor.is_accepting_live) == (StreamState.PARTIAL, True)
    assert kinds(cursor.on_live_batch(6, b"6")) == [Clear, Apply]
    assert dispatch(cursor, RetryDue()) == (SendReplayRequest(4, 0),)


def test_unanswered_probes_make_the_view_partial_and_keep_its_blocks() -> None:
    cursor = live_cursor(patience=2)
    assert dispatch(cursor, ProbeDue()) == (SendReplayRequest(2, 2),)
    assert dispatch(cursor, ReplayTimedOut(2)) == (RetryLater(1),)
    assert dispatch(cursor, RetryDue()) == (SendReplayRequest(3, 2),)
    assert dispatch(cursor, ReplayTimedOut(3)) == (RetryLater(2),)
    assert cursor.state is StreamState.PARTIAL
    assert kinds(cursor.on_live_batch(3, b"3")) == [Apply]
    dispatch(cursor, ClearApplied())
    assert cursor.state is StreamState.PARTIAL
    assert dispatch(cursor, RetryDue()) == (SendReplayRequest(4, 3),)
    dispatch(cursor, ReplayBatchReceived(4, 3, b"3"))
    dispatch(cursor, ReplayEndReceived(4))
    assert cursor.state is StreamState.LIVE


def test_an_empty_stream_with_a_silent_replay_channel_accepts_live_batches() -> None:
    cursor = PlainCursor(has_replay=True, patience=1)
    dispatch(cursor, Connected())
    dispatch(cursor, ReplayEndReceived(1))
    dispatch(cursor, ProbeDue())
    dispatch(cursor, ReplayTimedOut(2))
    assert (cursor.state, cursor.is_accepting_live) == (StreamState.PARTIAL, True)


def test_a_request_follows_a_lost_end_marker() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(5, b"5")
    dispatch(cursor, ReplayBatchReceived(2, 2, b"2"))
    dispatch(cursor, ReplayBatchReceived(2, 3, b"3"))
    assert dispatch(cursor, ReplayTimedOut(2)) == (SendReplayRequest(3, 3),)


def test_answers_to_an_older_request_change_nothing() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(5, b"5")
    assert dispatch(cursor, ReplayBatchReceived(1, 3, b"wrong")) == ()
    assert dispatch(cursor, ReplayEndReceived(1)) == ()
    assert dispatch(cursor, ReplayTimedOut(1)) == ()
    assert (cursor.open_request_id, cursor.counters.stale_replays) == (2, 1)


@pytest.mark.parametrize("first", [0, 9])
def test_without_replay_nothing_proves_that_no_batch_was_lost(first: int) -> None:
    cursor = PlainCursor(has_replay=False)
    dispatch(cursor, Connected())
    assert cursor.state is StreamState.PARTIAL
    cursor.on_live_batch(first, b"first")
    dispatch(cursor, ClearApplied())
    assert cursor.state is StreamState.PARTIAL


def test_without_replay_a_gap_clears_and_stays_partial() -> None:
    cursor = live_cursor(has_replay=False)
    assert kinds(cursor.on_live_batch(5, b"5")) == [Clear, Apply]
    assert (cursor.state, cursor.counters.gaps) == (StreamState.PARTIAL, 1)


def test_an_unreadable_batch_makes_the_view_partial_until_a_clear() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(3, b"3")
    dispatch(cursor, BatchDamaged())
    assert cursor.state is StreamState.PARTIAL
    cursor.on_live_batch(4, b"4")
    assert cursor.state is StreamState.PARTIAL
    cursor.on_live_batch(5, b"5")
    dispatch(cursor, ClearApplied())
    assert cursor.state is StreamState.LIVE


def test_a_dead_publisher_is_cleared_and_may_reconnect() -> None:
    cursor = live_cursor()
    dispatch(cursor, Disconnected())
    assert kinds(dispatch(cursor, ConnectionTimedOut())) == [Clear]
    assert cursor.state is StreamState.DEAD
    assert dispatch(cursor, Connected()) == (SendReplayRequest(2, 0),)


def test_a_repeated_batch_changes_nothing() -> None:
    cursor = live_cursor()
    assert cursor.on_live_batch(2, b"2") == ()
    assert (cursor.state, cursor.counters.duplicates) == (StreamState.LIVE, 1)


def test_the_first_batch_of_a_clock_based_epoch_is_not_a_gap() -> None:
    cursor = PlainCursor(has_replay=True)
    dispatch(cursor, Connected())
    dispatch(cursor, ReplayEndReceived(1))
    assert kinds(cursor.on_live_batch(1_700_000_000_000, b"clear")) == [SendReplayRequest]
    dispatch(cursor, ReplayBatchReceived(2, 1_700_000_000_000, b"clear"))
    dispatch(cursor, ClearApplied())
    dispatch(cursor, ReplayEndReceived(2))
    assert (cursor.state, cursor.counters.gaps) == (StreamState.LIVE, 0)


def test_a_replay_buffer_after_the_held_number_is_a_loss() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(9, b"9")
    assert dispatch(cursor, ReplayBatchReceived(2, 8, b"8")) == (
        Clear("history before batch 8 is not known"),
        Apply(8, b"8", True),
    )
    dispatch(cursor, ReplayEndReceived(2))
    assert (cursor.state, cursor.counters.replays_asked) == (StreamState.PARTIAL, 2)


def test_a_publisher_that_keeps_nothing_is_followed_partial() -> None:
    cursor = PlainCursor(has_replay=True)
    dispatch(cursor, Connected())
    dispatch(cursor, ReplayEndReceived(1))
    cursor.on_live_batch(4, b"4")
    dispatch(cursor, ReplayEndReceived(2))
    dispatch(cursor, ProbeDue())
    dispatch(cursor, ReplayEndReceived(3))
    assert kinds(cursor.on_live_batch(5, b"5")) == [Clear, Apply]
    assert cursor.state is StreamState.PARTIAL


def test_a_repeated_batch_within_an_answer_is_dropped() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(4, b"4")
    for seq in (2, 3, 2, 3):
        dispatch(cursor, ReplayBatchReceived(2, seq, b"%d" % seq))
    dispatch(cursor, ReplayBatchReceived(2, 4, b"4"))
    dispatch(cursor, ReplayEndReceived(2))
    assert (cursor.state, cursor.last_seq, cursor.counters.duplicates) == (StreamState.LIVE, 4, 2)


def test_a_lost_connection_closes_the_request() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(5, b"5")
    dispatch(cursor, Disconnected())
    assert dispatch(cursor, ReplayBatchReceived(2, 3, b"3")) == ()
    assert cursor.open_request_id is None
    assert dispatch(cursor, Connected()) == (SendReplayRequest(3, 2),)


def test_without_replay_a_reconnect_clears_the_view() -> None:
    cursor = live_cursor(has_replay=False)
    dispatch(cursor, Disconnected())
    assert kinds(dispatch(cursor, Connected())) == [Clear]
    assert kinds(cursor.on_live_batch(3, b"new 3")) == [Clear, Apply]
    assert cursor.state is StreamState.PARTIAL


def test_batches_delivered_by_a_replay_cause_no_request() -> None:
    cursor = PlainCursor(has_replay=True)
    dispatch(cursor, Connected())
    for seq in range(100):
        dispatch(cursor, ReplayBatchReceived(1, seq, b"%d" % seq))
    dispatch(cursor, ReplayEndReceived(1))
    for seq in range(40, 100):
        assert cursor.on_live_batch(seq, b"%d" % seq) == ()
    assert kinds(cursor.on_live_batch(100, b"100")) == [Apply]
    assert (cursor.counters.replays_asked, cursor.counters.duplicates) == (1, 1)


def test_a_live_channel_that_goes_back_causes_a_request() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(3, b"3")
    assert kinds(cursor.on_live_batch(1, b"1")) == [SendReplayRequest]


@pytest.mark.parametrize("first", [2, 3, 9], ids=["tail lost", "held batch gone", "window moved on"])
def test_a_probe_with_new_batches_is_recovering_until_its_end(first: int) -> None:
    cursor = live_cursor()
    dispatch(cursor, ProbeDue())
    assert cursor.state is StreamState.LIVE
    for seq in range(first, 11):
        dispatch(cursor, ReplayBatchReceived(2, seq, b"%d" % seq))
    assert cursor.state is StreamState.RECOVERING
    dispatch(cursor, ReplayEndReceived(2))
    assert cursor.state is (StreamState.LIVE if first == 2 else StreamState.PARTIAL)
