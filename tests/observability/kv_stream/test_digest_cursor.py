"""The rules of the replay extension: LIVE has a proof, and a lost or wrong message is requested again."""

from __future__ import annotations

import pytest
from kit.stream_cursor import NEW, OLD, at, live_cursor, meta, payload, receive_snapshot

from observability.kv_stream import StreamCursor, StreamState
from observability.kv_stream.digest_cursor import NO_EPOCH
from observability.kv_stream.instructions import (
    Apply,
    ApplyStaged,
    Clear,
    Instruction,
    RetryLater,
    SendReplayRequest,
    Staging,
    request_token,
)
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind, ReplayVerb


def test_an_empty_stream_is_live_after_its_snapshot() -> None:
    assert live_cursor(0).last_seq == -1


def test_live_batches_are_applied_and_duplicates_are_counted() -> None:
    cursor = live_cursor()
    assert cursor.on_live_batch(3, payload(3)) == (Apply(3, payload(3), False),)
    assert cursor.on_live_batch(3, payload(3)) == cursor.on_live_batch(0, b"late") == ()
    assert (cursor.state, cursor.last_seq, cursor.counters.duplicates) == (StreamState.LIVE, 3, 2)


def test_a_gap_requests_batches_from_the_position_of_the_view() -> None:
    cursor = live_cursor()
    assert cursor.on_live_batch(4, b"future") == (SendReplayRequest(2, 3, ReplayVerb.SYNC, OLD),)
    assert (cursor.state, cursor.last_seq) == (StreamState.RECOVERING, 2)
    assert meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3)) == ()
    assert cursor.on_replay_batch(2, 3, payload(3)) == (Apply(3, payload(3), True),)
    assert cursor.on_replay_batch(2, 3, payload(3)) == ()
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 4)) == ()
    assert (cursor.state, cursor.last_seq, cursor.counters.recovered) == (StreamState.LIVE, 3, 1)


def test_an_incremental_answer_from_another_position_is_not_applied() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(4, b"future")
    assert meta(cursor, ReplayMetaKind.BEGIN, at(NEW, 3)) == (SendReplayRequest(3, 3, ReplayVerb.SNAPSHOT, OLD),)
    assert cursor.counters.splices == 1


def test_a_wrong_digest_at_the_end_requests_a_snapshot() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(4, b"future")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    cursor.on_replay_batch(2, 3, b"spliced")
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 4)) == (SendReplayRequest(3, 4, ReplayVerb.SNAPSHOT, OLD),)
    assert cursor.state is StreamState.RECOVERING
    assert receive_snapshot(cursor, at(OLD, 4)) == (Staging.COMMIT,)
    assert cursor.state is StreamState.LIVE


def test_an_answer_without_its_last_batches_is_continued_and_is_no_splice() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(6, b"future")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    cursor.on_replay_batch(2, 3, payload(3))
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 6)) == (SendReplayRequest(3, 4, ReplayVerb.SYNC, OLD),)
    assert (cursor.counters.splices, cursor.counters.replays_cut, cursor.last_seq) == (0, 1, 3)


def test_an_answer_without_its_snapshot_is_requested_again_and_is_no_splice() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(6, b"future")
    assert meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 5), chunks=1) == (RetryLater(1),)
    assert (cursor.counters.splices, cursor.counters.replays_cut, cursor.last_seq) == (0, 1, 2)


def test_another_epoch_replaces_the_view_by_a_snapshot() -> None:
    cursor = live_cursor()
    cursor.on_probe_due()
    assert meta(cursor, ReplayMetaKind.STATUS, at(NEW, 1)) == (SendReplayRequest(3, 3, ReplayVerb.SYNC, OLD),)
    assert receive_snapshot(cursor, at(NEW, 1)) == (Staging.COMMIT,)
    assert (cursor.state, cursor.last_seq, cursor.counters.restarts) == (StreamState.LIVE, 0, 1)


def test_a_status_is_compared_with_the_position_of_its_request() -> None:
    cursor = live_cursor()
    assert cursor.on_probe_due() == (SendReplayRequest(2, 3, ReplayVerb.STATUS, OLD),)
    cursor.on_live_batch(3, payload(3))
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3), next=5) == ()
    assert (cursor.state, cursor.counters.splices, cursor.counters.verified) == (StreamState.LIVE, 0, 2)


def test_lost_last_batches_are_requested() -> None:
    cursor = live_cursor()
    cursor.on_probe_due()
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3), next=4) == (SendReplayRequest(3, 3, ReplayVerb.SYNC, OLD),)
    assert cursor.state is StreamState.RECOVERING


def test_a_position_before_the_replay_buffer_is_verified_at_the_second_probe() -> None:
    cursor = live_cursor()
    cursor.on_probe_due()
    cursor.on_live_batch(3, payload(3))
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 9)) == ()
    cursor.on_probe_due()
    cursor.on_live_batch(4, payload(4))
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 19)) == (SendReplayRequest(4, 5, ReplayVerb.SYNC, OLD),)


def test_a_frame_dropped_during_an_answer_is_requested() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(4, b"future")
    cursor.on_live_batch(5, b"future")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    for seq in (3, 4):
        cursor.on_replay_batch(2, seq, payload(seq))
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 5)) == (SendReplayRequest(3, 5, ReplayVerb.SYNC, OLD),)


@pytest.mark.parametrize("lost", ["chunk 0", "chunk 1", "begin", "a batch"])
def test_a_snapshot_with_a_hole_is_discarded(lost: str) -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.on_connected()
    position = at(OLD, 3)
    meta(cursor, ReplayMetaKind.BEGIN, position, snap=True)
    result: tuple[Instruction, ...] = ()
    if lost == "chunk 0":
        result = cursor.on_replay_batch(1, 1, b"chunk")
    else:
        cursor.on_replay_batch(1, 0, b"chunk")
    if lost == "chunk 1":
        result = meta(cursor, ReplayMetaKind.BEGIN, position, chunks=2)
    elif lost == "begin":
        result = meta(cursor, ReplayMetaKind.END, position)
    elif lost == "a batch":
        meta(cursor, ReplayMetaKind.BEGIN, position, chunks=1)
        result = cursor.on_replay_batch(1, 4, payload(4))
    assert result == (Staging.ABORT, RetryLater(1))
    assert (cursor.state, cursor.open_request_id) == (StreamState.SYNCING, None)


def cursor_with_open(verb: ReplayVerb) -> StreamCursor:
    """Return a cursor at batch 2 with an open request of this kind."""
    cursor = live_cursor()
    if verb is ReplayVerb.STATUS:
        cursor.on_probe_due()
    else:
        cursor.on_live_batch(4, b"future")
    if verb is ReplayVerb.SNAPSHOT:
        meta(cursor, ReplayMetaKind.BEGIN, at(NEW, 3))  # the digest does not match
    return cursor


@pytest.mark.parametrize(
    ("verb", "kind", "snap"),
    [
        (ReplayVerb.STATUS, ReplayMetaKind.BEGIN, False),
        (ReplayVerb.STATUS, ReplayMetaKind.BEGIN, True),
        (ReplayVerb.STATUS, ReplayMetaKind.END, False),
        (ReplayVerb.SYNC, ReplayMetaKind.STATUS, False),
        (ReplayVerb.SYNC, ReplayMetaKind.END, False),
        (ReplayVerb.SNAPSHOT, ReplayMetaKind.STATUS, False),
        (ReplayVerb.SNAPSHOT, ReplayMetaKind.BEGIN, False),
        (ReplayVerb.SNAPSHOT, ReplayMetaKind.END, False),
    ],
)
def test_a_meta_outside_the_grammar_ends_the_answer(verb: ReplayVerb, kind: ReplayMetaKind, snap: bool) -> None:
    cursor = cursor_with_open(verb)
    verified = cursor.counters.verified
    assert meta(cursor, kind, at(OLD, 3), snap=snap) == (RetryLater(1),)
    assert (cursor.open_request_id, cursor.counters.verified, cursor.last_seq) == (None, verified, 2)


@pytest.mark.parametrize(
    ("kind", "snap"), [(ReplayMetaKind.BEGIN, False), (ReplayMetaKind.BEGIN, True), (ReplayMetaKind.STATUS, False)]
)
@pytest.mark.parametrize("verb", [ReplayVerb.SYNC, ReplayVerb.SNAPSHOT])
def test_only_an_end_may_follow_batches(verb: ReplayVerb, kind: ReplayMetaKind, snap: bool) -> None:
    cursor = cursor_with_open(verb)
    if verb is ReplayVerb.SNAPSHOT:
        meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3), snap=True)
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    dropped = (Staging.ABORT,) if verb is ReplayVerb.SNAPSHOT else ()
    assert meta(cursor, kind, at(OLD, 3), snap=snap) == (*dropped, RetryLater(1))


def test_a_payload_before_a_begin_ends_the_answer() -> None:
    for verb in ReplayVerb:
        cursor = cursor_with_open(verb)
        assert cursor.on_replay_batch(cursor.open_request_id or 0, 3, payload(3)) == (RetryLater(1),)


def test_a_cut_status_is_retried_later_although_batches_came() -> None:
    cursor = live_cursor()
    cursor.on_probe_due()
    cursor.on_live_batch(3, payload(3))
    assert cursor.on_replay_end(2) == (RetryLater(1),)
    assert cursor.state is StreamState.LIVE


def test_a_cut_answer_is_continued_from_the_last_applied_batch() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(5, b"future")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    cursor.on_replay_batch(2, 3, payload(3))
    assert cursor.on_replay_end(2) == (SendReplayRequest(3, 4, ReplayVerb.SYNC, OLD),)
    assert cursor.on_replay_timeout(3) == (RetryLater(1),)
    assert cursor.on_retry_due() == (SendReplayRequest(4, 4, ReplayVerb.SYNC, OLD),)


def test_a_silent_publisher_makes_the_view_partial_and_keeps_its_blocks() -> None:
    cursor = live_cursor()
    cursor.on_probe_due()
    for failures in (1, 2, 3):
        assert cursor.on_replay_timeout(cursor.open_request_id or 0) == (RetryLater(failures),)
        assert cursor.state is (StreamState.PARTIAL if failures == 3 else StreamState.LIVE)
        assert cursor.on_retry_due() == (SendReplayRequest(failures + 2, 3, ReplayVerb.STATUS, OLD),)
    cursor.on_live_batch(3, payload(3))
    cursor.on_clear_applied()
    assert (cursor.state, cursor.last_seq) == (StreamState.PARTIAL, 3)
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3), next=4) == ()
    assert cursor.state is StreamState.LIVE


def test_a_snapshot_is_requested_once_it_covers_an_unreadable_batch() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(3, payload(3))
    cursor.on_batch_damaged()
    assert cursor.state is StreamState.PARTIAL
    cursor.on_probe_due()
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), first=3) == ()
    assert cursor.state is StreamState.PARTIAL
    cursor.on_probe_due()
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), first=4) == (
        SendReplayRequest(4, 4, ReplayVerb.SNAPSHOT, OLD),
    )
    receive_snapshot(cursor, at(OLD, 4))
    assert cursor.state is StreamState.LIVE


def test_a_clear_repairs_an_unreadable_batch() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(3, payload(3))
    cursor.on_batch_damaged()
    cursor.on_live_batch(4, payload(4))
    cursor.on_clear_applied()
    assert cursor.state is StreamState.LIVE


def test_an_answer_with_another_token_is_stale() -> None:
    cursor = live_cursor()
    cursor.on_probe_due()
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3), token=bytes(8)) == ()
    assert (cursor.open_request_id, cursor.counters.stale_replays) == (2, 1)


def test_a_reconnect_continues_from_the_position_of_the_view() -> None:
    cursor = live_cursor()
    cursor.on_disconnected()
    assert cursor.state is StreamState.CONNECTING
    assert cursor.on_connected() == (SendReplayRequest(2, 3, ReplayVerb.SYNC, OLD),)
    cursor.on_disconnected()
    assert cursor.on_connection_timeout() == (Clear("the publisher is unreachable"),)
    assert cursor.on_connected() == (SendReplayRequest(3, 0, ReplayVerb.SYNC, NO_EPOCH),)


def test_many_strays_cost_one_request_and_leave_a_correct_view_live() -> None:
    cursor = live_cursor()
    assert cursor.on_live_batch(900, b"stray") == (SendReplayRequest(2, 3, ReplayVerb.SYNC, OLD),)
    assert cursor.state is StreamState.RECOVERING
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    meta(
        cursor, ReplayMetaKind.END, at(OLD, 3)
    )  # the request came after frame 900, and the publisher has not reached it
    cursor.counters.credit = 0
    for seq in range(901, 1_000):
        assert cursor.on_live_batch(seq, b"stray") == ()
        assert (cursor.state, cursor.is_accepting_live) == (StreamState.LIVE, True)
    assert cursor.on_live_batch(3, payload(3)) == (Apply(3, payload(3), False),)
    assert cursor.on_live_batch(5, payload(5)) == ()  # the publisher's own frame after a gap
    cursor.counters.credit = 1
    assert cursor.on_credit_available() == (SendReplayRequest(3, 4, ReplayVerb.STATUS, OLD),)
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), next=6) == (SendReplayRequest(4, 4, ReplayVerb.SYNC, OLD),)
    assert cursor.state is StreamState.RECOVERING


def test_a_gap_without_credit_is_requested_when_credit_is_available() -> None:
    cursor = live_cursor()
    cursor.counters.credit = 0
    assert cursor.on_live_batch(5, payload(5)) == ()
    assert (cursor.state, cursor.is_accepting_live, cursor.is_settled) == (StreamState.RECOVERING, True, False)
    assert cursor.on_live_batch(3, payload(3)) == (Apply(3, payload(3), False),)
    assert cursor.state is StreamState.RECOVERING
    cursor.counters.credit = 1
    assert cursor.on_credit_available() == (SendReplayRequest(2, 4, ReplayVerb.SYNC, OLD),)
    assert cursor.on_credit_available() == ()


def test_a_stream_with_an_upstream_state_is_partial_despite_a_proof() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.on_connected()
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 0), snap=True)
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 0))
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 0), upstream="connecting") == (Staging.COMMIT,)
    assert (cursor.state, cursor.counters.verified) == (StreamState.PARTIAL, 1)
    cursor.on_live_batch(0, payload(0))
    cursor.on_clear_applied()  # the upstream state stays
    assert cursor.state is StreamState.PARTIAL
    cursor.on_probe_due()
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 1)) == ()
    assert cursor.state is StreamState.LIVE
    cursor.on_probe_due()
    cursor.on_live_batch(1, payload(1))
    meta(cursor, ReplayMetaKind.STATUS, at(OLD, 1), first=1, upstream="partial")
    assert cursor.state is StreamState.PARTIAL


def test_repeated_events_are_counted_each_time() -> None:
    cursor = live_cursor()
    for epoch in (NEW, OLD):
        cursor.on_probe_due()
        meta(cursor, ReplayMetaKind.STATUS, at(epoch, 1))
        receive_snapshot(cursor, at(epoch, 1))
    assert (cursor.counters.restarts, cursor.counters.snapshots) == (2, 3)
    for _ in range(2):
        cursor.on_probe_due()
        request_id = cursor.open_request_id or 0
        cursor.on_replay_meta(
            request_id, ReplayMeta(b"another!", OLD, 0, 1, ReplayMetaKind.STATUS, False, 1, at(OLD, 1).digest)
        )
        assert cursor.on_replay_timeout(request_id - 1) == ()
        [later] = cursor.on_replay_timeout(request_id)
        assert isinstance(later, RetryLater)
        cursor.on_retry_due()
        meta(cursor, ReplayMetaKind.STATUS, at(OLD, 1))
    assert (cursor.counters.stale_replays, cursor.counters.replays_unanswered) == (2, 2)
    assert cursor.state is StreamState.LIVE


def test_at_most_one_request_is_open() -> None:
    cursor = live_cursor()
    assert len(cursor.on_probe_due()) == 1
    assert cursor.on_probe_due() == ()
    assert cursor.on_retry_due() == ()


def test_a_clear_repairs_an_unreadable_batch_while_a_request_is_open() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(3, payload(3))
    cursor.on_batch_damaged()
    assert cursor.state is StreamState.PARTIAL
    assert len(cursor.on_probe_due()) == 1
    cursor.on_live_batch(4, payload(4))
    cursor.on_clear_applied()
    assert cursor.state is StreamState.LIVE


def test_a_dead_publisher_gets_no_request_until_it_reconnects() -> None:
    cursor = live_cursor()
    cursor.on_probe_due()
    cursor.on_replay_timeout(cursor.open_request_id or 0)
    [clear] = cursor.on_connection_timeout()
    assert isinstance(clear, Clear)
    assert (cursor.state, cursor.last_seq) == (StreamState.DEAD, -1)
    assert cursor.on_retry_due() == cursor.on_probe_due() == ()
    assert cursor.on_connected() == (SendReplayRequest(3, 0, ReplayVerb.SYNC, NO_EPOCH),)
    assert receive_snapshot(cursor, at(NEW, 2)) == (Staging.COMMIT,)
    assert cursor.state is StreamState.LIVE


def test_each_batch_is_counted_once() -> None:
    cursor = live_cursor()
    for seq in (3, 4):
        cursor.on_live_batch(seq, payload(seq))
    assert (cursor.counters.applied, cursor.counters.recovered) == (2, 0)
    for repeat in (1, 2):
        held = cursor.last_seq
        assert cursor.on_live_batch(held + 3, b"beyond a gap") == (
            SendReplayRequest(repeat + 1, held + 1, ReplayVerb.SYNC, OLD),
        )
        meta(cursor, ReplayMetaKind.BEGIN, at(OLD, held + 1))
        for seq in (held + 1, held + 2, held + 3, held + 3):
            cursor.on_replay_batch(repeat + 1, seq, payload(seq))
        assert cursor.on_replay_batch(1, 0, b"of the first answer") == ()
        meta(cursor, ReplayMetaKind.END, at(OLD, held + 4))
        assert cursor.on_replay_batch(repeat + 1, held + 4, b"after the end") == ()
        late = ReplayMeta(
            request_token(1), OLD, 0, held + 4, ReplayMetaKind.STATUS, False, held + 4, at(OLD, held + 4).digest
        )
        assert cursor.on_replay_meta(repeat + 1, late) == ()
    counters = cursor.counters
    assert (counters.applied, counters.recovered, counters.duplicates, counters.gaps) == (8, 6, 2, 2)
    assert (counters.stale_replays, counters.replays_asked, counters.replays_cut, counters.losses) == (6, 3, 0, 0)
    assert cursor.state is StreamState.LIVE


def test_batches_after_the_chunks_are_staged_as_batches() -> None:
    cursor = StreamCursor(has_replay=True)
    assert cursor.on_live_batch(7, payload(7)) == (
        SendReplayRequest(1, 0, ReplayVerb.SYNC, NO_EPOCH),
    )  # the batch shows that the connection is up
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3), snap=True)
    assert cursor.on_replay_batch(1, 0, b"chunk") == (ApplyStaged(2, b"chunk", True),)
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3), chunks=1)
    assert cursor.on_replay_batch(1, 3, payload(3)) == (ApplyStaged(3, payload(3), False),)
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 4)) == (
        Staging.COMMIT,
        SendReplayRequest(2, 4, ReplayVerb.SYNC, OLD),
    )


def test_a_snapshot_that_contradicts_its_chunks_is_cut_without_a_splice() -> None:
    cursor = live_cursor()
    for cut in (1, 2):
        cursor.on_live_batch(9, b"beyond a gap") if cut == 1 else cursor.on_retry_due()
        meta(cursor, ReplayMetaKind.BEGIN, at(NEW, 5), snap=True)
        assert meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 5)) == (Staging.ABORT, RetryLater(cut))
        assert (cursor.counters.replays_cut, cursor.counters.splices) == (cut, 0)


def test_a_damaged_snapshot_is_requested_again_once_it_is_folded() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.on_connected()
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3), snap=True)
    cursor.on_replay_batch(1, 0, b"chunk")
    cursor.on_batch_damaged()
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3), chunks=1)
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 3)) == (Staging.COMMIT,)
    assert cursor.state is StreamState.PARTIAL
    cursor.on_live_batch(3, payload(3))
    cursor.on_probe_due()
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), first=3) == ()
    assert cursor.state is StreamState.PARTIAL
    cursor.on_probe_due()
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), first=4) == (
        SendReplayRequest(4, 4, ReplayVerb.SNAPSHOT, OLD),
    )


def test_an_upstream_state_counts_even_in_an_unverifiable_status() -> None:
    for upstream, state in ((None, StreamState.LIVE), ("connecting", StreamState.PARTIAL)):
        cursor = live_cursor()
        cursor.on_probe_due()
        cursor.on_live_batch(3, payload(3))
        assert (
            meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), upstream=upstream) == ()
        )  # the next probe verifies the position
        assert cursor.state is state


@pytest.mark.parametrize(("gap_seen", "requests_again"), [(4, True), (5, False)])
def test_a_gap_below_the_publishers_next_number_is_requested(gap_seen: int, requests_again: bool) -> None:
    cursor = live_cursor()
    cursor.on_live_batch(900, b"stray")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    meta(cursor, ReplayMetaKind.END, at(OLD, 3))
    assert cursor.on_live_batch(gap_seen, b"beyond a gap") == (SendReplayRequest(3, 3, ReplayVerb.STATUS, OLD),)
    cursor.on_live_batch(3, payload(3))
    again = (SendReplayRequest(4, 4, ReplayVerb.SYNC, OLD),) if requests_again else ()
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3), next=5) == again


def test_a_frame_at_the_publishers_next_number_is_a_stray() -> None:
    cursor = live_cursor()
    cursor.on_live_batch(4, b"of another epoch")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    cursor.on_replay_batch(2, 3, payload(3))
    meta(cursor, ReplayMetaKind.END, at(OLD, 4))
    assert cursor.on_live_batch(6, b"of another epoch") == (SendReplayRequest(3, 4, ReplayVerb.STATUS, OLD),)
    assert cursor.state is StreamState.LIVE
