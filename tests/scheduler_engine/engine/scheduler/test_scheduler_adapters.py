"""KV of different adapters is never shared, and events say whose it is."""

from __future__ import annotations

from kit.immediate_loader import ImmediateLoader
from kit.reference_scheduler import drain

from scheduler_components import ParallelState
from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace, RadixCache, RadixNode
from scheduler_components.events import BlockStored
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.testing import ListEventSink
from scheduler_components.values import RequestHints
from scheduler_components.waiting.lora_queue import LoraQueue
from scheduler_engine.device.device import CostModel, SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

WEIGHTS = PrefixNamespace(extra_key="weight_version=2")
PROMPT = range(1, 10)


def a_request(rid: str, lora_id: int | None = None, session_id: str | None = None) -> EngineRequest:
    hints = RequestHints(lora=None if lora_id is None else f"adapter-{lora_id}")
    request = EngineRequest(rid, PROMPT, SamplingLimits(max_new_tokens=2), hints=hints)
    request.lora_id, request.session_id = lora_id, session_id
    return request


def kv_cache(namespace: PrefixNamespace) -> RequestKvCache[RadixNode]:
    cache = RadixCache(page_size=4, capacity_tokens=64)
    return RequestKvCache(cache=cache, namespace=namespace, namespaces=EngineRequest.namespace_in)


def test_a_request_of_the_base_model_has_the_namespace_of_the_weights() -> None:
    assert kv_cache(WEIGHTS).namespace_of(a_request("r")) is WEIGHTS


def test_an_adapter_changes_the_identity_and_a_session_does_not() -> None:
    adapted = kv_cache(WEIGHTS).namespace_of(a_request("r", lora_id=3))
    assert (adapted.lora_id, adapted.lora_name, adapted.extra_key) == (3, "adapter-3", WEIGHTS.extra_key)
    assert adapted.seed() != WEIGHTS.seed()
    in_session = kv_cache(DEFAULT_NAMESPACE).namespace_of(a_request("r", session_id="s"))
    assert (in_session.session_id, in_session.seed()) == ("s", DEFAULT_NAMESPACE.seed())


def test_adapters_share_no_page_and_events_carry_adapter_and_session() -> None:
    events = ListEventSink()
    free = CostModel(base_ms=0, prefill_us_per_token=0, decode_us_per_request=0, context_us_per_1k_tokens=0)
    device = SimulatedDevice(cost=free)
    lora = LoraQueue[EngineRequest](loader=ImmediateLoader(device.adapters))
    for name in ("adapter-1", "adapter-2"):
        lora.register(name, f"/{name}")
    scheduler = Scheduler.compose(
        SchedulerConfig(page_size=4, kv_tokens=128),
        ParallelState.trivial(),
        device,
        sinks=SchedulerSinks(events=events),
        lora=lora,
    )
    served = [a_request("a"), a_request("b", 1), a_request("c", 2), a_request("d", 1, "s"), a_request("e", None, "s")]
    for request in served:
        drain(scheduler, request)
    assert [request.num_cached_prompt_tokens for request in served] == [0, 0, 0, 8, 8]
    stored = [event for batch in events.batches for event in batch.events if isinstance(event, BlockStored)]
    names = {(event.lora_id, event.lora_name) for event in stored}
    assert names == {(None, None), (1, "adapter-1"), (2, "adapter-2")}
    assert len({request.output_ids for request in served}) == 3, "the text does not depend on the adapter"
    scheduler.cache.check_integrity()
