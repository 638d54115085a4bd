"""The delivery contract while the publisher never stops. Property: every promise holds after every turn.

Broken variants of each core show that the property catches them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kit import broken_traffic_cores
from kit.searches import num_examples

from observability.kv_stream import StreamState
from observability.kv_stream.digest_cursor import DigestCursor
from observability.kv_stream.instructions import Instruction
from scheduler_components.kv_events import stream
from worlds.recovery_model import Steps
from worlds.traffic_model import TrafficShape, TrafficSimulation

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
    """A snapshot of some hundred blocks takes several steps of planning, as a large one does."""
    monkeypatch.setattr(stream, "_SEGMENTS_PER_STEP", 32)


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


def caught_by(broken: Break, *steps: tuple, is_searched: bool = True) -> None:
    """Register a broken variant with steps that expose it.

    Args:
        broken: breaks one rule.
        steps: pass with the unchanged cores.
        is_searched: ``make soak`` checks that random steps expose the variant too. They rarely expose the others.
    """
    BROKEN.append(pytest.param(broken, steps, is_searched, id=broken.__name__))


@cache
def check_sound(steps: tuple[tuple, ...]) -> None:
    """Check once that the unchanged cores pass."""
    run(list(steps))


def live_batches_cost_replays_again_and_again(patch: pytest.MonkeyPatch) -> None:
    """Each replay is short, so the reader is LIVE again soon enough, and on time."""
    live = DigestCursor.on_live_batch

    def leave_live(self: DigestCursor, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        instructions = live(self, seq, payload)
        is_spare = self.state is StreamState.LIVE and self.open_request_id is None and self._credit.available > 2
        return (*instructions, *self._sync()) if is_spare and seq % 40 == 0 else instructions

    patch.setattr(DigestCursor, "on_live_batch", leave_live)


caught_by(live_batches_cost_replays_again_and_again, ("join", 0), ("turns", 200), is_searched=False)
caught_by(broken_traffic_cores.batches_of_open_answers_are_not_kept, *JOIN_ALL)
caught_by(broken_traffic_cores.answers_hold_nothing, *JOIN_ALL)
caught_by(broken_traffic_cores.snapshot_is_folded_while_it_is_planned, *JOIN_ALL)
caught_by(broken_traffic_cores.pins_are_never_released, *JOIN_ALL)
caught_by(broken_traffic_cores.holds_are_never_released, *JOIN_ALL)
caught_by(
    broken_traffic_cores.a_slow_answer_is_never_cut,
    ("join", 0),
    ("turns", 4),
    ("pause", 0, 60),
    ("turns", 60),
    is_searched=False,
)
caught_by(broken_traffic_cores.every_answer_behind_the_buffer_is_cut, *JOIN_ALL)
caught_by(
    broken_traffic_cores.kept_batches_have_no_bound,
    ("join", 0),
    ("turns", 4),
    ("pause", 0, 60),
    ("turns", 60),
    is_searched=False,
)
caught_by(broken_traffic_cores.a_drain_folds_one_batch, *JOIN_ALL)
caught_by(broken_traffic_cores.a_snapshot_waits_until_nothing_is_left_to_fold, *JOIN_ALL)
caught_by(broken_traffic_cores.the_end_names_the_present_position, *JOIN_ALL)
caught_by(broken_traffic_cores.a_plain_answer_at_the_edge_of_the_buffer_gets_the_snapshot_again, ("join", 2))
caught_by(broken_traffic_cores.a_gap_costs_a_snapshot, ("join", 0), ("turns", 100), *[("lose", 0), ("turns", 150)])
caught_by(broken_traffic_cores.live_batches_are_dropped_during_an_answer, *JOIN_ALL)
caught_by(broken_traffic_cores.a_snapshot_is_sent_twice, *JOIN_ALL, is_searched=False)
caught_by(broken_traffic_cores.a_gap_is_never_asked_about, ("join", 0), ("turns", 210), ("lose", 0), ("turns", 150))
caught_by(
    broken_traffic_cores.a_plain_gap_is_never_asked_about,
    ("join", 2),
    ("turns", 100),
    ("lose", 2),
    ("turns", 150),
    is_searched=False,
)


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
