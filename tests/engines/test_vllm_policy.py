"""PolicyScheduler next to vLLM's own schedulers, without an engine, and inside one."""

from __future__ import annotations

import os
import sys
from array import array
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_in_process import prompts, start_engine
from vllm_schedulers import WORKLOADS, PlayedWorker, comparable, make_request, open_scheduler, play

from scheduler_components import ConfigError
from scheduler_components.engines.vllm import PolicyScheduler
from scheduler_components.engines.vllm_policy import AsyncPolicyScheduler
from scheduler_components.engines.vllm_request import VllmRequest
from scheduler_components.scheduling.scheduling_policy import FirstComeFirstServed
from scheduler_engine.device.workload import open_trace, prompt_tokens

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines_only,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]

TRACE = os.environ.get("TRACE_FILE", "")
"""A trace of Mooncake's form, for example its ``conversation_trace.jsonl``."""
STEP_S = 0.05
"""Seconds of the trace per step."""


def are_equal(outputs: list[Any]) -> None:
    ours, theirs = map(comparable, outputs)
    assert ours == theirs


@pytest.mark.parametrize(("is_async", "theirs"), [(False, Scheduler), (True, AsyncScheduler)])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(workload=WORKLOADS)
def test_with_fcfs_each_batch_is_vllms(tiny_llama: Path, is_async: bool, theirs: Any, workload: Any) -> None:
    workers = [
        PlayedWorker(open_scheduler(each, tiny_llama, async_scheduling=is_async), 2 if is_async else 1)
        for each in (PolicyScheduler, theirs)
    ]
    play(workload, workers, are_equal)
    assert workers[0].tokens == workers[1].tokens
    assert workers[0].scheduler.waiting.num_replaced_policies == 0


@pytest.mark.skipif(not TRACE, reason="TRACE_FILE names no trace")
def test_with_fcfs_each_batch_of_a_trace_is_vllms(tiny_llama: Path) -> None:
    """The first 400 requests, with their own lengths and shared prefixes, in a pool that must preempt and evict."""
    sizes = {
        "block_size": 128, "num_blocks": 1_100, "max_num_seqs": 32, "max_num_batched_tokens": 8_192,
        "max_model_len": 131_072, "hf_overrides": {"max_position_embeddings": 131_072},
        "scheduler_reserve_full_isl": False,
    }  # fmt: skip
    workers = [PlayedWorker(open_scheduler(each, tiny_llama, **sizes)) for each in (PolicyScheduler, Scheduler)]
    num_steps = num_preempted = 0
    trace = list(open_trace(Path(TRACE), limit=400))
    while trace or any(worker.scheduler.has_requests() for worker in workers):
        while trace and trace[0].arrival_s <= num_steps * STEP_S:
            recorded = trace.pop(0)
            prompt = array("I", prompt_tokens(recorded)).tolist()
            for worker in workers:
                worker.scheduler.add_request(
                    make_request(f"r{recorded.index}", prompt, recorded.output_length, block_size=128)
                )
        outputs = [worker.step() for worker in workers]
        are_equal(outputs)
        num_preempted += len(outputs[0].preempted_req_ids)
        num_steps += 1
    assert workers[0].tokens == workers[1].tokens
    assert len(workers[0].ended) == 400
    assert num_preempted > 20
    sys.stdout.write(f"{num_steps} steps with equal batches, {num_preempted} preemptions\n")


def test_the_base_follows_async_scheduling(tiny_llama: Path) -> None:
    plain = open_scheduler(PolicyScheduler, tiny_llama)
    overlapped = open_scheduler(PolicyScheduler, tiny_llama, async_scheduling=True)
    assert type(plain) is PolicyScheduler
    assert type(overlapped) is AsyncPolicyScheduler
    assert isinstance(overlapped, AsyncScheduler)


def test_a_larger_priority_of_the_kit_is_a_smaller_one_of_vllm(tiny_llama: Path) -> None:
    worker = PlayedWorker(open_scheduler(PolicyScheduler, tiny_llama, max_num_seqs=1, settings={"policy": "priority"}))
    for rid, priority in (("first", 0), ("late", 5), ("urgent", -5)):
        worker.scheduler.add_request(make_request(rid, [1, 2, 3], 2, priority=priority))
    worker.drain()
    assert list(worker.ended) == ["urgent", "first", "late"]
    assert len(worker.scheduler._views) == 0, "views of finished requests are kept"


def test_the_longest_cached_prefix_is_found_in_vllms_cache(tiny_llama: Path) -> None:
    worker = PlayedWorker(open_scheduler(PolicyScheduler, tiny_llama, max_num_seqs=1, settings={"policy": "lpm"}))
    worker.scheduler.add_request(make_request("warm", [7] * 13, 1))
    worker.drain()
    for rid, prompt in (("cold", [1] * 13), ("warm again", [7] * 13)):
        worker.scheduler.add_request(make_request(rid, prompt, 1))
    worker.drain()
    assert list(worker.ended) == ["warm", "warm again", "cold"]


def test_policies_see_what_each_step_computes(tiny_llama: Path) -> None:
    """A prompt in chunks, then one token per step; both queues' policies see it."""
    worker = PlayedWorker(open_scheduler(PolicyScheduler, tiny_llama, max_num_batched_tokens=8))
    seen: dict[str, list[tuple[int, int, bool]]] = {"waiting": [], "kv_holding_waiting": []}
    for name, chunks in seen.items():

        class Recorder(FirstComeFirstServed[VllmRequest]):
            def on_scheduled(self, batch: Any, chunks: Any = chunks) -> None:
                chunks.extend((chunk.start, chunk.end, chunk.is_prefill) for chunk in batch)

        getattr(worker.scheduler, name).policy = Recorder()
    worker.scheduler.add_request(make_request("a", [1] * 19, 3))
    worker.drain()
    expected = [(0, 8, True), (8, 16, True), (16, 19, True), (19, 20, False), (20, 21, False)]
    assert seen == {"waiting": expected, "kv_holding_waiting": expected}


def test_an_unknown_policy_is_one_sentence_at_the_start(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="'fifo'") as error:
        open_scheduler(PolicyScheduler, tiny_llama, settings={"policy": "fifo"})
    assert "fcfs" in str(error.value)
    with pytest.raises(ConfigError, match=r"^polciy=.*is not a setting"):
        open_scheduler(PolicyScheduler, tiny_llama, settings={"polciy": "fcfs"})


def test_inside_vllm_tokens_do_not_depend_on_the_policy(tiny_llama: Path, tmp_path: Path) -> None:
    """vLLM preempts and computes in chunks. The longest cached prefix is served first."""
    asked = list(islice(prompts(seed=6), 24))
    small = {"load_format": "auto", "max_num_batched_tokens": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 33}
    for name in ("fcfs", "lpm"):
        (tmp_path / name).mkdir()
    started = [  # the end of one engine would end torch's process groups, which both use
        start_engine(
            tiny_llama,
            tmp_path / name,
            scheduler_cls="scheduler_components.engines.vllm.PolicyScheduler",
            additional_config={"scheduler_components": {"policy": name}},
            **small,
        )
        for name in ("fcfs", "lpm")
    ]
    assert [type(engine.scheduler) for engine in started] == [PolicyScheduler] * 2
    first, second = (engine.generate(asked, max_tokens=30) for engine in started)
    assert first == second
    for engine in started:
        assert engine.scheduler.waiting.num_replaced_policies == 0
        engine.scheduler.shutdown()
