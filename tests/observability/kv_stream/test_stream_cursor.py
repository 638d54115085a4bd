"""How the cursor detects whether a publisher has the replay extension, and changes its rules when that changes."""

from __future__ import annotations

import pytest
from kit.stream_cursor import OLD, at, live_cursor, meta, receive_snapshot

from observability.kv_stream import StreamCursor, StreamState
from observability.kv_stream.cursor_events import (
    Connected,
    CreditAvailable,
    Disconnected,
    ExtensionProbeDue,
    ProbeDue,
    ReplayBatchReceived,
    ReplayEndReceived,
    ReplayMetaReceived,
    ReplayTimedOut,
    RetryDue,
)
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
    cursor.handle(Connected())
    assert (cursor.handle(ReplayTimedOut(1)) if is_silent else cursor.handle(ReplayEndReceived(1))) == (
        SendReplayRequest(2, 0),
        ProbeExtensionLater(1 if is_silent else 2),
    )
    cursor.handle(ReplayBatchReceived(2, 0, b"0"))
    cursor.handle(ReplayEndReceived(2))
    assert (cursor.state, cursor.is_extended) == (StreamState.LIVE, False)


def test_a_silent_publisher_is_probed_for_the_extension_soon_because_it_may_be_slow() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.handle(Connected())
    assert cursor.is_asking_for_extension
    cursor.handle(ReplayTimedOut(1))
    assert not cursor.is_asking_for_extension
    cursor.handle(ReplayBatchReceived(2, 0, b"0"))
    cursor.handle(ReplayEndReceived(2))
    assert cursor.handle(ExtensionProbeDue()) == (SendReplayRequest(3, 0, ReplayVerb.STATUS), ProbeExtensionLater(1))
    assert (cursor.is_asking_for_extension, cursor.is_accepting_live) == (True, True)
    assert cursor.handle(ReplayTimedOut(3)) == (ProbeExtensionLater(1),)
    assert (cursor.is_asking_for_extension, cursor.counters.replays_unanswered) == (False, 0)
    assert cursor.handle(ProbeDue()) == (SendReplayRequest(4, 0),)


def test_a_slow_publisher_with_the_extension_has_the_whole_time_for_its_snapshot() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.handle(Connected())
    cursor.handle(ReplayTimedOut(1))
    cursor.handle(ReplayBatchReceived(2, 0, b"0"))
    cursor.handle(ReplayEndReceived(2))
    cursor.handle(ExtensionProbeDue())
    meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3))
    assert (cursor.open_request_id, cursor.is_asking_for_extension) == (4, False)
    receive_snapshot(cursor, at(OLD, 3))
    assert (cursor.state, cursor.is_extended) == (StreamState.LIVE, True)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_successor_that_refuses_the_extension_is_followed_plainly(is_silent: bool) -> None:
    cursor = live_cursor()
    cursor.handle(Disconnected())
    instructions = cursor.handle(Connected())
    for attempt in range(3):
        assert not cursor.is_asking_for_extension
        request_id = cursor.open_request_id or 0
        answer = ReplayTimedOut(request_id) if is_silent else ReplayEndReceived(request_id)
        instructions = cursor.handle(answer)
        if attempt < 2:
            assert instructions == (RetryLater(attempt + 1),)
            instructions = cursor.handle(RetryDue())
    assert instructions[0] == Clear("the publisher answers no request of the extension")
    assert isinstance(instructions[1], SendReplayRequest)
    assert instructions[1].verb is None


def test_each_refusal_doubles_the_pause_up_to_eight_intervals_and_a_connection_resets_it() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.handle(Connected())
    cursor.handle(ReplayEndReceived(1))
    cursor.handle(ReplayEndReceived(2))
    pauses = []
    for request_id in range(3, 8):
        request, _ = cursor.handle(ExtensionProbeDue())
        assert request == SendReplayRequest(request_id, 0, ReplayVerb.STATUS)
        pauses += cursor.handle(ReplayEndReceived(request_id))
    assert pauses == [ProbeExtensionLater(intervals) for intervals in (4, 8, 8, 8, 8)]
    cursor.handle(Disconnected())
    assert cursor.handle(Connected()) == (SendReplayRequest(8, 0), ProbeExtensionLater(1))


def test_live_batches_do_not_keep_a_plain_reader_from_the_extension() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.handle(Connected())
    cursor.handle(ReplayTimedOut(1))
    cursor.handle(ReplayBatchReceived(2, 7, b"7"))
    cursor.handle(ReplayEndReceived(2))
    assert cursor.state is StreamState.PARTIAL  # its history begins at batch 7
    cursor.handle(ExtensionProbeDue())
    cursor.on_live_batch(8, b"8")
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3)) == (SendReplayRequest(4, 0, ReplayVerb.SYNC, NO_EPOCH),)
    receive_snapshot(cursor, at(OLD, 3))
    assert (cursor.is_extended, cursor.state) == (True, StreamState.LIVE)


def test_after_a_probe_has_shown_the_extension_a_lost_request_is_sent_again() -> None:
    cursor = plain_cursor()
    cursor.handle(ExtensionProbeDue())
    meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3))
    assert cursor.handle(ReplayTimedOut(5)) == (RetryLater(1),)
    assert cursor.handle(RetryDue()) == (SendReplayRequest(6, 0, ReplayVerb.SYNC, NO_EPOCH),)


def test_a_probe_for_the_extension_waits_for_the_open_plain_request() -> None:
    cursor = plain_cursor()
    cursor.on_live_batch(2, b"2")
    assert cursor.handle(ExtensionProbeDue()) == ()
    cursor.handle(ReplayBatchReceived(4, 0, b"0"))
    cursor.handle(ReplayBatchReceived(4, 1, b"1"))
    cursor.handle(ReplayBatchReceived(4, 2, b"2"))
    assert cursor.handle(ReplayEndReceived(4)) == (
        SendReplayRequest(5, 0, ReplayVerb.STATUS),
        ProbeExtensionLater(1),
    )
    assert cursor.on_live_batch(9, b"9") == (SendReplayRequest(6, 2),)  # a gap replaces it
    assert cursor.handle(ReplayEndReceived(5)) == ()


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_plain_probe_that_is_due_follows_the_probe_for_the_extension(is_silent: bool) -> None:
    cursor = plain_cursor()
    cursor.handle(ExtensionProbeDue())
    assert cursor.handle(ProbeDue()) == ()
    answer = ReplayTimedOut(4) if is_silent else ReplayEndReceived(4)
    assert cursor.handle(answer) == (SendReplayRequest(5, 0), ProbeExtensionLater(1 if is_silent else 2))
    cursor.handle(ReplayBatchReceived(5, 0, b"0"))
    cursor.handle(ReplayEndReceived(5))
    assert cursor.state is StreamState.LIVE


def test_a_successor_without_the_extension_is_followed_plainly_from_an_empty_view() -> None:
    cursor = live_cursor()
    cursor.handle(Disconnected())
    cursor.handle(Connected())
    assert cursor.handle(ReplayEndReceived(2)) == (RetryLater(1),)
    cursor.handle(RetryDue())
    assert cursor.handle(ReplayEndReceived(3)) == (RetryLater(2),)
    cursor.handle(RetryDue())
    cleared, request, _ = cursor.handle(ReplayEndReceived(4))
    assert isinstance(cleared, Clear)
    assert request == SendReplayRequest(5, 0)


def test_cut_answers_of_an_extended_publisher_keep_the_extended_rules() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(5, b"future")
    for request_id in range(2, 9):
        assert cursor.handle(ReplayEndReceived(request_id)) == (RetryLater(request_id - 1),)
        cursor.handle(RetryDue())
    assert cursor.is_extended
    assert cursor.state is StreamState.RECOVERING


def plain_cursor(*, patience: int = 3) -> StreamCursor:
    """Return a cursor that is LIVE by the plain rules with batch 0, on its second connection."""
    cursor = StreamCursor(has_replay=True, patience=patience)
    cursor.handle(Connected())
    cursor.handle(ReplayEndReceived(1))
    cursor.handle(ReplayBatchReceived(2, 0, b"0"))
    cursor.handle(ReplayEndReceived(2))
    cursor.handle(Disconnected())
    cursor.handle(Connected())
    cursor.handle(ReplayBatchReceived(3, 0, b"0"))
    cursor.handle(ReplayEndReceived(3))
    return cursor


def test_the_plain_rules_share_the_patience_and_the_credit() -> None:
    cursor = plain_cursor(patience=1)
    cursor.credit.available = 0
    assert cursor.on_live_batch(2, b"2") == ()
    assert (cursor.state, cursor.open_request_id) == (StreamState.RECOVERING, None)
    cursor.credit.available = 1
    assert cursor.handle(CreditAvailable()) == (SendReplayRequest(4, 0),)
    assert cursor.handle(ReplayTimedOut(4)) == (Clear("the replay channel does not answer"), RetryLater(1))
    assert cursor.state is StreamState.PARTIAL


def test_only_the_answer_to_the_probe_shows_the_extension() -> None:
    cursor = plain_cursor()
    here = at(OLD, 1)
    message = ReplayMeta(request_token(4), OLD, 0, 1, ReplayMetaKind.STATUS, False, 1, here.digest)
    assert cursor.handle(ReplayMetaReceived(3, message)) == cursor.handle(ReplayMetaReceived(4, message)) == ()
    assert cursor.handle(ExtensionProbeDue())[0] == SendReplayRequest(4, 0, ReplayVerb.STATUS)
    assert cursor.handle(ReplayMetaReceived(3, message)) == ()
    assert (cursor.counters.stale_replays, cursor.is_extended) == (3, False)
    assert cursor.handle(ReplayMetaReceived(4, message)) == (SendReplayRequest(5, 0, ReplayVerb.SYNC, NO_EPOCH),)


def test_a_publisher_that_had_the_extension_is_probed_for_it_in_every_interval() -> None:
    cursor = live_cursor()
    cursor.handle(Disconnected())
    cursor.handle(Connected())
    for request_id in (2, 3, 4):
        cursor.handle(ReplayEndReceived(request_id))
        cursor.handle(RetryDue())
    cursor.handle(ReplayBatchReceived(5, 0, b"0"))
    cursor.handle(ReplayEndReceived(5))
    for request_id in (6, 7, 8):
        assert cursor.handle(ExtensionProbeDue())[0] == SendReplayRequest(request_id, 0, ReplayVerb.STATUS)
        assert cursor.handle(ReplayEndReceived(request_id)) == (ProbeExtensionLater(1),)


def test_there_is_no_probe_without_a_connection_or_without_replay() -> None:
    cursor = plain_cursor()
    cursor.handle(Disconnected())
    for event in (ProbeDue(), ExtensionProbeDue()):
        assert cursor.handle(event) == ()
    alone = StreamCursor(has_replay=False)
    (cleared,) = alone.handle(Connected())
    assert isinstance(cleared, Clear)
    alone.on_live_batch(0, b"0")
    assert alone.handle(ProbeDue()) == ()
