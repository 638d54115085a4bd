"""The simulated device takes the time of its cost model, and its tokens depend only on the request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_engine.device.device import (
    NUM_SIMULATED_LAYERS,
    CostModel,
    ScheduledBatch,
    ScheduledChunk,
    SimulatedDevice,
    SimulatedModel,
)
from scheduler_engine.device.sampling import SamplingParams
from scheduler_engine.engine.scheduler.request import EngineRequest

checked = settings(deadline=None)

rids = st.text(min_size=1, max_size=8)
counts = st.integers(0, 10_000)


class FakeTime:
    """A clock that only sleep and work advance."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now_s += duration_s


def a_batch(chunks: list[tuple[str, int]], num_prefill: int = 0, num_decode: int = 0) -> ScheduledBatch:
    return ScheduledBatch(
        chunks=tuple(ScheduledChunk(EngineRequest(rid, [0]), end - 1, end, False) for rid, end in chunks),
        num_prefill_tokens=num_prefill,
        num_decode_tokens=num_decode,
        num_context_tokens=sum(end for _, end in chunks),
    )


@checked
@given(counts, counts, st.floats(0.01, 100))
def test_a_batch_takes_its_cost_divided_by_the_speed(num_prefill: int, num_decode: int, speed: float) -> None:
    time = FakeTime()
    cost = CostModel()
    batch = a_batch([("a", 500)], num_prefill, num_decode)
    device = SimulatedDevice(cost=cost, speed=speed, clock=time.clock, sleep=time.sleep)
    device.launch(batch)
    assert time.slept_s == []  # launch returns immediately
    device.wait()
    assert time.now_s - 1000.0 == pytest.approx(cost.batch_s(batch) / speed)


class RecordedFence:
    """Pages come in a given time per layer."""

    def __init__(self, time: FakeTime, layer_s: float) -> None:
        self.calls: list[str] = []
        self._time = time
        self._layer_s = layer_s

    def start_batch(self) -> None:
        self.calls.append("begin")

    def wait_until(self, layer: int) -> None:
        self.calls.append(f"layer {layer}")
        self._time.now_s += self._layer_s


@pytest.mark.parametrize("slower", [0.1, 3.0])
def test_the_device_waits_for_pages_layer_by_layer_and_computes_meanwhile(slower: float) -> None:
    time, batch = FakeTime(), a_batch([("a", 5)], num_prefill=1000)
    cost_s = CostModel().batch_s(batch)
    layer_counter = RecordedFence(time, slower * cost_s / NUM_SIMULATED_LAYERS)
    device = SimulatedDevice(clock=time.clock, sleep=time.sleep, layer_counter=layer_counter)
    device.launch(batch)
    assert layer_counter.calls == ["begin"]
    device.wait()
    assert layer_counter.calls == ["begin", *(f"layer {layer}" for layer in range(NUM_SIMULATED_LAYERS))]
    assert time.now_s - 1000.0 == pytest.approx(max(1.0, slower) * cost_s)


@checked
@given(st.floats(0, 2))
def test_work_done_between_launch_and_wait_is_not_waited_for_again(share: float) -> None:
    time = FakeTime()
    batch = a_batch([("a", 5)], num_prefill=1000)
    device = SimulatedDevice(clock=time.clock, sleep=time.sleep)
    device.launch(batch)
    time.now_s += share * CostModel().batch_s(batch)
    device.wait()
    assert sum(time.slept_s) == pytest.approx(max(0.0, 1 - share) * CostModel().batch_s(batch), abs=1e-9)
    assert all(duration_s > 0 for duration_s in time.slept_s)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=4)
samplings = st.builds(SamplingParams, temperature=st.sampled_from((0.0, 0.5, 1.0)), seed=st.none() | st.integers(0, 2))
texts = st.builds(EngineRequest, rids, prompts, sampling=samplings)


def generate(*requests: EngineRequest, model: SimulatedModel | None = None) -> list[tuple[int, ...]]:
    """The first 24 tokens of each request, computed in one batch per step."""
    time, steps = FakeTime(), []
    device = SimulatedDevice(model=model or SimulatedModel(), clock=time.clock, sleep=time.sleep)
    for step in range(24):
        ends = [len(each.input_ids) + step for each in requests]
        chunks = (ScheduledChunk(each, end - 1, end, False) for each, end in zip(requests, ends, strict=True))
        device.launch(ScheduledBatch(chunks=tuple(chunks)))
        steps.append(device.wait().token_ids)
    return list(zip(*steps, strict=True))


def source(request: EngineRequest) -> tuple[object, ...]:
    """What the text of a request may depend on, and nothing else."""
    sampling = request.sampling
    if sampling.temperature == 0.0:
        return (request.input_ids,)
    return request.input_ids, sampling.temperature, request.rid if sampling.seed is None else str(sampling.seed)


@checked
@given(texts, texts)
def test_two_requests_get_one_text_if_prompt_seed_and_temperature_are_equal(
    one: EngineRequest, other: EngineRequest
) -> None:
    """Without temperature the seed has no effect, as on a real device."""
    first, second = generate(one, other)
    assert (first == second) == (source(one) == source(other))
    assert generate(one) == [first], "a text does not depend on the batch"


def test_the_text_of_a_prompt_does_not_change_while_it_grows() -> None:
    """A retracted request computes its generated tokens again, as a part of a longer prefill."""
    request = EngineRequest("r", [1, 2, 3])
    (whole,) = generate(request)
    request.token_ids.extend(whole[:5])
    device = SimulatedDevice(sleep=lambda _: None)
    device.launch(ScheduledBatch(chunks=(ScheduledChunk(request, 0, 8, True),)))
    assert device.wait().token_ids == whole[5:6]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_an_invalid_speed_is_refused(speed: float) -> None:
    with pytest.raises(ConfigError, match="speed"):
        SimulatedDevice(speed=speed)
