"""How the cursor detects whether a publisher has the replay extension, and changes its rules when that changes."""

from __future__ import annotations

import pytest
from kit.stream_cursor import OLD, at, live_cursor, meta, receive_snapshot

from observability.kv_stream import StreamCursor, StreamState
from observability.kv_stream.digest_cursor import NO_EPOCH
from observability.kv_stream.instructions import (
    Clear,
    ProbeExtensionLater,
    RetryLater,
    SendReplayRequest,
    request_token,
)
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind, ReplayVerb


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_publisher_without_the_extension_gets_plain_requests(is_silent: bool) -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.on_connected()
    assert (cursor.on_replay_timeout(1) if is_silent else cursor.on_replay_end(1)) == (
        SendReplayRequest(2, 0),
        ProbeExtensionLater(1 if is_silent else 2),
    )
    cursor.on_replay_batch(2, 0, b"0")
    cursor.on_replay_end(2)
    assert (cursor.state, cursor.is_extended) == (StreamState.LIVE, False)


def test_a_silent_publisher_is_probed_for_the_extension_soon_because_it_may_be_slow() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.on_connected()
    assert cursor.is_asking_for_extension
    cursor.on_replay_timeout(1)
    assert not cursor.is_asking_for_extension
    cursor.on_replay_batch(2, 0, b"0")
    cursor.on_replay_end(2)
    assert cursor.on_extension_probe_due() == (SendReplayRequest(3, 0, ReplayVerb.STATUS), ProbeExtensionLater(1))
    assert (cursor.is_asking_for_extension, cursor.is_accepting_live) == (True, True)
    assert cursor.on_replay_timeout(3) == (ProbeExtensionLater(1),)
    assert (cursor.is_asking_for_extension, cursor.counters.replays_unanswered) == (False, 0)
    assert cursor.on_probe_due() == (SendReplayRequest(4, 0),)


def test_a_slow_publisher_with_the_extension_has_the_whole_time_for_its_snapshot() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.on_connected()
    cursor.on_replay_timeout(1)
    cursor.on_replay_batch(2, 0, b"0")
    cursor.on_replay_end(2)
    cursor.on_extension_probe_due()
    meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3))
    assert (cursor.open_request_id, cursor.is_asking_for_extension) == (4, False)
    receive_snapshot(cursor, at(OLD, 3))
    assert (cursor.state, cursor.is_extended) == (StreamState.LIVE, True)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_successor_that_refuses_the_extension_is_followed_plainly(is_silent: bool) -> None:
    cursor = live_cursor()
    cursor.on_disconnected()
    instructions = cursor.on_connected()
    for attempt in range(3):
        assert not cursor.is_asking_for_extension
        request_id = cursor.open_request_id or 0
        instructions = cursor.on_replay_timeout(request_id) if is_silent else cursor.on_replay_end(request_id)
        if attempt < 2:
            assert instructions == (RetryLater(attempt + 1),)
            instructions = cursor.on_retry_due()
    assert instructions[0] == Clear("the publisher answers no request of the extension")
    assert isinstance(instructions[1], SendReplayRequest)
    assert instructions[1].verb is None


def test_each_refusal_doubles_the_pause_up_to_eight_intervals_and_a_connection_resets_it() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.on_connected()
    cursor.on_replay_end(1)
    cursor.on_replay_end(2)
    pauses = []
    for request_id in range(3, 8):
        request, _ = cursor.on_extension_probe_due()
        assert request == SendReplayRequest(request_id, 0, ReplayVerb.STATUS)
        pauses += cursor.on_replay_end(request_id)
    assert pauses == [ProbeExtensionLater(intervals) for intervals in (4, 8, 8, 8, 8)]
    cursor.on_disconnected()
    assert cursor.on_connected() == (SendReplayRequest(8, 0), ProbeExtensionLater(1))


def test_live_batches_do_not_keep_a_plain_reader_from_the_extension() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.on_connected()
    cursor.on_replay_timeout(1)
    cursor.on_replay_batch(2, 7, b"7")
    cursor.on_replay_end(2)
    assert cursor.state is StreamState.PARTIAL  # its history begins at batch 7
    cursor.on_extension_probe_due()
    cursor.on_live_batch(8, b"8")
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3)) == (SendReplayRequest(4, 0, ReplayVerb.SYNC, NO_EPOCH),)
    receive_snapshot(cursor, at(OLD, 3))
    assert (cursor.is_extended, cursor.state) == (True, StreamState.LIVE)


def test_after_a_probe_has_shown_the_extension_a_lost_request_is_sent_again() -> None:
    cursor = plain_cursor()
    cursor.on_extension_probe_due()
    meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3))
    assert cursor.on_replay_timeout(5) == (RetryLater(1),)
    assert cursor.on_retry_due() == (SendReplayRequest(6, 0, ReplayVerb.SYNC, NO_EPOCH),)


def test_a_probe_for_the_extension_waits_for_the_open_plain_request() -> None:
    cursor = plain_cursor()
    cursor.on_live_batch(2, b"2")
    assert cursor.on_extension_probe_due() == ()
    cursor.on_replay_batch(4, 0, b"0")
    cursor.on_replay_batch(4, 1, b"1")
    cursor.on_replay_batch(4, 2, b"2")
    assert cursor.on_replay_end(4) == (
        SendReplayRequest(5, 0, ReplayVerb.STATUS),
        ProbeExtensionLater(1),
    )
    assert cursor.on_live_batch(9, b"9") == (SendReplayRequest(6, 2),)  # a gap replaces it
    assert cursor.on_replay_end(5) == ()


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_plain_probe_that_is_due_follows_the_probe_for_the_extension(is_silent: bool) -> None:
    cursor = plain_cursor()
    cursor.on_extension_probe_due()
    assert cursor.on_probe_due() == ()
    instructions = cursor.on_replay_timeout(4) if is_silent else cursor.on_replay_end(4)
    assert instructions == (SendReplayRequest(5, 0), ProbeExtensionLater(1 if is_silent else 2))
    cursor.on_replay_batch(5, 0, b"0")
    cursor.on_replay_end(5)
    assert cursor.state is StreamState.LIVE


def test_a_successor_without_the_extension_is_followed_plainly_from_an_empty_view() -> None:
    cursor = live_cursor()
    cursor.on_disconnected()
    cursor.on_connected()
    assert cursor.on_replay_end(2) == (RetryLater(1),)
    cursor.on_retry_due()
    assert cursor.on_replay_end(3) == (RetryLater(2),)
    cursor.on_retry_due()
    cleared, request, _ = cursor.on_replay_end(4)
    assert isinstance(cleared, Clear)
    assert request == SendReplayRequest(5, 0)


def test_cut_answers_of_an_extended_publisher_keep_the_extended_rules() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(5, b"future")
    for request_id in range(2, 9):
        assert cursor.on_replay_end(request_id) == (RetryLater(request_id - 1),)
        cursor.on_retry_due()
    assert cursor.is_extended
    assert cursor.state is StreamState.RECOVERING


def plain_cursor(*, patience: int = 3) -> StreamCursor:
    """Return a cursor that is LIVE by the plain rules with batch 0, on its second connection."""
    cursor = StreamCursor(has_replay=True, patience=patience)
    cursor.on_connected()
    cursor.on_replay_end(1)
    cursor.on_replay_batch(2, 0, b"0")
    cursor.on_replay_end(2)
    cursor.on_disconnected()
    cursor.on_connected()
    cursor.on_replay_batch(3, 0, b"0")
    cursor.on_replay_end(3)
    return cursor


def test_the_plain_rules_share_the_patience_and_the_credit() -> None:
    cursor = plain_cursor(patience=1)
    cursor.counters.credit = 0
    assert cursor.on_live_batch(2, b"2") == ()
    assert (cursor.state, cursor.open_request_id) == (StreamState.RECOVERING, None)
    cursor.counters.credit = 1
    assert cursor.on_credit_available() == (SendReplayRequest(4, 0),)
    assert cursor.on_replay_timeout(4) == (Clear("the replay channel does not answer"), RetryLater(1))
    assert cursor.state is StreamState.PARTIAL


def test_only_the_answer_to_the_probe_shows_the_extension() -> None:
    cursor = plain_cursor()
    here = at(OLD, 1)
    message = ReplayMeta(request_token(4), OLD, 0, 1, ReplayMetaKind.STATUS, False, 1, here.digest)
    assert cursor.on_replay_meta(3, message) == cursor.on_replay_meta(4, message) == ()
    assert cursor.on_extension_probe_due()[0] == SendReplayRequest(4, 0, ReplayVerb.STATUS)
    assert cursor.on_replay_meta(3, message) == ()
    assert (cursor.counters.stale_replays, cursor.is_extended) == (3, False)
    assert cursor.on_replay_meta(4, message) == (SendReplayRequest(5, 0, ReplayVerb.SYNC, NO_EPOCH),)


def test_a_publisher_that_had_the_extension_is_probed_for_it_in_every_interval() -> None:
    cursor = live_cursor()
    cursor.on_disconnected()
    cursor.on_connected()
    for request_id in (2, 3, 4):
        cursor.on_replay_end(request_id)
        cursor.on_retry_due()
    cursor.on_replay_batch(5, 0, b"0")
    cursor.on_replay_end(5)
    for request_id in (6, 7, 8):
        assert cursor.on_extension_probe_due()[0] == SendReplayRequest(request_id, 0, ReplayVerb.STATUS)
        assert cursor.on_replay_end(request_id) == (ProbeExtensionLater(1),)


def test_there_is_no_probe_without_a_connection_or_without_replay() -> None:
    cursor = plain_cursor()
    cursor.on_disconnected()
    assert cursor.on_probe_due() == cursor.on_extension_probe_due() == ()
    alone = StreamCursor(has_replay=False)
    (cleared,) = alone.on_connected()
    assert isinstance(cleared, Clear)
    alone.on_live_batch(0, b"0")
    assert alone.on_probe_due() == ()
