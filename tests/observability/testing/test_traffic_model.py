"""The delivery contract while the publisher never stops. Property: every promise holds after every turn.

Broken variants of each core show that the property catches them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from observability.kv_stream import StreamCursor
from observability.kv_stream.digest_cursor import DigestCursor
from observability.kv_stream.instructions import Instruction
from observability.kv_stream.plain_cursor import PlainCursor
from observability.testing import TrafficShape, TrafficSimulation
from observability.testing.recovery_model import Steps
from scheduler_components.kv_events import EventStream, stream
from scheduler_components.kv_events.replay import ReplaySessions
from scheduler_components.kv_events.replay_messages import ReplayMetaKind, ReplayVerb

INDEX = st.integers(0, 2)
TRACES = st.lists(
    st.one_of(
        st.tuples(st.just("join"), INDEX),
        st.tuples(st.just("join"), INDEX),
        st.tuples(st.just("turns"), st.integers(1, 30)),
        st.tuples(st.sampled_from(["leave", "lose"]), INDEX),
        st.tuples(st.just("pause"), INDEX, st.integers(1, 60)),
        st.tuples(st.just("burst"), st.integers(1, 40)),
    ),
    max_size=12,
)
SHAPES = st.builds(
    TrafficShape, window=st.integers(48, 96), rate=st.integers(1, 6), sends=st.integers(12, 24), standing=st.just(96)
)
SHAPE = TrafficShape()
JOIN_ALL = [("join", 0), ("join", 1), ("join", 2)]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of some hundred blocks takes several steps of planning and several chunks, as a large one does."""
    monkeypatch.setattr(stream, "_SEGMENTS_PER_STEP", 32)
    monkeypatch.setattr(stream, "_CHUNK_BYTES", 600)


def run(steps: Steps, shape: TrafficShape = SHAPE) -> None:
    TrafficSimulation(shape).run(steps)


@pytest.mark.timeout(600)
@settings(max_examples=num_examples(1), deadline=None, suppress_health_check=list(HealthCheck))
@example(steps=JOIN_ALL, shape=SHAPE)
@example(steps=JOIN_ALL[:2], shape=TrafficShape(window=68, sends=12))  # two statuses overtake live batches
@given(steps=TRACES, shape=SHAPES)
def test_every_promise_holds_while_the_publisher_never_stops(steps: Steps, shape: TrafficShape) -> None:
    run(steps, shape)


@pytest.mark.parametrize("rate", [1, 8, 16])
def test_a_reader_arrives_as_fast_as_its_answer_is_sent(rate: int) -> None:
    """At 16 batches per turn the publisher is as fast as the replay: the answer never comes nearer to the newest batch.

    It still ends, because it covers the batches up to its beginning.
    """
    traffic = TrafficSimulation(TrafficShape(rate=rate, window=64), num_extended=1, num_plain=0)
    traffic.join(0)
    num_turns = 0
    while traffic.subscribers[0].state != "live":
        traffic.turns(1)
        num_turns += 1
    # Seven steps of planning, eight chunks, the buffer, and what the publisher added to it meanwhile.
    assert num_turns <= 7 + (8 + 64 + 7 * rate) / 16 + 3


# --- broken variants ---

Break = Callable[[pytest.MonkeyPatch], None]
BROKEN: list[Any] = []


def caught_by(*steps: tuple, is_searched: bool = True) -> Callable[[Break], Break]:
    """Register a broken variant with steps that expose it.

    Args:
        steps: pass with the unchanged cores.
        is_searched: ``make soak`` checks that random steps expose the variant too. They rarely expose the others.
    """

    def register(broken: Break) -> Break:
        BROKEN.append(pytest.param(broken, steps, is_searched, id=broken.__name__))
        return broken

    return register


@cache
def check_sound(steps: tuple[tuple, ...]) -> None:
    """Check once that the unchanged cores pass."""
    run(list(steps))


@caught_by(*JOIN_ALL)
def batches_of_open_answers_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    """The defect of 0.4: the pin ends with the snapshot, and the next fold cuts the answer at its beginning."""
    fold = EventStream.fold_oldest

    def fold_and_forget(self: EventStream) -> None:
        fold(self)
        while self.oldest < self.first:
            self._batches.popleft()

    patch.setattr(EventStream, "fold_oldest", fold_and_forget)


@caught_by(*JOIN_ALL)
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


@caught_by(*JOIN_ALL)
def snapshot_is_folded_while_it_is_planned(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def not_pinned(self: ReplaySessions) -> Iterator[None]:
        yield

    patch.setattr(ReplaySessions, "_pinned", not_pinned)


@caught_by(*JOIN_ALL)
def pins_are_never_released(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def pinned_for_good(self: ReplaySessions) -> Iterator[None]:
        self._stream.pins += 1
        yield

    patch.setattr(ReplaySessions, "_pinned", pinned_for_good)


@caught_by(*JOIN_ALL)
def holds_are_never_released(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def held_for_good(self: ReplaySessions, client: bytes) -> Iterator[None]:
        yield

    patch.setattr(ReplaySessions, "_holding", held_for_good)


@caught_by(("join", 0), ("turns", 4), ("pause", 0, 60), ("turns", 60), is_searched=False)
def a_slow_answer_is_never_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplaySessions, "cancel_pinned", lambda self: None)


@caught_by(*JOIN_ALL)
def every_answer_behind_the_buffer_is_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventStream, "is_too_slow", lambda self, sequence: sequence < self.first)


@caught_by(("join", 0), ("turns", 4), ("pause", 0, 60), ("turns", 60), is_searched=False)
def kept_batches_have_no_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventStream, "_is_over_twice", lambda self: False)


@caught_by(*JOIN_ALL)
def a_drain_folds_one_batch(patch: pytest.MonkeyPatch) -> None:
    fold = EventStream.fold_oldest

    def fold_one(self: EventStream) -> None:
        if self.next_sequence % 2:
            self._num_unfolded = 1 - stream._FOLDS_PER_DRAIN
            fold(self)

    patch.setattr(EventStream, "fold_oldest", fold_one)


@caught_by(*JOIN_ALL)
def a_snapshot_waits_until_nothing_is_left_to_fold(patch: pytest.MonkeyPatch) -> None:
    """A buffer that is full is never below its bounds while the publisher continues."""

    def wait(self: ReplaySessions) -> Generator[None, None, None]:
        while len(self._stream) >= SHAPE.window:
            yield None

    patch.setattr(ReplaySessions, "_wait_for_folding", wait)


@caught_by(*JOIN_ALL)
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


@caught_by(("join", 2))
def a_plain_answer_at_the_edge_of_the_buffer_gets_the_snapshot_again(patch: pytest.MonkeyPatch) -> None:
    """The defect of 0.4: 61 MB for 7,457 batches."""
    patch.setattr(EventStream, "oldest", property(lambda self: self.first))


@caught_by(("join", 0), ("turns", 100), *[("lose", 0), ("turns", 150)])
def a_gap_costs_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    sync = DigestCursor._sync
    patch.setattr(DigestCursor, "_sync", lambda self, verb=ReplayVerb.SNAPSHOT: sync(self, ReplayVerb.SNAPSHOT))


@caught_by(*JOIN_ALL)
def live_batches_are_dropped_during_an_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamCursor, "is_accepting_live", property(lambda self: True))


@caught_by(*JOIN_ALL, is_searched=False)
def a_snapshot_is_sent_twice(patch: pytest.MonkeyPatch) -> None:
    chunk_of = ReplaySessions._chunk

    def twice(self: ReplaySessions, number: int, chunk: Any, *, clear: bool) -> Any:
        for message in chunk_of(self, number, chunk, clear=clear):
            yield message
            yield message

    patch.setattr(ReplaySessions, "_chunk", twice)


@caught_by(("join", 0), ("turns", 210), ("lose", 0), ("turns", 150))
def a_gap_is_never_asked_about(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DigestCursor, "_recover_gap", lambda self: ())


@caught_by(("join", 2), ("turns", 100), ("lose", 2), ("turns", 150), is_searched=False)
def a_plain_gap_is_never_asked_about(patch: pytest.MonkeyPatch) -> None:
    def remember(self: PlainCursor) -> tuple[Instruction, ...]:
        self._has_gap = True
        return ()

    patch.setattr(PlainCursor, "_recover_gap", remember)


@pytest.mark.broken_variants
@pytest.mark.parametrize(("broken", "steps", "is_searched"), BROKEN)
def test_a_broken_core_is_caught(
    broken: Break, steps: tuple[tuple, ...], is_searched: bool, soaking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_sound(steps)
    broken(monkeypatch)
    with pytest.raises((AssertionError, LookupError, RuntimeError)):
        run(list(steps))

    @settings(
        max_examples=200, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    @given(steps=TRACES, shape=SHAPES)
    def search(steps: Steps, shape: TrafficShape) -> None:
        run(steps, shape)

    if soaking and is_searched:
        with pytest.raises((AssertionError, LookupError, RuntimeError)):
            search()
