"""The delivery contract on a faulty network, several subscribers together.

Properties:
- after every step, no subscriber is ``LIVE`` with a wrong view, and none distrusts an honest publisher;
- once the faults stop, every view equals the publisher's state within two probe intervals plus the replay.

Broken variants of each core show that the properties catch them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from observability.kv_stream import BlockView, FrameParser, digest_cursor, follower, stream_cursor
from observability.kv_stream.cursor_events import CursorEvent, ReplayBatchReceived
from observability.kv_stream.digest_cursor import NO_EPOCH, DigestCursor, Position
from observability.kv_stream.instructions import Apply, Instruction
from observability.kv_stream.plain_cursor import PlainCursor
from observability.kv_stream.stream_cursor import dispatch
from observability.kv_stream.stream_state import ReplayCredit
from observability.testing import RecoverySimulation
from observability.testing.recovery_model import Steps
from scheduler_components import BlockStored
from scheduler_components.events import TIER_MEDIUM
from scheduler_components.kv_events import EventStream
from scheduler_components.kv_events import stream as event_stream
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind

INDEX = st.integers(0, 2)
FAULTS = ("none", "none", "none", "lose", "repeat")
TRACES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["store", "store", "remove"]), st.integers(0, 5), st.integers(1, 3), st.booleans()),
        st.just(("send",)),
        st.just(("send",)),
        st.tuples(st.just("deliver"), INDEX, st.integers(1, 4), st.sampled_from([*FAULTS, "reorder"])),
        st.tuples(st.just("serve"), INDEX, st.integers(1, 8), st.sampled_from([*FAULTS, "cut", "garble", "alter"])),
        st.tuples(st.just("wait"), st.sampled_from([1, 5, 21])),
        st.tuples(st.sampled_from(["connect", "connect", "disconnect", "deliver_late"]), INDEX),
        st.tuples(st.just("send_other_topic"), INDEX, st.integers(-2, 2)),
        st.tuples(st.just("forge"), INDEX, st.integers(0, 3), st.sampled_from([1, 20])),
        st.sampled_from([("clear",), ("poison",), ("restart", False), ("restart", True)]),
    ),
    max_size=40,
)
WINDOWS = st.integers(1, 5)
SEQ_BASES = st.sampled_from(["zero", "clock"])

# A publisher that showed the extension and fell silent was once followed by the plain rules, which miss a restart
# behind a proxy.
SILENT_AFTER_RESTART = [
    ("store", 0, 1, False), ("wait", 21), ("restart", True), ("serve", 0, 1, "none"), ("store", 0, 1, False),
    ("store", 0, 1, False), ("wait", 21), ("wait", 21),
]  # fmt: skip
# The replay buffer passes the end of an answer whose last batch waits for a slow client.
OVERTAKEN_AT_THE_END = [
    ("store", 3, 1, False), ("send",), ("deliver", 0, 1, "lose"), ("wait", 21), ("serve", 0, 3, "none"),
    *[("store", 4, 1, False), ("send",)] * 8, ("serve", 0, 3, "none"),
]  # fmt: skip
# A gap comes while a status is open, and the replay buffer has passed its position when the answer comes.
GAP_BEHIND_A_STATUS = [
    *[("store", 0, 1, False)] * 2, ("forge", 0, 2, 1), *[("store", 0, 1, False)] * 5, ("send",), ("wait", 21),
    *[("store", 0, 1, False)] * 2, ("deliver", 0, 2, "none"),
]  # fmt: skip
# The same, with a forged batch that is contiguous.
FORGED_BEHIND_A_STATUS = [*GAP_BEHIND_A_STATUS[:2], ("forge", 0, 0, 1), *GAP_BEHIND_A_STATUS[2:]]
# The status that proves the view before a forged batch opens the request that exposes it.
FORGED_SINCE_THE_STATUS = [
    ("wait", 21), ("forge", 0, 0, 1), ("forge", 0, 2, 1), *[("store", 0, 1, False)] * 8, ("deliver", 0, 2, "none"),
]  # fmt: skip
# A gap finds no credit, and the missing batches come before there is some: nothing is missing any more, but one
# request must follow.
GAP_FILLED_BEFORE_CREDIT = [
    *[
        ("store", 4, 1, False), ("store", 5, 1, False), ("send",), ("deliver", 0, 1, "lose"),
        ("deliver", 0, 1, "none"), ("serve", 0, 9, "none"),
    ] * 3,
    *[("store", 4, 1, False), ("store", 5, 1, False), ("send",), ("deliver", 0, 1, "reorder")],
    *[("deliver", 0, 1, "none"), ("forge", 0, -1, 1), ("deliver", 0, 1, "none")],
]  # fmt: skip

# The last batches of an incremental answer are lost. That once counted as batches of another publisher.
LOST_AT_THE_END_OF_AN_ANSWER = [
    ("store", 4, 1, False), ("store", 5, 1, False), ("send",), ("deliver", 0, 1, "lose"), ("deliver", 0, 1, "none"),
    ("serve", 0, 1, "none"), ("serve", 0, 2, "lose"), ("serve", 0, 1, "none"),
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(600)
@given(trace=TRACES, window=WINDOWS, seq_base=SEQ_BASES)
@example(trace=SILENT_AFTER_RESTART, window=1, seq_base="zero")
@example(trace=OVERTAKEN_AT_THE_END, window=3, seq_base="zero")
@example(trace=GAP_BEHIND_A_STATUS, window=1, seq_base="zero")
@example(trace=FORGED_BEHIND_A_STATUS, window=1, seq_base="zero")
@example(trace=FORGED_SINCE_THE_STATUS, window=1, seq_base="zero")
@example(trace=GAP_FILLED_BEFORE_CREDIT, window=3, seq_base="zero")
@example(trace=LOST_AT_THE_END_OF_AN_ANSWER, window=4, seq_base="zero")
@settings(max_examples=num_examples(10), deadline=None, suppress_health_check=list(HealthCheck))
def test_no_wrong_view_is_live_and_every_view_converges(trace: Steps, window: int, seq_base: str) -> None:
    RecoverySimulation(window=window, seq_base=seq_base).run(trace)


# --- mutants ---

Mutate = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[Any] = []


def caught_by(
    *trace: tuple, window: int = 2, seq_base: str = "zero", is_searched: bool = False
) -> Callable[[Mutate], Mutate]:
    """Register a mutant with a trace that exposes it.

    Args:
        trace: passes with the unchanged cores.
        window: size of the publisher's replay buffer.
        seq_base: first sequence number of an epoch.
        is_searched: ``make soak`` checks that random traces expose the mutant too. They rarely expose the others.
    """

    def register(mutate: Mutate) -> Mutate:
        MUTANTS.append(pytest.param(mutate, list(trace), window, seq_base, is_searched, id=mutate.__name__))
        return mutate

    return register


FOUR_MORE = [
    step for block in range(2, 6) for step in (("store", block, 1, False), ("remove", block - 2, 1, False), ("send",))
]
REJOIN_AFTER_THE_BUFFER_MOVED = [("disconnect", 0), *FOUR_MORE, ("connect", 0)]


@caught_by(
    *[("store", 3, 1, False), ("send",), ("store", 4, 1, False), ("send",), ("restart", True)],
    *[("store", 5, 1, False), ("send",), ("wait", 21), ("serve", 0, 1, "none"), ("serve", 0, 9, "none")],
    *[("deliver", 0, 2, "none"), ("remove", 5, 1, False), ("send",), ("store", 2, 1, False), ("send",)],
)
def digest_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Position, "matches", lambda self, meta: (self.epoch, self.next) == (meta.epoch, meta.start))


@caught_by(("store", 0, 1, False), ("forge", 0, 0, 1), is_searched=True)
def neither_epoch_nor_digest_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Position, "matches", lambda self, meta: self.next == meta.start)
    compare, extended = DigestCursor._check_status, ReplaySessions._extended

    def compare_any_epoch(self: DigestCursor, request: Any, meta: ReplayMeta) -> tuple[Instruction, ...]:
        request.initial.epoch = meta.epoch
        return compare(self, request, meta)

    def answer_any_epoch(self: ReplaySessions, client: bytes, request: Any) -> Any:
        known = request.epoch != NO_EPOCH
        request = type(request)(request.start, request.verb, request.token, self._stream.epoch if known else NO_EPOCH)
        return extended(self, client, request)

    patch.setattr(DigestCursor, "_check_status", compare_any_epoch)
    patch.setattr(ReplaySessions, "_extended", answer_any_epoch)


@caught_by(("wait", 21), ("store", 3, 1, False), ("send",), ("deliver", 0, 1, "none"), ("serve", 0, 1, "none"))
def status_compared_with_the_digest_at_answer_time(patch: pytest.MonkeyPatch) -> None:
    compare = DigestCursor._check_status

    def compare_now(self: DigestCursor, request: Any, meta: ReplayMeta) -> tuple[Instruction, ...]:
        request.initial.digest = self._position.digest
        return compare(self, request, meta)

    patch.setattr(DigestCursor, "_check_status", compare_now)


@caught_by(("wait", 21), ("restart", True), ("serve", 0, 1, "none"))
def epoch_not_compared_in_a_status(patch: pytest.MonkeyPatch) -> None:
    compare = DigestCursor._check_status

    def distrust(self: DigestCursor, request: Any, meta: ReplayMeta) -> tuple[Instruction, ...]:
        if meta.epoch != request.initial.epoch:
            return self._on_digest_mismatch()  # the digest includes the epoch
        return compare(self, request, meta)

    patch.setattr(DigestCursor, "_check_status", distrust)


def _accept_meta_without(patch: pytest.MonkeyPatch, is_checked: Callable[[Any, ReplayMeta], bool]) -> None:
    accept_meta = digest_cursor._ExtendedRequest.accept_meta

    def accept_less(self: Any, meta: ReplayMeta) -> Any:
        position = self.staging or self.position
        if not is_checked(self, meta):
            meta = msgspec.structs.replace(
                meta, epoch=position.epoch, start=position.next, chain=position.digest, chunks=None
            )
        return accept_meta(self, meta)

    patch.setattr(digest_cursor._ExtendedRequest, "accept_meta", accept_less)


ALTERED_LAST_BATCH = [
    *[("store", 3, 1, False), ("send",), ("deliver", 0, 1, "lose"), ("wait", 21), ("serve", 0, 1, "none")],
    *[("serve", 0, 1, "none"), ("serve", 0, 1, "alter"), ("serve", 0, 1, "none")],
]


@caught_by(*ALTERED_LAST_BATCH)
def end_not_checked(patch: pytest.MonkeyPatch) -> None:
    _accept_meta_without(patch, lambda request, meta: meta.kind is not ReplayMetaKind.END)


def _accept_holes(patch: pytest.MonkeyPatch, in_phase: str) -> None:
    accept_payload = digest_cursor._ExtendedRequest.accept_payload

    def accept_any(self: Any, seq: int, payload: bytes) -> Any:
        position = self.staging or self.position
        expected = self.num_chunks if self.phase is digest_cursor._Phase.CHUNKS else position.next
        return accept_payload(self, expected if self.phase.name == in_phase and seq > expected else seq, payload)

    patch.setattr(digest_cursor._ExtendedRequest, "accept_payload", accept_any)


@caught_by(
    *[("store", 3, 1, False), ("store", 4, 1, False), ("send",), ("deliver", 0, 1, "lose"), ("deliver", 0, 1, "none")],
    *[("serve", 0, 1, "none"), ("serve", 0, 1, "lose"), ("serve", 0, 9, "none")],
)
def holes_inside_an_answer_accepted(patch: pytest.MonkeyPatch) -> None:
    _accept_holes(patch, "BATCHES")


@caught_by(*REJOIN_AFTER_THE_BUFFER_MOVED, ("serve", 0, 1, "none"), ("serve", 0, 1, "lose"), ("serve", 0, 9, "none"))
def holes_in_the_chunks_accepted(patch: pytest.MonkeyPatch) -> None:
    _accept_holes(patch, "CHUNKS")
    _accept_meta_without(patch, lambda request, meta: meta.chunks is None)


@caught_by(*[("store", 0, 1, False)] * 2, ("forge", 0, 0, 1), is_searched=True)
def snapshot_is_not_folded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(event_stream.StreamSnapshot, "fold", lambda self, payload, changes: None)


@caught_by(*REJOIN_AFTER_THE_BUFFER_MOVED)
def buffer_is_off_by_one(patch: pytest.MonkeyPatch) -> None:
    fold_oldest = EventStream.fold_oldest

    def fold_and_forget_one(self: EventStream) -> None:
        fold_oldest(self)
        if self.has_folded and len(self) > 1 and not self.pins:
            lost = self._batches.popleft()
            self._folded = (lost.sequence + 1, lost.num_bytes)

    patch.setattr(EventStream, "fold_oldest", fold_and_forget_one)


@caught_by(("store", 0, 1, False), ("send",), ("wait", 21), *[("store", 0, 1, False)] * 2, is_searched=True)
def plain_snapshot_without_its_clear(patch: pytest.MonkeyPatch) -> None:
    chunk_of = ReplaySessions._chunk
    patch.setattr(
        ReplaySessions, "_chunk", lambda self, number, chunk, *, clear: chunk_of(self, number, chunk, clear=False)
    )


def _accept_live(patch: pytest.MonkeyPatch, is_accepted: Callable[[int, int], bool]) -> None:
    """Apply live frames for which ``is_accepted(seq, expected)``, and continue from them."""
    live = DigestCursor.on_live_batch

    def accept_more(self: DigestCursor, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        if self.is_accepting_live and is_accepted(seq, self._position.next):
            self._position.next = max(seq, self._position.next - 1)
            self._position.advance(payload)
            return (Apply(seq, payload, False),)
        return live(self, seq, payload)

    patch.setattr(DigestCursor, "on_live_batch", accept_more)


@caught_by(
    ("forge", 0, 3, 40), *[step for _ in range(9) for step in (("deliver", 0, 9, "none"), ("serve", 0, 9, "none"))]
)
def requests_without_a_credit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(follower, "MAX_REPLAY_CREDIT", 10**6)
    patch.setattr(ReplayCredit, "__init__", lambda self: setattr(self, "available", 10**6))


ONE_LOST_OF_TWO = [
    *[("store", 4, 1, False), ("store", 5, 1, False), ("send",), ("deliver", 0, 1, "lose")],
    *[("deliver", 0, 1, "none"), ("serve", 0, 9, "none")],
]


@caught_by(*ONE_LOST_OF_TWO * 6)
def gap_without_credit_forgotten(patch: pytest.MonkeyPatch) -> None:
    for each in (DigestCursor, PlainCursor):
        patch.setattr(each, "on_credit_available", lambda self: ())


@caught_by(("send_other_topic", 2, 0), is_searched=True)
def topic_not_compared(patch: pytest.MonkeyPatch) -> None:
    live = FrameParser.parse_live

    def read_any(self: FrameParser, frames: Any) -> tuple[int, bytes] | None:
        return live(self, (self.topic, *frames[1:]))

    patch.setattr(FrameParser, "parse_live", read_any)


@caught_by(("forge", 0, 1, 1), is_searched=True)
def future_frame_kept(patch: pytest.MonkeyPatch) -> None:
    _accept_live(patch, lambda seq, expected: seq > expected)


@caught_by(("store", 0, 1, False), ("wait", 21), is_searched=True)
def duplicate_applied(patch: pytest.MonkeyPatch) -> None:
    _accept_live(patch, lambda seq, expected: seq < expected)


@caught_by(("forge", 0, 0, 1), is_searched=True)
def future_frame_causes_no_request(patch: pytest.MonkeyPatch) -> None:
    live = DigestCursor.on_live_batch
    patch.setattr(
        DigestCursor,
        "on_live_batch",
        lambda self, seq, payload: () if seq > self._position.next else live(self, seq, payload),
    )
    patch.setattr(DigestCursor, "on_probe_due", lambda self: ())


@caught_by(*[("store", 0, 1, False)] * 2, ("restart", False), is_searched=True)
def snapshot_applied_without_clear(patch: pytest.MonkeyPatch) -> None:
    replace = BlockView.replace

    def add(self: BlockView, rank: int, other: BlockView) -> None:
        before = [(medium, tuple(self.blocks(rank, tier))) for tier, medium in TIER_MEDIUM.items()]
        replace(self, rank, other)
        self.apply(rank, [BlockStored(blocks, None, (), 1, None, medium) for medium, blocks in before])

    patch.setattr(BlockView, "replace", add)


@caught_by(("restart", True), seq_base="clock", is_searched=True)
def truncated_answer_accepted_as_complete(patch: pytest.MonkeyPatch) -> None:
    def believe(self: DigestCursor) -> tuple[Instruction, ...]:
        request = self._request
        end = ReplayMeta(b"", b"", 0, 0, ReplayMetaKind.END, False, 0, b"")
        return () if request is None or request.is_status else self._finish(request, end)

    patch.setattr(DigestCursor, "on_replay_end", believe)


@caught_by(*REJOIN_AFTER_THE_BUFFER_MOVED, ("serve", 0, 1, "none"), ("serve", 0, 1, "lose"), ("serve", 0, 9, "none"))
def lost_chunks_not_counted(patch: pytest.MonkeyPatch) -> None:
    encode = ReplayMeta.encode

    def without_chunks(self: ReplayMeta) -> bytes:
        fields = (self.token, self.epoch, self.first, self.next, self.kind, self.snap, self.start, self.chain)
        return encode(ReplayMeta(*fields))

    patch.setattr(ReplayMeta, "encode", without_chunks)


@caught_by(
    *[
        *REJOIN_AFTER_THE_BUFFER_MOVED,
        ("serve", 0, 1, "none"),
        ("wait", 12),
        ("remove", 4, 1, False),
        *[("store", 0, 1, False), ("send",)] * 3,
    ],
    *[("serve", 0, 1, "none"), ("deliver_late", 0), ("serve", 0, 9, "none")],
)
def answers_to_older_requests_accepted(patch: pytest.MonkeyPatch) -> None:
    def answer_any_request(rules: DigestCursor | PlainCursor, event: CursorEvent) -> tuple[Instruction, ...]:
        if isinstance(event, ReplayBatchReceived):
            event = ReplayBatchReceived(rules.open_request_id or 0, event.seq, event.payload)
        return dispatch(rules, event)

    patch.setattr(stream_cursor, "dispatch", answer_any_request)


@caught_by(("disconnect", 1), ("connect", 1), ("serve", 1, 8, "lose"), is_searched=True)
def retry_never(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DigestCursor, "on_retry_due", lambda self: ())


@caught_by(("forge", 0, 0, 1), is_searched=True)
def probe_never(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DigestCursor, "on_probe_due", lambda self: ())


@caught_by(("restart", True), ("clear",), is_searched=True)
def plain_payload_not_compared(patch: pytest.MonkeyPatch) -> None:
    on_first_batch = PlainCursor._on_first_batch

    def believe(self: PlainCursor, request: Any, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        self._run.payload = payload if seq == self._run.last else self._run.payload
        return on_first_batch(self, request, seq, payload)

    patch.setattr(PlainCursor, "_on_first_batch", believe)


@pytest.mark.broken_variants
@pytest.mark.soak
@pytest.mark.parametrize(("mutate", "trace", "window", "seq_base", "is_searched"), MUTANTS)
def test_a_broken_core_is_caught(
    mutate: Mutate,
    trace: Steps,
    window: int,
    seq_base: str,
    is_searched: bool,
    soaking: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RecoverySimulation(window=window, seq_base=seq_base).run(trace)
    mutate(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        RecoverySimulation(window=window, seq_base=seq_base).run(trace)

    @given(trace=TRACES, window=WINDOWS, seq_base=SEQ_BASES)
    @settings(
        max_examples=1_500, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    def holds(trace: Steps, window: int, seq_base: str) -> None:
        RecoverySimulation(window=window, seq_base=seq_base).run(trace)

    if soaking and is_searched:
        with pytest.raises((AssertionError, LookupError)):
            holds()
