"""A relay between faulty networks: publishers, the relay that follows them, and the readers that follow it.

All parts are the kit's real cores. Properties, whatever is lost, restarted or cut on either side:

- after every step, the published state is the union of the relay's views;
- no reader is ``LIVE`` with a view that differs from the relay's stream (the simulation checks this);
- once the faults stop, every reader has the engines' blocks, and is ``LIVE`` if and only if the relay knows all of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from observability.kv_stream import BlockView, StreamState, Tier
from observability.relay.source_merger import SourceMerger
from observability.relay.stream import RelayedStream, SourceListener
from observability.testing import RecoverySimulation
from observability.testing.recovery_model import SteppedReader
from scheduler_components import EventBatch
from scheduler_components.kv_events import EventStream
from scheduler_components.values import PublisherStats

State = frozenset[tuple[int, Tier]]


class ModelSink:
    """Publishes to the relay's readers."""

    def __init__(self, world: RecoverySimulation) -> None:
        self.world = world

    def publish(self, events: EventBatch) -> None:
        self.world.publisher.publish(events)

    def idle(self) -> None:
        self.world.send()

    def set_upstream_state(self, state: str | None) -> None:
        self.world.publisher.set_upstream_state(state)

    def stats(self) -> PublisherStats:
        return PublisherStats()

    def shutdown(self) -> None:
        """Do nothing."""


class RelayWorld:
    """Engines, each followed by the relay, and the relay's readers."""

    def __init__(self, *, windows: tuple[int, int], seq_base: str, engines: tuple[bool, ...]) -> None:
        self.engines = [
            RecoverySimulation(
                window=windows[0], seq_base=seq_base, num_extended=is_extended, num_plain=not is_extended
            )
            for is_extended in engines
        ]
        self.readers = RecoverySimulation(window=windows[1], seq_base="clock", num_extended=1, num_plain=1)
        self.begin_relay()

    def begin_relay(self) -> None:
        """Restart the relay with an empty state."""
        self.stream = RelayedStream(0, ModelSink(self.readers), wall_clock=lambda: 0.0)
        for key, engine in enumerate(self.engines):
            (before,) = engine.subscribers
            engine.subscribers = [
                SteppedReader(
                    engine.publisher,
                    f"relay of engine {key}",
                    has_extension=before.has_extension,
                    now_s=engine.now_s,
                )
            ]
            engine.subscribers[0].actor.follower.applier.listener = SourceListener(key, {0: self.stream})
            self.stream.merger.add_source(key)
        self.stream.send_upstream_state()

    def restart_relay(self) -> None:
        for engine in self.engines:
            engine.disconnect(0)
        self.readers.restart(False)
        self.begin_relay()

    def play(self, steps: list[tuple]) -> None:
        for where, *step in steps:
            if where == "relay":
                self.restart_relay()
            elif where == "wait":
                for world in (*self.engines, self.readers):
                    world.play([("wait", *step)])
            elif where == "engine":
                which, *rest = step
                self.engines[which % len(self.engines)].play([tuple(rest)])
            else:
                self.readers.play([tuple(step)])
            self.stream.flush()
            self.check()

    def check(self) -> None:
        """Check that the published state is the union of the sources."""
        assert self.readers.publisher.held == self.known()

    def known(self) -> State:
        views = [each.actor.follower.applier for engine in self.engines for each in engine.subscribers]
        return frozenset().union(*[_blocks(each.view) | _blocks(each.staging) for each in views])

    def run(self, steps: list[tuple]) -> None:
        for which in range(len(self.engines)):
            self.play([("engine", which, "store", 0, 3, False), ("engine", which, "send")])
            self.play([("engine", which, "connect", 0), *[("engine", which, "serve", 0, 9, "none")] * 2])
        for which in range(2):
            self.play([("reader", "connect", which), *[("reader", "serve", which, 9, "none")] * 2])
        self.play(steps)
        for engine in self.engines:
            engine.recover()
            self.check_relayed(engine)
            self.stream.flush()
        self.check()
        self.readers.recover()
        self.check_readers()

    def check_relayed(self, engine: RecoverySimulation) -> None:
        """Check that the relay's view equals the engine's state, and is LIVE where it can be proved."""
        (relayed,) = engine.subscribers
        assert relayed.blocks == engine.publisher.held
        can_prove = relayed.actor.follower.cursor.is_extended or len(engine.publisher.stream) > 0
        if can_prove and not engine.publisher.is_poisoned:
            assert relayed.state is StreamState.LIVE

    def check_readers(self) -> None:
        relayed = [engine.subscribers[0] for engine in self.engines]
        is_whole = all(each.state is StreamState.LIVE for each in relayed)
        for each in self.readers.subscribers:
            assert each.blocks == self.known()
            if each.actor.follower.cursor.is_extended:  # a plain reader has no such field
                assert (each.state is StreamState.LIVE) == is_whole, f"{each.state}, and the relay knows {is_whole}"


def _blocks(view: BlockView | None) -> State:
    return frozenset((each, tier) for tier in Tier for each in view.blocks(0, tier)) if view else frozenset()


FAULTS = ("none", "none", "none", "lose", "repeat")
BLOCKS = (st.integers(0, 5), st.integers(1, 3), st.booleans())
ENGINE = st.integers(0, 1)
COUNT = st.integers(1, 8)
READER = st.integers(0, 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("engine"), ENGINE, st.sampled_from(["store", "store", "remove"]), *BLOCKS),
        st.tuples(st.just("engine"), ENGINE, st.sampled_from(["send", "send", "clear", "poison"])),
        st.tuples(st.just("engine"), ENGINE, st.just("deliver"), st.just(0), COUNT, st.sampled_from(FAULTS)),
        st.tuples(st.just("engine"), ENGINE, st.just("serve"), st.just(0), COUNT, st.sampled_from(FAULTS)),
        st.tuples(st.just("engine"), ENGINE, st.sampled_from(["connect", "connect", "disconnect"]), st.just(0)),
        st.tuples(st.just("engine"), ENGINE, st.just("restart"), st.just(False)),
        st.tuples(st.just("reader"), st.just("deliver"), READER, st.integers(1, 4), st.sampled_from(FAULTS)),
        st.tuples(st.just("reader"), st.just("serve"), READER, st.integers(1, 8), st.sampled_from([*FAULTS, "cut"])),
        st.tuples(st.just("reader"), st.sampled_from(["connect", "connect", "disconnect"]), READER),
        st.tuples(st.just("wait"), st.sampled_from([1, 5, 21, 60])),
        st.just(("relay",)),
    ),
    max_size=30,
)  # fmt: skip
WINDOWS = st.tuples(st.integers(1, 5), st.integers(1, 5))
SEQ_BASES = st.sampled_from(["zero", "clock"])
ENGINES = st.sampled_from([(True,), (False,), (True, True), (True, False)])
CUT_IN_A_SNAPSHOT = [
    ("engine", 0, "restart", False),
    *[("engine", 0, "store", 4, 1, False), ("engine", 0, "send"), ("engine", 0, "store", 5, 1, False)] * 3,
    ("engine", 0, "disconnect", 0), ("engine", 0, "connect", 0), *[("engine", 0, "serve", 0, 1, "none")] * 3,
    ("engine", 0, "disconnect", 0),
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(900)
@given(steps=STEPS, windows=WINDOWS, seq_base=SEQ_BASES, engines=ENGINES)
@example(steps=CUT_IN_A_SNAPSHOT, windows=(1, 1), seq_base="zero", engines=(True,))
@settings(max_examples=num_examples(3), suppress_health_check=list(HealthCheck))
def test_readers_of_a_relay_have_its_blocks_and_its_state(
    steps: list[tuple], windows: tuple[int, int], seq_base: str, engines: tuple[bool, ...]
) -> None:
    RelayWorld(windows=windows, seq_base=seq_base, engines=engines).run(steps)


# --- broken variants ---

Break = Callable[[pytest.MonkeyPatch], None]
BROKEN: list[Any] = []


def caught_by(*steps: tuple, engines: tuple[bool, ...] = (True,), seq_base: str = "clock") -> Callable[[Break], Break]:
    """Register a broken relay with steps that expose it; `make soak` checks that random steps expose it too."""

    def register(broken: Break) -> Break:
        BROKEN.append(pytest.param(broken, list(steps), engines, seq_base, id=broken.__name__))
        return broken

    return register


@caught_by(("engine", 0, "restart", False), engines=(False,), seq_base="zero")
def a_clear_after_a_restart_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceListener, "on_view_cleared", lambda *_: None)


@caught_by(("engine", 0, "poison"))
def partial_is_told_as_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceMerger, "upstream", property(lambda _: None))


@caught_by(("engine", 0, "store", 0, 1, False), ("engine", 0, "poison"), engines=(True, True))
def the_best_source_sets_the_state(patch: pytest.MonkeyPatch) -> None:
    def best(self: SourceMerger) -> str | None:
        return None if any(each.state is StreamState.LIVE for each in self._sources.values()) else "partial"

    patch.setattr(SourceMerger, "upstream", property(best))


@caught_by()
def the_end_of_a_doubt_is_not_published(patch: pytest.MonkeyPatch) -> None:
    def send_doubts(self: RelayedStream) -> None:
        if self.merger.upstream is not None:
            self.sink.set_upstream_state(self.merger.upstream)

    patch.setattr(RelayedStream, "send_upstream_state", send_doubts)


@caught_by()
def the_begin_of_a_snapshot_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceListener, "on_snapshot_begin", lambda *_: None)


@caught_by(*CUT_IN_A_SNAPSHOT)
def a_cut_snapshot_stays(patch: pytest.MonkeyPatch) -> None:
    right = SourceListener.on_snapshot_end

    def ended(self: SourceListener, rank: int, *, was_used: bool) -> None:
        if was_used:
            right(self, rank, was_used=True)

    patch.setattr(SourceListener, "on_snapshot_end", ended)


@caught_by(("relay",), ("engine", 0, "store", 0, 1, False), engines=(False,))
def the_base_does_not_begin_with_a_clear(patch: pytest.MonkeyPatch) -> None:
    right = EventStream.encode_chunk
    patch.setattr(EventStream, "encode_chunk", lambda *args, clear: right(*args, clear=False))


@pytest.mark.broken_variants
@pytest.mark.soak
@pytest.mark.parametrize(("broken", "steps", "engines", "seq_base"), BROKEN)
def test_a_broken_relay_is_caught(
    broken: Break,
    steps: list[tuple],
    engines: tuple[bool, ...],
    seq_base: str,
    soaking: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @settings(
        max_examples=2_000, database=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(steps=STEPS, windows=WINDOWS, seq_base=SEQ_BASES, engines=ENGINES)
    @example(steps=CUT_IN_A_SNAPSHOT, windows=(1, 1), seq_base="zero", engines=(True,))
    def search(steps: list[tuple], windows: tuple[int, int], seq_base: str, engines: tuple[bool, ...]) -> None:
        RelayWorld(windows=windows, seq_base=seq_base, engines=engines).run(steps)

    RelayWorld(windows=(1, 1), seq_base=seq_base, engines=engines).run(steps)
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        RelayWorld(windows=(1, 1), seq_base=seq_base, engines=engines).run(steps)
    if soaking:
        with pytest.raises(AssertionError):
            search()
