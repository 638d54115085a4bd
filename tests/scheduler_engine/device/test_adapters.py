"""A simulated device distinguishes adapters, and computes none that it has not loaded."""

from __future__ import annotations

from scheduler_components.waiting.lora_queue import Adapter
from scheduler_engine.device.adapters import SimulatedAdapters
from scheduler_engine.device.device import CostModel, ScheduledBatch, ScheduledChunk, SimulatedDevice
from scheduler_engine.engine.scheduler.request import EngineRequest

FREE = CostModel(base_ms=0, prefill_us_per_token=0, decode_us_per_request=0, context_us_per_1k_tokens=0)


def test_an_adapter_has_a_path_while_it_is_loaded() -> None:
    adapters = SimulatedAdapters()
    adapters.load(Adapter("a", "/a", 1))
    assert (adapters.path_of(1), adapters.path_of(2)) == ("/a", None)
    adapters.unload(Adapter("a", "/a", 1))
    adapters.unload(Adapter("a", "/a", 1))
    assert adapters.path_of(1) is None


def test_texts_differ_by_adapter_and_a_chunk_without_its_adapter_fails_alone() -> None:
    device = SimulatedDevice(cost=FREE)
    for number in (1, 2):
        device.adapters.load(Adapter("x", f"/{number}", number))
    chunks = []
    for number in (None, 1, 2, 3):
        request = EngineRequest(f"r{number}", [1, 2, 3])
        request.lora_id = number
        chunks.append(ScheduledChunk(request, 0, 3, True))
    device.launch(ScheduledBatch(chunks=tuple(chunks), num_prefill_tokens=12))
    output = device.wait()
    assert len(set(output.token_ids[:3])) == 3
    assert output.errors == {3: "adapter 3 is not loaded"}
