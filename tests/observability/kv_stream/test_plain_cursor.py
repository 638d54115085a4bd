"""The plain rules, one per test. ``test_plain_cursor_network`` tests them together on a faulty network."""

from __future__ import annotations

import pytest

from observability.kv_stream import StreamState
from observability.kv_stream.instructions import Apply, Clear, Instruction, RetryLater, SendReplayRequest
from observability.kv_stream.plain_cursor import PlainCursor


def live_cursor(*, has_replay: bool = True, batches: int = 3, patience: int = 3) -> PlainCursor:
    """Return a cursor at batch ``batches - 1`` of a publisher that sends b'0', b'1', ...; LIVE if it has replay."""
    cursor = PlainCursor(has_replay=has_replay, patience=patience)
    cursor.on_connected()
    if has_replay:
        for seq in range(batches):
            cursor.on_replay_batch(1, seq, b"%d" % seq)
        cursor.on_replay_end(1)
    else:
        for seq in range(batches):
            cursor.on_live_batch(seq, b"%d" % seq)
    assert cursor.state is (StreamState.LIVE if has_replay else StreamState.PARTIAL)
    return cursor


def kinds(instructions: tuple[Instruction, ...]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def test_a_late_join_requests_from_zero() -> None:
    cursor = PlainCursor(has_replay=True)
    assert cursor.on_connected() == (SendReplayRequest(1, 0),)
    assert cursor.state is StreamState.SYNCING
    assert not cursor.is_accepting_live


def test_an_empty_stream_stays_syncing_until_its_first_batch() -> None:
    cursor = PlainCursor(has_replay=True)
    cursor.on_connected()
    assert cursor.on_replay_end(1) == ()
    assert cursor.state is StreamState.SYNCING
    assert cursor.is_accepting_live
    assert kinds(cursor.on_live_batch(0, b"0")) == [Apply]
    assert cursor.state is StreamState.LIVE


def test_a_gap_is_requested_from_the_held_number() -> None:
    cursor = live_cursor()
    assert cursor.on_live_batch(5, b"5") == (SendReplayRequest(2, 2),)
    assert cursor.state is StreamState.RECOVERING
    assert cursor.on_replay_batch(2, 2, b"2") == ()
    for seq in (3, 4, 5):
        assert cursor.on_replay_batch(2, seq, b"%d" % seq) == (Apply(seq, b"%d" % seq, True),)
    cursor.on_replay_end(2)
    assert (cursor.state, cursor.last_seq, cursor.counters.gaps) == (StreamState.LIVE, 5, 1)


def test_another_payload_under_the_held_number_is_a_restart() -> None:
    cursor = live_cursor()
    cursor.on_disconnected()
    assert cursor.on_connected() == (SendReplayRequest(2, 2),)
    assert kinds(cursor.on_replay_batch(2, 2, b"new 2")) == [Clear, SendReplayRequest]
    assert cursor.counters.restarts == 1


def test_a_restart_at_zero_without_a_reconnect_is_detected() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(3, b"3")
    assert kinds(cursor.on_live_batch(0, b"new 0")) == [SendReplayRequest]
    assert kinds(cursor.on_replay_end(2)) == [Clear, SendReplayRequest]
    cursor.on_replay_batch(3, 0, b"new 0")
    cursor.on_replay_end(3)
    assert (cursor.state, cursor.last_seq) == (StreamState.LIVE, 0)


def test_a_truncated_replay_buffer_is_partial_until_a_clear() -> None:
    cursor = PlainCursor(has_replay=True)
    cursor.on_connected()
    cursor.on_replay_batch(1, 7, b"7")
    cursor.on_replay_end(1)
    assert (cursor.state, cursor.counters.losses) == (StreamState.PARTIAL, 1)
    cursor.on_live_batch(8, b"clear")
    cursor.on_clear_applied()
    assert cursor.state is StreamState.LIVE


def test_a_batch_from_the_future_is_not_kept() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(4, b"4")
    assert cursor.on_live_batch(5, b"5") == ()
    cursor.on_replay_batch(2, 2, b"2")
    cursor.on_replay_batch(2, 3, b"3")
    assert cursor.on_replay_end(2) == (SendReplayRequest(3, 3),)
    assert cursor.last_seq == 3


def test_the_same_hole_twice_is_a_loss() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(6, b"6")
    for request_id in (2, 3):
        cursor.on_replay_batch(request_id, 2, b"2")
        instructions = cursor.on_replay_batch(request_id, 5, b"5")
        if request_id == 2:
            assert instructions == ()
            assert cursor.on_replay_end(2) == (SendReplayRequest(3, 2),)
    assert kinds(instructions) == [Clear, Apply]
    cursor.on_replay_batch(3, 6, b"6")
    cursor.on_replay_end(3)
    assert (cursor.state, cursor.last_seq) == (StreamState.PARTIAL, 6)


def test_a_silent_replay_channel_ends_in_partial_and_is_retried() -> None:
    cursor = live_cursor(patience=2)
    cursor.on_live_batch(5, b"5")
    assert cursor.on_replay_timeout(2) == (RetryLater(1),)
    assert cursor.state is StreamState.RECOVERING
    assert cursor.on_retry_due() == (SendReplayRequest(3, 2),)
    assert kinds(cursor.on_replay_timeout(3)) == [Clear, RetryLater]
    assert (cursor.state, cursor.is_accepting_live) == (StreamState.PARTIAL, True)
    assert kinds(cursor.on_live_batch(6, b"6")) == [Clear, Apply]
    assert cursor.on_retry_due() == (SendReplayRequest(4, 0),)


def test_unanswered_probes_make_the_view_partial_and_keep_its_blocks() -> None:
    cursor = live_cursor(patience=2)
    assert cursor.on_probe_due() == (SendReplayRequest(2, 2),)
    assert cursor.on_replay_timeout(2) == (RetryLater(1),)
    assert cursor.on_retry_due() == (SendReplayRequest(3, 2),)
    assert cursor.on_replay_timeout(3) == (RetryLater(2),)
    assert cursor.state is StreamState.PARTIAL
    assert kinds(cursor.on_live_batch(3, b"3")) == [Apply]
    cursor.on_clear_applied()
    assert cursor.state is StreamState.PARTIAL
    assert cursor.on_retry_due() == (SendReplayRequest(4, 3),)
    cursor.on_replay_batch(4, 3, b"3")
    cursor.on_replay_end(4)
    assert cursor.state is StreamState.LIVE


def test_an_empty_stream_with_a_silent_replay_channel_accepts_live_batches() -> None:
    cursor = PlainCursor(has_replay=True, patience=1)
    cursor.on_connected()
    cursor.on_replay_end(1)
    cursor.on_probe_due()
    cursor.on_replay_timeout(2)
    assert (cursor.state, cursor.is_accepting_live) == (StreamState.PARTIAL, True)


def test_a_request_follows_a_lost_end_marker() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(5, b"5")
    cursor.on_replay_batch(2, 2, b"2")
    cursor.on_replay_batch(2, 3, b"3")
    assert cursor.on_replay_timeout(2) == (SendReplayRequest(3, 3),)


def test_answers_to_an_older_request_change_nothing() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(5, b"5")
    assert cursor.on_replay_batch(1, 3, b"wrong") == ()
    assert cursor.on_replay_end(1) == ()
    assert cursor.on_replay_timeout(1) == ()
    assert (cursor.open_request_id, cursor.counters.stale_replays) == (2, 1)


@pytest.mark.parametrize("first", [0, 9])
def test_without_replay_nothing_proves_that_no_batch_was_lost(first: int) -> None:
    cursor = PlainCursor(has_replay=False)
    cursor.on_connected()
    assert cursor.state is StreamState.PARTIAL
    cursor.on_live_batch(first, b"first")
    cursor.on_clear_applied()
    assert cursor.state is StreamState.PARTIAL


def test_without_replay_a_gap_clears_and_stays_partial() -> None:
    cursor = live_cursor(has_replay=False)
    assert kinds(cursor.on_live_batch(5, b"5")) == [Clear, Apply]
    assert (cursor.state, cursor.counters.gaps) == (StreamState.PARTIAL, 1)


def test_an_unreadable_batch_makes_the_view_partial_until_a_clear() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(3, b"3")
    cursor.on_batch_damaged()
    assert cursor.state is StreamState.PARTIAL
    cursor.on_live_batch(4, b"4")
    assert cursor.state is StreamState.PARTIAL
    cursor.on_live_batch(5, b"5")
    cursor.on_clear_applied()
    assert cursor.state is StreamState.LIVE


def test_a_dead_publisher_is_cleared_and_may_reconnect() -> None:
    cursor = live_cursor()
    cursor.on_disconnected()
    assert kinds(cursor.on_connection_timeout()) == [Clear]
    assert cursor.state is StreamState.DEAD
    assert cursor.on_connected() == (SendReplayRequest(2, 0),)


def test_a_repeated_batch_changes_nothing() -> None:
    cursor = live_cursor()
    assert cursor.on_live_batch(2, b"2") == ()
    assert (cursor.state, cursor.counters.duplicates) == (StreamState.LIVE, 1)


def test_the_first_batch_of_a_clock_based_epoch_is_not_a_gap() -> None:
    cursor = PlainCursor(has_replay=True)
    cursor.on_connected()
    cursor.on_replay_end(1)
    assert kinds(cursor.on_live_batch(1_700_000_000_000, b"clear")) == [SendReplayRequest]
    cursor.on_replay_batch(2, 1_700_000_000_000, b"clear")
    cursor.on_clear_applied()
    cursor.on_replay_end(2)
    assert (cursor.state, cursor.counters.gaps) == (StreamState.LIVE, 0)


def test_a_replay_buffer_after_the_held_number_is_a_loss() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(9, b"9")
    assert cursor.on_replay_batch(2, 8, b"8") == (
        Clear("history before batch 8 is not known"),
        Apply(8, b"8", True),
    )
    cursor.on_replay_end(2)
    assert (cursor.state, cursor.counters.replays_asked) == (StreamState.PARTIAL, 2)


def test_a_publisher_that_keeps_nothing_is_followed_partial() -> None:
    cursor = PlainCursor(has_replay=True)
    cursor.on_connected()
    cursor.on_replay_end(1)
    cursor.on_live_batch(4, b"4")
    cursor.on_replay_end(2)
    cursor.on_probe_due()
    cursor.on_replay_end(3)
    assert kinds(cursor.on_live_batch(5, b"5")) == [Clear, Apply]
    assert cursor.state is StreamState.PARTIAL


def test_a_repeated_batch_within_an_answer_is_dropped() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(4, b"4")
    for seq in (2, 3, 2, 3):
        cursor.on_replay_batch(2, seq, b"%d" % seq)
    cursor.on_replay_batch(2, 4, b"4")
    cursor.on_replay_end(2)
    assert (cursor.state, cursor.last_seq, cursor.counters.duplicates) == (StreamState.LIVE, 4, 2)


def test_a_lost_connection_closes_the_request() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(5, b"5")
    cursor.on_disconnected()
    assert cursor.on_replay_batch(2, 3, b"3") == ()
    assert cursor.open_request_id is None
    assert cursor.on_connected() == (SendReplayRequest(3, 2),)


def test_without_replay_a_reconnect_clears_the_view() -> None:
    cursor = live_cursor(has_replay=False)
    cursor.on_disconnected()
    assert kinds(cursor.on_connected()) == [Clear]
    assert kinds(cursor.on_live_batch(3, b"new 3")) == [Clear, Apply]
    assert cursor.state is StreamState.PARTIAL


def test_batches_delivered_by_a_replay_cause_no_request() -> None:
    cursor = PlainCursor(has_replay=True)
    cursor.on_connected()
    for seq in range(100):
        cursor.on_replay_batch(1, seq, b"%d" % seq)
    cursor.on_replay_end(1)
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
    cursor.on_probe_due()
    assert cursor.state is StreamState.LIVE
    for seq in range(first, 11):
        cursor.on_replay_batch(2, seq, b"%d" % seq)
    assert cursor.state is StreamState.RECOVERING
    cursor.on_replay_end(2)
    assert cursor.state is (StreamState.LIVE if first == 2 else StreamState.PARTIAL)
