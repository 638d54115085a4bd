"""Cores that serve or recover badly during traffic that never stops. Each function breaks one rule for a test."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from observability.kv_stream import StreamCursor, StreamState
from observability.kv_stream.digest_cursor import DigestCursor
from observability.kv_stream.instructions import Instruction
from observability.kv_stream.plain_cursor import PlainCursor
from scheduler_components.kv_events import EventStream, stream
from scheduler_components.kv_events.replay import _END, ReplaySessions, _numbered
from scheduler_components.kv_events.replay_messages import ReplayMetaKind, ReplayVerb


def batches_of_open_answers_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    """The defect of 0.4: the pin ends with the snapshot, and the next fold cuts the answer at its beginning."""
    fold = EventStream.fold_oldest

    def fold_and_forget(self: EventStream) -> None:
        fold(self)
        while self.oldest < self.first:
            self._batches.popleft()

    patch.setattr(EventStream, "fold_oldest", fold_and_forget)


def answers_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    hold = ReplaySessions._holding

    @contextmanager
    def hold_nothing(self: ReplaySessions, client: bytes) -> Iterator[None]:
        with hold(self, client):
            self._stream.holds = _Deaf()
            yield

    patch.setattr(ReplaySessions, "_holding", hold_nothing)


class _Deaf(dict[bytes, int]):
    def __setitem__(self, client: bytes, sequence: int) -> None:
        pass


def snapshot_is_folded_while_it_is_planned(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def not_pinned(self: ReplaySessions) -> Iterator[None]:
        yield

    patch.setattr(ReplaySessions, "_pinned", not_pinned)


def pins_are_never_released(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def pinned_for_good(self: ReplaySessions) -> Iterator[None]:
        self._stream.pins += 1
        yield

    patch.setattr(ReplaySessions, "_pinned", pinned_for_good)


def holds_are_never_released(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def held_for_good(self: ReplaySessions, client: bytes) -> Iterator[None]:
        yield

    patch.setattr(ReplaySessions, "_holding", held_for_good)


def a_slow_answer_is_never_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplaySessions, "cancel_pinned", lambda self: None)


def every_answer_behind_the_buffer_is_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventStream, "is_too_slow", lambda self, sequence: sequence < self.first)


def kept_batches_have_no_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventStream, "_is_over_twice", lambda self: False)


def a_drain_folds_one_batch(patch: pytest.MonkeyPatch) -> None:
    fold = EventStream.fold_oldest

    def fold_one(self: EventStream) -> None:
        if self.next_sequence % 2:
            self._num_unfolded = 1 - stream._FOLDS_PER_DRAIN
            fold(self)

    patch.setattr(EventStream, "fold_oldest", fold_one)


def a_snapshot_waits_until_nothing_is_left_to_fold(patch: pytest.MonkeyPatch) -> None:
    """A buffer that is full is never below its bounds while the publisher continues."""

    def wait(self: ReplaySessions) -> Generator[None, None, None]:
        while len(self._stream) >= self._stream._max_steps:
            yield None

    patch.setattr(ReplaySessions, "_wait_for_folding", wait)


def the_end_names_the_present_position(patch: pytest.MonkeyPatch) -> None:
    extended, batches = ReplaySessions._extended, ReplaySessions._batches
    requests: dict[bytes, Any] = {}

    def remember(self: ReplaySessions, client: bytes, request: Any) -> Any:
        requests[client] = request
        return extended(self, client, request)

    def end_of(self: ReplaySessions, client: bytes, start: int, stop: int, end: Any) -> Any:
        for message in batches(self, client, start, stop, end):
            is_end = message is end
            yield (self._meta(requests[client], ReplayMetaKind.END, self._stream.next_sequence) if is_end else message)

    patch.setattr(ReplaySessions, "_extended", remember)
    patch.setattr(ReplaySessions, "_batches", end_of)


def a_plain_answer_at_the_edge_of_the_buffer_gets_the_snapshot_again(patch: pytest.MonkeyPatch) -> None:
    """The defect of 0.4: 61 MB for 7,457 batches."""

    def plain(self: ReplaySessions, client: bytes, start: int) -> Any:
        stop = self._stream.next_sequence
        sequence = start if self._stream.has_folded else max(start, self._stream.first)
        with self._holding(client):
            while sequence < stop:
                if sequence < self._stream.first:
                    sequence = yield from self._folded(client, sequence)
                    continue
                self._stream.holds[client] = sequence
                yield _numbered(sequence, self._stream.payload(sequence))
                sequence += 1
        yield _END

    patch.setattr(ReplaySessions, "_plain", plain)


def a_gap_costs_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    sync = DigestCursor._sync
    patch.setattr(DigestCursor, "_sync", lambda self, verb=ReplayVerb.SNAPSHOT: sync(self, ReplayVerb.SNAPSHOT))


def live_batches_are_dropped_during_an_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamCursor, "is_accepting_live", property(lambda self: True))


def a_snapshot_is_sent_twice(patch: pytest.MonkeyPatch) -> None:
    chunk_of = ReplaySessions._chunk

    def twice(self: ReplaySessions, number: int, chunk: Any, *, clear: bool) -> Any:
        for message in chunk_of(self, number, chunk, clear=clear):
            yield message
            yield message

    patch.setattr(ReplaySessions, "_chunk", twice)


def a_gap_is_never_asked_about(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DigestCursor, "_recover_gap", lambda self: ())


def a_plain_gap_is_never_asked_about(patch: pytest.MonkeyPatch) -> None:
    def remember(self: PlainCursor) -> tuple[Instruction, ...]:
        self._has_gap = True
        return ()

    patch.setattr(PlainCursor, "_recover_gap", remember)


def live_batches_cost_replays_again_and_again(patch: pytest.MonkeyPatch) -> None:
    """Each replay is short, so the reader is LIVE again soon enough, and on time."""
    live = DigestCursor.on_live_batch

    def leave_live(self: DigestCursor, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        instructions = live(self, seq, payload)
        is_spare = self.state is StreamState.LIVE and self.open_request_id is None and self.counters.credit > 2
        return (*instructions, *self._sync()) if is_spare and seq % 40 == 0 else instructions

    patch.setattr(DigestCursor, "on_live_batch", leave_live)
