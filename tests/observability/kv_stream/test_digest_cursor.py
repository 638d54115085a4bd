"""The rules of the extension, one by one, and how a stream finds out whether its publisher has it."""

from __future__ import annotations

import pytest

from observability.kv_stream import StreamCursor, StreamState
from observability.kv_stream.cursor_events import (
    BatchDamaged,
    ClearApplied,
    Connected,
    ConnectionTimedOut,
    CreditAvailable,
    Disconnected,
    ProbeDue,
    ReplayBatchReceived,
    ReplayEndReceived,
    ReplayMetaReceived,
    ReplayTimedOut,
    RetryDue,
)
from observability.kv_stream.digest_cursor import NO_EPOCH, Position
from observability.kv_stream.instructions import (
    AbortStaging,
    Apply,
    ApplyStaged,
    Clear,
    CommitStaging,
    Instruction,
    RetryLater,
    SendReplayRequest,
    StartStaging,
    request_token,
)
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind, ReplayVerb
from scheduler_components.kv_events.stream_digest import initial_digest

OLD, NEW = b"o" * 16, b"n" * 16


def payload(seq: int) -> bytes:
    return b"%d" % seq


def at(epoch: bytes, count: int) -> Position:
    """The place after batches 0 to ``count - 1`` of a life."""
    position = Position(epoch, 0, initial_digest(epoch))
    for seq in range(count):
        position.advance(payload(seq))
    return position


def meta(cursor: StreamCursor, kind: ReplayMetaKind, place: Position, **changes: object) -> tuple[Instruction, ...]:
    """Answer the open question with a META of a publisher that stands at ``place`` unless ``changes`` say otherwise."""
    ask = cursor.open_request_id
    assert ask is not None
    fields: dict[str, object] = {
        "token": request_token(ask), "epoch": place.epoch, "first": 0, "next": place.next, "kind": kind, "snap": False,
        "start": place.next, "chain": place.digest,
    }  # fmt: skip
    return cursor.handle(ReplayMetaReceived(ask, ReplayMeta(**(fields | changes))))  # type: ignore[arg-type]


def take_snapshot(cursor: StreamCursor, place: Position) -> tuple[Instruction, ...]:
    assert meta(cursor, ReplayMetaKind.BEGIN, place, snap=True) == (StartStaging(),)
    assert cursor.handle(ReplayBatchReceived(cursor.open_request_id or 0, 0, b"chunk")) == (
        ApplyStaged(place.next - 1, b"chunk", True),
    )
    assert meta(cursor, ReplayMetaKind.BEGIN, place, chunks=1) == ()
    return meta(cursor, ReplayMetaKind.END, place)


def opened(count: int = 3) -> StreamCursor:
    """LIVE after ``count`` batches of the old life, with a snapshot as question 1."""
    cursor = StreamCursor(has_replay=True)
    assert cursor.handle(Connected()) == (SendReplayRequest(1, 0, ReplayVerb.SYNC, NO_EPOCH),)
    assert (cursor.state, cursor.is_accepting_live, cursor.is_extended) == (StreamState.SYNCING, False, False)
    assert take_snapshot(cursor, at(OLD, count)) == (CommitStaging(),)
    assert (cursor.state, cursor.last_seq, cursor.is_extended) == (StreamState.LIVE, count - 1, True)
    return cursor


def test_an_empty_stream_is_live_at_once() -> None:
    assert opened(0).last_seq == -1


def test_live_batches_follow_on_and_repeated_ones_do_not_count() -> None:
    cursor = opened()
    assert cursor.on_live_batch(3, payload(3)) == (Apply(3, payload(3), False),)
    assert cursor.on_live_batch(3, payload(3)) == cursor.on_live_batch(0, b"late") == ()
    assert (cursor.state, cursor.last_seq, cursor.counters.duplicates) == (StreamState.LIVE, 3, 2)


def test_a_gap_is_closed_from_where_the_view_stands() -> None:
    cursor = opened()
    assert cursor.on_live_batch(4, b"future") == (SendReplayRequest(2, 3, ReplayVerb.SYNC, OLD),)
    assert (cursor.state, cursor.last_seq) == (StreamState.RECOVERING, 2)
    assert meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3)) == ()
    assert cursor.handle(ReplayBatchReceived(2, 3, payload(3))) == (Apply(3, payload(3), True),)
    assert cursor.handle(ReplayBatchReceived(2, 3, payload(3))) == ()
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 4)) == ()
    assert (cursor.state, cursor.last_seq, cursor.counters.recovered) == (StreamState.LIVE, 3, 1)


def test_an_incremental_answer_from_elsewhere_is_not_applied() -> None:
    cursor = opened()
    cursor.on_live_batch(4, b"future")
    assert meta(cursor, ReplayMetaKind.BEGIN, at(NEW, 3)) == (SendReplayRequest(3, 3, ReplayVerb.SNAPSHOT, OLD),)
    assert cursor.counters.splices == 1


def test_a_wrong_digest_at_the_end_begins_anew() -> None:
    cursor = opened()
    cursor.on_live_batch(4, b"future")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    cursor.handle(ReplayBatchReceived(2, 3, b"spliced"))
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 4)) == (SendReplayRequest(3, 4, ReplayVerb.SNAPSHOT, OLD),)
    assert cursor.state is StreamState.RECOVERING
    assert take_snapshot(cursor, at(OLD, 4)) == (CommitStaging(),)
    assert cursor.state is StreamState.LIVE


def test_another_life_is_swapped_in_whole() -> None:
    cursor = opened()
    cursor.handle(ProbeDue())
    assert meta(cursor, ReplayMetaKind.STATUS, at(NEW, 1)) == (SendReplayRequest(3, 3, ReplayVerb.SYNC, OLD),)
    assert take_snapshot(cursor, at(NEW, 1)) == (CommitStaging(),)
    assert (cursor.state, cursor.last_seq, cursor.counters.restarts) == (StreamState.LIVE, 0, 1)


def test_a_status_is_compared_with_the_moment_of_the_question() -> None:
    cursor = opened()
    assert cursor.handle(ProbeDue()) == (SendReplayRequest(2, 3, ReplayVerb.STATUS, OLD),)
    cursor.on_live_batch(3, payload(3))
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3), next=5) == ()
    assert (cursor.state, cursor.counters.splices, cursor.counters.verified) == (StreamState.LIVE, 0, 2)


def test_a_lost_tail_is_synchronised() -> None:
    cursor = opened()
    cursor.handle(ProbeDue())
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3), next=4) == (SendReplayRequest(3, 3, ReplayVerb.SYNC, OLD),)
    assert cursor.state is StreamState.RECOVERING


def test_a_place_that_the_window_has_passed_is_proved_at_the_second_probe() -> None:
    cursor = opened()
    cursor.handle(ProbeDue())
    cursor.on_live_batch(3, payload(3))
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 9)) == ()
    cursor.handle(ProbeDue())
    cursor.on_live_batch(4, payload(4))
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 19)) == (SendReplayRequest(4, 5, ReplayVerb.SYNC, OLD),)


def test_a_frame_dropped_during_an_answer_is_asked_for() -> None:
    cursor = opened()
    cursor.on_live_batch(4, b"future")
    cursor.on_live_batch(5, b"future")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    for seq in (3, 4):
        cursor.handle(ReplayBatchReceived(2, seq, payload(seq)))
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 5)) == (SendReplayRequest(3, 5, ReplayVerb.SYNC, OLD),)


@pytest.mark.parametrize("lost", ["chunk 0", "chunk 1", "begin", "a batch"])
def test_a_snapshot_with_a_hole_is_dropped(lost: str) -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.handle(Connected())
    place = at(OLD, 3)
    meta(cursor, ReplayMetaKind.BEGIN, place, snap=True)
    result: tuple[Instruction, ...] = ()
    if lost == "chunk 0":
        result = cursor.handle(ReplayBatchReceived(1, 1, b"chunk"))
    else:
        cursor.handle(ReplayBatchReceived(1, 0, b"chunk"))
    if lost == "chunk 1":
        result = meta(cursor, ReplayMetaKind.BEGIN, place, chunks=2)
    elif lost == "begin":
        result = meta(cursor, ReplayMetaKind.END, place)
    elif lost == "a batch":
        meta(cursor, ReplayMetaKind.BEGIN, place, chunks=1)
        result = cursor.handle(ReplayBatchReceived(1, 4, payload(4)))
    assert result == (AbortStaging(), RetryLater(1))
    assert (cursor.state, cursor.open_request_id) == (StreamState.SYNCING, None)


def asked_for(verb: ReplayVerb) -> StreamCursor:
    """A cursor that holds three batches and has one question of this kind open."""
    cursor = opened()
    if verb is ReplayVerb.STATUS:
        cursor.handle(ProbeDue())
    else:
        cursor.on_live_batch(4, b"future")
    if verb is ReplayVerb.SNAPSHOT:
        meta(cursor, ReplayMetaKind.BEGIN, at(NEW, 3))  # the publisher is spliced
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
def test_an_answer_to_something_else_is_not_used(verb: ReplayVerb, kind: ReplayMetaKind, snap: bool) -> None:
    cursor = asked_for(verb)
    verified = cursor.counters.verified
    assert meta(cursor, kind, at(OLD, 3), snap=snap) == (RetryLater(1),)
    assert (cursor.open_request_id, cursor.counters.verified, cursor.last_seq) == (None, verified, 2)


@pytest.mark.parametrize(
    ("kind", "snap"), [(ReplayMetaKind.BEGIN, False), (ReplayMetaKind.BEGIN, True), (ReplayMetaKind.STATUS, False)]
)
@pytest.mark.parametrize("verb", [ReplayVerb.SYNC, ReplayVerb.SNAPSHOT])
def test_batches_are_followed_by_the_end_alone(verb: ReplayVerb, kind: ReplayMetaKind, snap: bool) -> None:
    cursor = asked_for(verb)
    if verb is ReplayVerb.SNAPSHOT:
        meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3), snap=True)
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    dropped = (AbortStaging(),) if verb is ReplayVerb.SNAPSHOT else ()
    assert meta(cursor, kind, at(OLD, 3), snap=snap) == (*dropped, RetryLater(1))


def test_a_chunk_or_batch_before_a_begin_is_not_used() -> None:
    for verb in ReplayVerb:
        cursor = asked_for(verb)
        assert cursor.handle(ReplayBatchReceived(cursor.open_request_id or 0, 3, payload(3))) == (RetryLater(1),)


def test_a_status_that_is_cut_is_asked_again_later_though_batches_have_come() -> None:
    cursor = opened()
    cursor.handle(ProbeDue())
    cursor.on_live_batch(3, payload(3))
    assert cursor.handle(ReplayEndReceived(2)) == (RetryLater(1),)
    assert cursor.state is StreamState.LIVE


def test_a_cut_answer_is_continued_where_it_was_applied() -> None:
    cursor = opened()
    cursor.on_live_batch(5, b"future")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    cursor.handle(ReplayBatchReceived(2, 3, payload(3)))
    assert cursor.handle(ReplayEndReceived(2)) == (SendReplayRequest(3, 4, ReplayVerb.SYNC, OLD),)
    assert cursor.handle(ReplayTimedOut(3)) == (RetryLater(1),)
    assert cursor.handle(RetryDue()) == (SendReplayRequest(4, 4, ReplayVerb.SYNC, OLD),)


def test_a_silent_publisher_costs_the_proof_and_no_block() -> None:
    cursor = opened()
    cursor.handle(ProbeDue())
    for failures in (1, 2, 3):
        assert cursor.handle(ReplayTimedOut(cursor.open_request_id or 0)) == (RetryLater(failures),)
        assert cursor.state is (StreamState.PARTIAL if failures == 3 else StreamState.LIVE)
        assert cursor.handle(RetryDue()) == (SendReplayRequest(failures + 2, 3, ReplayVerb.STATUS, OLD),)
    cursor.on_live_batch(3, payload(3))
    cursor.handle(ClearApplied())
    assert (cursor.state, cursor.last_seq) == (StreamState.PARTIAL, 3)
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3), next=4) == ()
    assert cursor.state is StreamState.LIVE


def test_what_could_not_be_read_is_asked_for_when_it_is_folded() -> None:
    cursor = opened()
    cursor.on_live_batch(3, payload(3))
    cursor.handle(BatchDamaged())
    assert cursor.state is StreamState.PARTIAL
    cursor.handle(ProbeDue())
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), first=3) == ()
    assert cursor.state is StreamState.PARTIAL
    cursor.handle(ProbeDue())
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), first=4) == (
        SendReplayRequest(4, 4, ReplayVerb.SNAPSHOT, OLD),
    )
    take_snapshot(cursor, at(OLD, 4))
    assert cursor.state is StreamState.LIVE


def test_a_clear_heals_what_could_not_be_read() -> None:
    cursor = opened()
    cursor.on_live_batch(3, payload(3))
    cursor.handle(BatchDamaged())
    cursor.on_live_batch(4, payload(4))
    cursor.handle(ClearApplied())
    assert cursor.state is StreamState.LIVE


def test_an_answer_with_another_token_is_stale() -> None:
    cursor = opened()
    cursor.handle(ProbeDue())
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3), token=bytes(8)) == ()
    assert (cursor.open_request_id, cursor.counters.stale_replays) == (2, 1)


def test_a_reconnect_goes_on_where_the_view_stands() -> None:
    cursor = opened()
    cursor.handle(Disconnected())
    assert cursor.state is StreamState.CONNECTING
    assert cursor.handle(Connected()) == (SendReplayRequest(2, 3, ReplayVerb.SYNC, OLD),)
    cursor.handle(Disconnected())
    assert cursor.handle(ConnectionTimedOut()) == (Clear("the publisher is unreachable"),)
    assert cursor.handle(Connected()) == (SendReplayRequest(3, 0, ReplayVerb.SYNC, NO_EPOCH),)


# --- which publisher is it? ---


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_publisher_without_the_extension_is_asked_plainly(is_silent: bool) -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.handle(Connected())
    assert (cursor.handle(ReplayTimedOut(1)) if is_silent else cursor.handle(ReplayEndReceived(1))) == (
        SendReplayRequest(2, 0),
    )
    cursor.handle(ReplayBatchReceived(2, 0, b"0"))
    cursor.handle(ReplayEndReceived(2))
    assert (cursor.state, cursor.is_extended) == (StreamState.LIVE, False)


def test_a_publisher_that_was_taken_for_plain_is_asked_again() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.handle(Connected())
    cursor.handle(ReplayEndReceived(1))
    cursor.handle(ReplayEndReceived(2))
    asked = []
    while not asked or asked[-1].verb is None:
        (question,) = cursor.handle(ProbeDue())
        assert isinstance(question, SendReplayRequest)
        asked.append(question)
        if question.verb is None:
            cursor.handle(ReplayEndReceived(question.request_id))
    assert len(asked) == 8
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3)) == (
        SendReplayRequest(asked[-1].request_id + 1, 0, ReplayVerb.SYNC, NO_EPOCH),
    )
    take_snapshot(cursor, at(OLD, 3))
    assert cursor.is_extended


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_probe_that_finds_no_extension_probes_plainly(is_silent: bool) -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.handle(Connected())
    cursor.handle(ReplayEndReceived(1))
    cursor.handle(ReplayBatchReceived(2, 0, b"0"))
    cursor.handle(ReplayEndReceived(2))
    cursor.handle(Disconnected())  # the first probe of a connection asks for the extension
    cursor.handle(Connected())
    cursor.handle(ReplayBatchReceived(3, 0, b"0"))
    cursor.handle(ReplayEndReceived(3))
    assert cursor.handle(ProbeDue()) == (SendReplayRequest(4, 0, ReplayVerb.STATUS),)
    assert (cursor.handle(ReplayTimedOut(4)) if is_silent else cursor.handle(ReplayEndReceived(4))) == (
        SendReplayRequest(5, 0),
    )
    cursor.handle(ReplayBatchReceived(5, 0, b"0"))
    cursor.handle(ReplayEndReceived(5))
    assert cursor.state is StreamState.LIVE


def test_a_successor_without_the_extension_is_followed_plainly_and_begins_anew() -> None:
    cursor = opened()
    cursor.handle(Disconnected())
    cursor.handle(Connected())
    assert cursor.handle(ReplayEndReceived(2)) == (RetryLater(1),)
    cursor.handle(RetryDue())
    assert cursor.handle(ReplayEndReceived(3)) == (RetryLater(2),)
    cursor.handle(RetryDue())
    cleared, question = cursor.handle(ReplayEndReceived(4))
    assert isinstance(cleared, Clear)
    assert question == SendReplayRequest(5, 0)


def test_cut_answers_of_a_publisher_that_has_shown_the_extension_change_no_rules() -> None:
    cursor = opened()
    cursor.on_live_batch(5, b"future")
    for ask in range(2, 9):
        assert cursor.handle(ReplayEndReceived(ask)) == (RetryLater(ask - 1),)
        cursor.handle(RetryDue())
    assert cursor.is_extended
    assert cursor.state is StreamState.RECOVERING


def test_strays_leave_a_right_view_live_and_cost_one_question_for_many() -> None:
    cursor = opened()
    assert cursor.on_live_batch(900, b"stray") == (SendReplayRequest(2, 3, ReplayVerb.SYNC, OLD),)
    assert cursor.state is StreamState.RECOVERING
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    meta(cursor, ReplayMetaKind.END, at(OLD, 3))  # asked after it came, the publisher has not reached 900
    cursor.credit.available = 0
    for seq in range(901, 1_000):
        assert cursor.on_live_batch(seq, b"stray") == ()
        assert (cursor.state, cursor.is_accepting_live) == (StreamState.LIVE, True)
    assert cursor.on_live_batch(3, payload(3)) == (Apply(3, payload(3), False),)
    assert cursor.on_live_batch(5, payload(5)) == ()  # its own, after a gap: it may be, so it is asked about
    cursor.credit.available = 1
    assert cursor.handle(CreditAvailable()) == (SendReplayRequest(3, 4, ReplayVerb.STATUS, OLD),)
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), next=6) == (SendReplayRequest(4, 4, ReplayVerb.SYNC, OLD),)
    assert cursor.state is StreamState.RECOVERING


def test_a_gap_without_credit_is_asked_about_when_there_is_some() -> None:
    cursor = opened()
    cursor.credit.available = 0
    assert cursor.on_live_batch(5, payload(5)) == ()
    assert (cursor.state, cursor.is_accepting_live, cursor.is_settled) == (StreamState.RECOVERING, True, False)
    assert cursor.on_live_batch(3, payload(3)) == (Apply(3, payload(3), False),)
    assert cursor.state is StreamState.RECOVERING
    cursor.credit.available = 1
    assert cursor.handle(CreditAvailable()) == (SendReplayRequest(2, 4, ReplayVerb.SYNC, OLD),)
    assert cursor.handle(CreditAvailable()) == ()


def test_a_relay_that_does_not_know_its_upstream_is_partial_whatever_the_digest_proves() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.handle(Connected())
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 0), snap=True)
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 0))
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 0), upstream="connecting") == (CommitStaging(),)
    assert (cursor.state, cursor.counters.verified) == (StreamState.PARTIAL, 1)
    cursor.on_live_batch(0, payload(0))
    cursor.handle(ClearApplied())  # of all blocks: the relay's doubt stays
    assert cursor.state is StreamState.PARTIAL
    cursor.handle(ProbeDue())
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 1)) == ()
    assert cursor.state is StreamState.LIVE
    cursor.handle(ProbeDue())
    cursor.on_live_batch(1, payload(1))
    meta(cursor, ReplayMetaKind.STATUS, at(OLD, 1), first=1, upstream="partial")
    assert cursor.state is StreamState.PARTIAL


def test_everything_is_counted_as_often_as_it_happens() -> None:
    cursor = opened()
    for life in (NEW, OLD):
        cursor.handle(ProbeDue())
        meta(cursor, ReplayMetaKind.STATUS, at(life, 1))
        take_snapshot(cursor, at(life, 1))
    assert (cursor.counters.restarts, cursor.counters.snapshots) == (2, 3)
    for _ in range(2):
        cursor.handle(ProbeDue())
        ask = cursor.open_request_id or 0
        cursor.handle(
            ReplayMetaReceived(
                ask, ReplayMeta(b"another!", OLD, 0, 1, ReplayMetaKind.STATUS, False, 1, at(OLD, 1).digest)
            )
        )
        assert cursor.handle(ReplayTimedOut(ask - 1)) == ()
        [later] = cursor.handle(ReplayTimedOut(ask))
        assert isinstance(later, RetryLater)
        cursor.handle(RetryDue())
        meta(cursor, ReplayMetaKind.STATUS, at(OLD, 1))
    assert (cursor.counters.stale_replays, cursor.counters.replays_unanswered) == (2, 2)
    assert cursor.state is StreamState.LIVE


def test_one_question_at_a_time() -> None:
    cursor = opened()
    assert len(cursor.handle(ProbeDue())) == 1
    assert cursor.handle(ProbeDue()) == ()
    assert cursor.handle(RetryDue()) == ()


def test_a_clear_heals_also_while_a_question_is_open() -> None:
    cursor = opened()
    cursor.on_live_batch(3, payload(3))
    cursor.handle(BatchDamaged())
    assert cursor.state is StreamState.PARTIAL
    assert len(cursor.handle(ProbeDue())) == 1
    cursor.on_live_batch(4, payload(4))
    cursor.handle(ClearApplied())
    assert cursor.state is StreamState.LIVE


def test_a_publisher_that_was_given_up_is_asked_nothing_more_until_it_is_back() -> None:
    cursor = opened()
    cursor.handle(ProbeDue())
    cursor.handle(ReplayTimedOut(cursor.open_request_id or 0))
    [clear] = cursor.handle(ConnectionTimedOut())
    assert isinstance(clear, Clear)
    assert (cursor.state, cursor.last_seq) == (StreamState.DEAD, -1)
    assert cursor.handle(RetryDue()) == cursor.handle(ProbeDue()) == ()
    assert cursor.handle(Connected()) == (SendReplayRequest(3, 0, ReplayVerb.SYNC, NO_EPOCH),)
    assert take_snapshot(cursor, at(NEW, 2)) == (CommitStaging(),)
    assert cursor.state is StreamState.LIVE


def test_each_batch_counts_once_in_its_column() -> None:
    cursor = opened()
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
            cursor.handle(ReplayBatchReceived(repeat + 1, seq, payload(seq)))
        assert cursor.handle(ReplayBatchReceived(1, 0, b"of the first answer")) == ()
        meta(cursor, ReplayMetaKind.END, at(OLD, held + 4))
        assert cursor.handle(ReplayBatchReceived(repeat + 1, held + 4, b"after the end")) == ()
        late = ReplayMeta(
            request_token(1), OLD, 0, held + 4, ReplayMetaKind.STATUS, False, held + 4, at(OLD, held + 4).digest
        )
        assert cursor.handle(ReplayMetaReceived(repeat + 1, late)) == ()
    counters = cursor.counters
    assert (counters.applied, counters.recovered, counters.duplicates, counters.gaps) == (8, 6, 2, 2)
    assert (counters.stale_replays, counters.replays_asked, counters.replays_cut, counters.losses) == (6, 3, 0, 0)
    assert cursor.state is StreamState.LIVE


def test_batches_after_the_base_are_staged_as_batches() -> None:
    cursor = StreamCursor(has_replay=True)
    assert cursor.on_live_batch(7, payload(7)) == (
        SendReplayRequest(1, 0, ReplayVerb.SYNC, NO_EPOCH),
    )  # it tells that the stream is up
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3), snap=True)
    assert cursor.handle(ReplayBatchReceived(1, 0, b"chunk")) == (ApplyStaged(2, b"chunk", True),)
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3), chunks=1)
    assert cursor.handle(ReplayBatchReceived(1, 3, payload(3))) == (ApplyStaged(3, payload(3), False),)
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 4)) == (
        CommitStaging(),
        SendReplayRequest(2, 4, ReplayVerb.SYNC, OLD),
    )


def test_a_snapshot_that_is_not_where_its_chunks_lead_is_cut_and_not_held_against_the_view() -> None:
    cursor = opened()
    for cut in (1, 2):
        cursor.on_live_batch(9, b"beyond a gap") if cut == 1 else cursor.handle(RetryDue())
        meta(cursor, ReplayMetaKind.BEGIN, at(NEW, 5), snap=True)
        assert meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 5)) == (AbortStaging(), RetryLater(cut))
        assert (cursor.counters.replays_cut, cursor.counters.splices) == (cut, 0)


def test_what_could_not_be_read_of_a_snapshot_is_asked_for_when_it_is_folded() -> None:
    cursor = StreamCursor(has_replay=True)
    cursor.handle(Connected())
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3), snap=True)
    cursor.handle(ReplayBatchReceived(1, 0, b"chunk"))
    cursor.handle(BatchDamaged())
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3), chunks=1)
    assert meta(cursor, ReplayMetaKind.END, at(OLD, 3)) == (CommitStaging(),)
    assert cursor.state is StreamState.PARTIAL
    cursor.on_live_batch(3, payload(3))
    cursor.handle(ProbeDue())
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), first=3) == ()
    assert cursor.state is StreamState.PARTIAL
    cursor.handle(ProbeDue())
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), first=4) == (
        SendReplayRequest(4, 4, ReplayVerb.SNAPSHOT, OLD),
    )


def test_a_relays_doubt_is_heard_also_where_its_window_has_passed_the_place() -> None:
    for upstream, state in ((None, StreamState.LIVE), ("connecting", StreamState.PARTIAL)):
        cursor = opened()
        cursor.handle(ProbeDue())
        cursor.on_live_batch(3, payload(3))
        assert (
            meta(cursor, ReplayMetaKind.STATUS, at(OLD, 4), upstream=upstream) == ()
        )  # the next probe tells of the place
        assert cursor.state is state


@pytest.mark.parametrize(("gap_seen", "asks_again"), [(4, True), (5, False)])
def test_a_gap_is_the_publishers_where_it_is_below_its_next_number(gap_seen: int, asks_again: bool) -> None:
    cursor = opened()
    cursor.on_live_batch(900, b"stray")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    meta(cursor, ReplayMetaKind.END, at(OLD, 3))
    assert cursor.on_live_batch(gap_seen, b"beyond a gap") == (SendReplayRequest(3, 3, ReplayVerb.STATUS, OLD),)
    cursor.on_live_batch(3, payload(3))
    again = (SendReplayRequest(4, 4, ReplayVerb.SYNC, OLD),) if asks_again else ()
    assert meta(cursor, ReplayMetaKind.STATUS, at(OLD, 3), next=5) == again


def test_a_stray_at_the_publishers_next_number_is_a_stray() -> None:
    cursor = opened()
    cursor.on_live_batch(4, b"of another life")
    meta(cursor, ReplayMetaKind.BEGIN, at(OLD, 3))
    cursor.handle(ReplayBatchReceived(2, 3, payload(3)))
    meta(cursor, ReplayMetaKind.END, at(OLD, 4))
    assert cursor.on_live_batch(6, b"of another life") == (SendReplayRequest(3, 4, ReplayVerb.STATUS, OLD),)
    assert cursor.state is StreamState.LIVE


def taken_for_plain(*, patience: int = 3) -> StreamCursor:
    """LIVE by the plain rules with batch 0; the next probe of the connection asks for the extension."""
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
    cursor = taken_for_plain(patience=1)
    cursor.credit.available = 0
    assert cursor.on_live_batch(2, b"2") == ()
    assert (cursor.state, cursor.open_request_id) == (StreamState.RECOVERING, None)
    cursor.credit.available = 1
    assert cursor.handle(CreditAvailable()) == (SendReplayRequest(4, 0),)
    assert cursor.handle(ReplayTimedOut(4)) == (Clear("the replay channel does not answer"), RetryLater(1))
    assert cursor.state is StreamState.PARTIAL


def test_a_plain_stream_hears_the_extension_in_the_answer_to_its_probe_alone() -> None:
    cursor = taken_for_plain()
    here = at(OLD, 1)
    told = ReplayMeta(request_token(4), OLD, 0, 1, ReplayMetaKind.STATUS, False, 1, here.digest)
    assert cursor.handle(ReplayMetaReceived(3, told)) == cursor.handle(ReplayMetaReceived(4, told)) == ()
    assert cursor.handle(ProbeDue()) == (SendReplayRequest(4, 0, ReplayVerb.STATUS),)
    assert cursor.handle(ReplayMetaReceived(3, told)) == ()
    assert (cursor.counters.stale_replays, cursor.is_extended) == (3, False)
    assert cursor.handle(ReplayMetaReceived(4, told)) == (SendReplayRequest(5, 0, ReplayVerb.SYNC, NO_EPOCH),)


def test_who_has_shown_the_extension_is_asked_for_it_at_every_probe() -> None:
    cursor = opened()
    cursor.handle(Disconnected())
    cursor.handle(Connected())
    for ask in (2, 3, 4):
        cursor.handle(ReplayEndReceived(ask))
        cursor.handle(RetryDue())
    cursor.handle(ReplayBatchReceived(5, 0, b"0"))
    cursor.handle(ReplayEndReceived(5))
    for ask in (6, 8, 10):
        assert cursor.handle(ProbeDue()) == (SendReplayRequest(ask, 0, ReplayVerb.STATUS),)
        assert cursor.handle(ReplayEndReceived(ask)) == (SendReplayRequest(ask + 1, 0),)
        cursor.handle(ReplayBatchReceived(ask + 1, 0, b"0"))
        cursor.handle(ReplayEndReceived(ask + 1))


def test_nobody_is_asked_for_the_extension_without_a_connection_or_without_replay() -> None:
    cursor = taken_for_plain()
    cursor.handle(Disconnected())
    assert [cursor.handle(ProbeDue()) for _ in range(20)] == [()] * 20
    alone = StreamCursor(has_replay=False)
    alone.handle(Connected())
    alone.on_live_batch(0, b"0")
    assert [alone.handle(ProbeDue()) for _ in range(20)] == [()] * 20
