"""Run SGLang's ``calc_priority`` and ``PrefillAdder`` for ``bench_policies``, in a Python with SGLang.

``python -m benchmarks.sglang_policy_process``: for each line of standard input, ``POLICY NUM_WAITING NUM_CALLS``, print
``answer``, the microseconds of processor time per call, and the requests admitted per call. A call orders the waiting
requests and admits two of them as SGLang's scheduler does (0.5.23, ``_get_new_batch_prefill_raw``). It is not timed how
they return to the queue.
"""

from __future__ import annotations

import importlib.abc
import sys
import time
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peer_publishers import Placeholders
from benchmarks.policy_workload import (
    KV_TOKENS,
    NUM_ADMITTED,
    NUM_RUNNING,
    OUTPUT_TOKENS,
    PAGE_SIZE,
    PREFILL_TOKENS,
    cached_families,
    prompt,
)

for absent in ("torchvision",):  # models need it, the scheduler does not
    try:
        __import__(absent)
    except ImportError:
        finder: importlib.abc.MetaPathFinder = Placeholders(absent)
        sys.meta_path.append(finder)

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


class Case:
    """A queue, a running batch and a cache.

    Args:
        policy: SGLang's name, or ``priority`` for its priority scheduling.
        num_waiting: requests in the queue.
    """

    def __init__(self, policy: str, num_waiting: int) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(KV_TOKENS, PAGE_SIZE, torch.float16, "cpu", None, need_sort=False)
        self.cache = RadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=PAGE_SIZE
            )
        )
        for tokens in cached_families():
            slots = self.allocator.alloc(len(tokens))
            self.cache.insert(InsertParams(key=RadixKey(array("q", tokens), None), value=slots))
        self.policy = SchedulePolicy(
            "fcfs" if policy == "priority" else policy, self.cache, False, policy == "priority", False
        )
        self.running = [self._request(number) for number in range(NUM_RUNNING - NUM_ADMITTED)]
        for request in self.running:
            request.output_ids = array("q", range(OUTPUT_TOKENS // 2))
        self.waiting = [self._request(NUM_RUNNING + number) for number in range(num_waiting)]

    @staticmethod
    def _request(number: int) -> Any:
        request = Req(
            f"r{number}",
            "",
            array("q", prompt(number)),
            SamplingParams(max_new_tokens=OUTPUT_TOKENS, temperature=0),
            vocab_size=1 << 20,
            priority=number % 5,
        )
        request.arrival_processed_tokens = number
        return request

    def schedule(self) -> Sequence[Any]:
        """Order the queue and admit from it. Return what was admitted."""
        batch = SimpleNamespace(reqs=self.running, batch_is_full=False)
        batch.is_empty = lambda: False
        batch.batch_size = lambda: len(self.running)
        if not self.waiting:
            return ()
        self.policy.calc_priority(self.waiting, batch, processed_tokens=100_000)
        adder = PrefillAdder(
            PAGE_SIZE, self.cache, self.allocator, batch, 0.7, PREFILL_TOKENS, PREFILL_TOKENS, 0, 0,
            max_running_requests=NUM_RUNNING, waiting_queue_len=len(self.waiting),
        )  # fmt: skip
        for request in self.waiting:
            if adder.budget_state() == AddReqResult.OTHER or len(adder.can_run_list) >= NUM_ADMITTED:
                break
            request.init_next_round_input(self.cache)
            if adder.add_one_req(request, False, None) is not AddReqResult.CONTINUE:
                break
        admitted = set(adder.can_run_list)
        self.waiting = [request for request in self.waiting if request not in admitted]
        return adder.can_run_list

    def give_back(self, admitted: Sequence[Any]) -> None:
        """Return admitted requests to the end of the queue, and unlock their prefixes."""
        for request in admitted:
            self.cache.dec_lock_ref(request.last_node)
            self.waiting.append(request)


def main() -> None:
    """Answer until the end of standard input."""
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test", ranks=SpawnRanks(world_rank=0, dp_rank=None))
    cases: dict[tuple[str, int], Case] = {}
    for line in sys.stdin:
        policy, num_waiting, num_calls = line.split()
        case = cases.setdefault((policy, int(num_waiting)), Case(policy, int(num_waiting)))
        spent_ns = num_admitted = 0
        for _ in range(int(num_calls)):
            started_ns = time.thread_time_ns()
            admitted = case.schedule()
            spent_ns += time.thread_time_ns() - started_ns
            num_admitted += len(admitted)
            case.give_back(admitted)
        print("answer", spent_ns / 1e3 / int(num_calls), num_admitted / int(num_calls), flush=True)


if __name__ == "__main__":
    main()
