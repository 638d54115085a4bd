"""Cores of publisher and subscriber that are broken on purpose. Each function breaks one rule for a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from observability.kv_stream import BlockView, FrameParser, digest_cursor, follower, stream_cursor
from observability.kv_stream.digest_cursor import NO_EPOCH, DigestCursor, Position
from observability.kv_stream.instructions import Apply, Instruction
from observability.kv_stream.plain_cursor import PlainCursor
from observability.kv_stream.stream_cursor import StreamCursor
from observability.kv_stream.stream_state import CursorCounters
from scheduler_components import BlockStored
from scheduler_components.events import TIER_MEDIUM
from scheduler_components.kv_events import EventStream
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind
from scheduler_components.kv_events.snapshot import StreamSnapshot


def digest_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Position, "matches", lambda self, meta: (self.epoch, self.next) == (meta.epoch, meta.start))


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


def status_compared_with_the_digest_at_answer_time(patch: pytest.MonkeyPatch) -> None:
    compare = DigestCursor._check_status

    def compare_now(self: DigestCursor, request: Any, meta: ReplayMeta) -> tuple[Instruction, ...]:
        request.initial.digest = self._position.digest
        return compare(self, request, meta)

    patch.setattr(DigestCursor, "_check_status", compare_now)


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


def end_not_checked(patch: pytest.MonkeyPatch) -> None:
    _accept_meta_without(patch, lambda request, meta: meta.kind is not ReplayMetaKind.END)


def _accept_holes(patch: pytest.MonkeyPatch, in_phase: str) -> None:
    accept_payload = digest_cursor._ExtendedRequest.accept_payload

    def accept_any(self: Any, seq: int, payload: bytes) -> Any:
        position = self.staging or self.position
        expected = self.num_chunks if self.phase is digest_cursor._Phase.CHUNKS else position.next
        return accept_payload(self, expected if self.phase.name == in_phase and seq > expected else seq, payload)

    patch.setattr(digest_cursor._ExtendedRequest, "accept_payload", accept_any)


def holes_inside_an_answer_accepted(patch: pytest.MonkeyPatch) -> None:
    _accept_holes(patch, "BATCHES")


def holes_in_the_chunks_accepted(patch: pytest.MonkeyPatch) -> None:
    _accept_holes(patch, "CHUNKS")
    _accept_meta_without(patch, lambda request, meta: meta.chunks is None)


def snapshot_is_not_folded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamSnapshot, "fold", lambda self, payload, changes: None)


def buffer_is_off_by_one(patch: pytest.MonkeyPatch) -> None:
    fold_oldest = EventStream.fold_oldest

    def fold_and_forget_one(self: EventStream) -> None:
        fold_oldest(self)
        if self.has_folded and len(self) > 1 and not self.pins:
            lost = self._batches.popleft()
            self._folded = (lost.sequence + 1, lost.num_bytes)

    patch.setattr(EventStream, "fold_oldest", fold_and_forget_one)


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


def requests_without_a_credit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(follower, "MAX_REPLAY_CREDIT", 10**6)
    patch.setattr(stream_cursor, "CursorCounters", lambda: CursorCounters(credit=10**6))


def gap_without_credit_forgotten(patch: pytest.MonkeyPatch) -> None:
    for each in (DigestCursor, PlainCursor):
        patch.setattr(each, "on_credit_available", lambda self: ())


def topic_not_compared(patch: pytest.MonkeyPatch) -> None:
    live = FrameParser.parse_live

    def read_any(self: FrameParser, frames: Any) -> tuple[int, bytes] | None:
        return live(self, (self.topic, *frames[1:]))

    patch.setattr(FrameParser, "parse_live", read_any)


def future_frame_kept(patch: pytest.MonkeyPatch) -> None:
    _accept_live(patch, lambda seq, expected: seq > expected)


def duplicate_applied(patch: pytest.MonkeyPatch) -> None:
    _accept_live(patch, lambda seq, expected: seq < expected)


def future_frame_causes_no_request(patch: pytest.MonkeyPatch) -> None:
    live = DigestCursor.on_live_batch
    patch.setattr(
        DigestCursor,
        "on_live_batch",
        lambda self, seq, payload: () if seq > self._position.next else live(self, seq, payload),
    )
    patch.setattr(DigestCursor, "on_probe_due", lambda self: ())


def snapshot_applied_without_clear(patch: pytest.MonkeyPatch) -> None:
    replace = BlockView.replace

    def add(self: BlockView, rank: int, other: BlockView) -> None:
        before = [(medium, tuple(self.blocks(rank, tier))) for tier, medium in TIER_MEDIUM.items()]
        replace(self, rank, other)
        self.apply(rank, [BlockStored(blocks, None, (), 1, None, medium) for medium, blocks in before])

    patch.setattr(BlockView, "replace", add)


def truncated_answer_accepted_as_complete(patch: pytest.MonkeyPatch) -> None:
    def believe(self: DigestCursor, request_id: int) -> tuple[Instruction, ...]:
        request = self._request
        end = ReplayMeta(b"", b"", 0, 0, ReplayMetaKind.END, False, 0, b"")
        return (
            ()
            if request_id != self.open_request_id or request is None or request.is_status
            else self._finish(request, end)
        )

    patch.setattr(DigestCursor, "on_replay_end", believe)


def lost_chunks_not_counted(patch: pytest.MonkeyPatch) -> None:
    encode = ReplayMeta.encode

    def without_chunks(self: ReplayMeta) -> bytes:
        fields = (self.token, self.epoch, self.first, self.next, self.kind, self.snap, self.start, self.chain)
        return encode(ReplayMeta(*fields))

    patch.setattr(ReplayMeta, "encode", without_chunks)


def answers_to_older_requests_accepted(patch: pytest.MonkeyPatch) -> None:
    on_replay_batch = StreamCursor.on_replay_batch

    def accept_any_request(self: StreamCursor, request_id: int, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        del request_id
        return on_replay_batch(self, self._rules.open_request_id or 0, seq, payload)

    patch.setattr(StreamCursor, "on_replay_batch", accept_any_request)


def retry_never(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DigestCursor, "on_retry_due", lambda self: ())


def probe_never(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DigestCursor, "on_probe_due", lambda self: ())


def plain_payload_not_compared(patch: pytest.MonkeyPatch) -> None:
    on_first_batch = PlainCursor._on_first_batch

    def believe(self: PlainCursor, request: Any, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        self._run.payload = payload if seq == self._run.last else self._run.payload
        return on_first_batch(self, request, seq, payload)

    patch.setattr(PlainCursor, "_on_first_batch", believe)


def the_extension_is_looked_for_once(patch: pytest.MonkeyPatch) -> None:
    """The defect of 0.4 that a simulated world found: after its first requests were lost, a reader had no digest."""
    patch.setattr(StreamCursor, "on_extension_probe_due", lambda self: ())
