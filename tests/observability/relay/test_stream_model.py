"""A relay between faulty networks: publishers, the relay that follows them, and the readers that follow it.

All parts are actors of the simulated world, moved by steps. Properties, whatever is lost, restarted or cut on either
side:

- after every step, the published state is the union of what the relay knows (``RelayActor.check``);
- no reader is ``LIVE`` with a view that differs from the relay's stream (the simulation checks this);
- once the faults stop, every reader has the engines' blocks, and is ``LIVE`` if and only if the relay knows all of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kit import broken_relay_cores
from kit.searches import num_examples
from worlds import SubscriberActor
from worlds.recovery_model import RecoverySimulation, SteppedReader
from worlds.relay_actor import RelayActor

from observability.kv_stream import StreamListener, StreamState


@dataclass
class SteppedSource:
    """One engine, as the relay follows it."""

    engine: RecoverySimulation
    reader: SubscriberActor

    def close(self) -> None:
        self.engine.disconnect(0)


class RelayWorld:
    """Engines, each followed by the relay, and the relay's readers."""

    def __init__(self, *, windows: tuple[int, int], seq_base: str, engines: tuple[bool, ...]) -> None:
        self.engines = [
            RecoverySimulation(window=windows[0], seq_base=seq_base, num_extended=0, num_plain=0) for _ in engines
        ]
        self.has_extension = engines
        self.readers = RecoverySimulation(window=windows[1], seq_base="clock", num_extended=1, num_plain=1)
        self.relay = RelayActor(
            [partial(self.follow, key) for key in range(len(engines))],
            self.readers.publisher,
        )
        self.relay.begin()

    def follow(self, key: int, listener: StreamListener) -> SteppedSource:
        """Follow an engine with an empty view."""
        engine = self.engines[key]
        reader = SteppedReader(
            engine.publisher, f"relay of {key}", has_extension=self.has_extension[key], now_s=engine.now_s
        )
        reader.actor.follower.applier.listener = listener
        engine.subscribers = [reader]
        return SteppedSource(engine, reader.actor)

    def restart_relay(self) -> None:
        self.relay.end()
        self.readers.restart(False)
        self.relay.begin()

    def play(self, steps: list[tuple]) -> None:
        for where, *step in steps:
            if where == "relay":
                self.restart_relay()
            elif where == "again":
                self.relay.follow_again(step[0] % len(self.engines))
            elif where == "wait":
                for world in (*self.engines, self.readers):
                    world.play([("wait", *step)])
            elif where == "engine":
                which, *rest = step
                self.engines[which % len(self.engines)].play([tuple(rest)])
            else:
                self.readers.play([tuple(step)])
            self.relay.flush()

    def run(self, steps: list[tuple]) -> None:
        for which in range(len(self.engines)):
            self.play([("engine", which, "store", 0, 3, False), ("engine", which, "send")])
            self.play([("engine", which, "connect", 0), *[("engine", which, "serve", 0, 9, "none")] * 2])
        for which in range(2):
            self.play([("reader", "connect", which), *[("reader", "serve", which, 9, "none")] * 2])
        self.play(steps)
        for engine in self.engines:
            engine.recover()
            engine.check_converged()
        self.relay.flush()
        self.readers.recover()
        self.check_readers()

    def check_readers(self) -> None:
        is_whole = self.relay.is_whole
        for each in self.readers.subscribers:
            assert each.blocks == self.relay.known
            if each.actor.follower.cursor.is_extended:  # a plain reader has no such field
                assert (each.state is StreamState.LIVE) == is_whole, f"{each.state}, and the relay knows {is_whole}"


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
        st.tuples(st.just("again"), ENGINE),
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


def caught_by(broken: Break, *steps: tuple, engines: tuple[bool, ...] = (True,), seq_base: str = "clock") -> None:
    """Register a broken relay with steps that expose it; `make soak` checks that random steps expose it too."""
    BROKEN.append(pytest.param(broken, list(steps), engines, seq_base, id=broken.__name__))


caught_by(
    broken_relay_cores.a_clear_after_a_restart_is_forgotten,
    ("engine", 0, "restart", False),
    engines=(False,),
    seq_base="zero",
)


caught_by(broken_relay_cores.partial_is_published_as_whole, ("engine", 0, "poison"))
caught_by(
    broken_relay_cores.the_best_source_sets_the_state,
    ("engine", 0, "store", 0, 1, False),
    ("engine", 0, "poison"),
    engines=(True, True),
)
caught_by(broken_relay_cores.the_end_of_a_doubt_is_not_published)
caught_by(broken_relay_cores.the_begin_of_a_snapshot_is_ignored)
caught_by(broken_relay_cores.a_cut_snapshot_stays, *CUT_IN_A_SNAPSHOT)
caught_by(
    broken_relay_cores.the_base_does_not_begin_with_a_clear,
    ("relay",),
    ("engine", 0, "store", 0, 1, False),
    engines=(False,),
)


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
