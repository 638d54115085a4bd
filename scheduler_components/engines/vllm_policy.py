"""PolicyScheduler: vLLM's own scheduler with a scheduling policy of the kit. See docs/how-to/vllm.md.

The policy decides which waiting request is next. Everything else stays vLLM's: budgets, pages, chunks, and the choice
of the running request to preempt, which is inside the loop of ``schedule()``. Tested with vLLM 0.32.

Two queues are replaced: ``waiting``, and ``kv_holding_waiting`` of requests that wait with KV blocks. With ``fcfs`` the
batches are those of vLLM's policy ``fcfs``, with one exception. vLLM puts a preempted request before all others, also
before an earlier one that was skipped because its grammar or its adapter was not ready. Here the earlier one is first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from scheduler_components.engines.settings import read_scheduler_settings
from scheduler_components.engines.vllm_policy_queue import PolicyQueue
from scheduler_components.engines.vllm_request import VllmRequest, VllmRequests
from scheduler_components.scheduling.scheduling_policy import make_policy
from scheduler_components.values import ScheduledChunk

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["AsyncPolicyScheduler", "PolicyScheduler"]


class PolicyScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """For ``--scheduler-cls scheduler_components.engines.vllm.PolicyScheduler``.

    vLLM chooses its scheduler by ``async_scheduling``, and so does this class: where that is on, the instance is an
    ``AsyncPolicyScheduler``. A plain subclass of ``Scheduler`` would lose the overlap of scheduling and computing.

    Raises:
        ConfigError: a setting is unknown, or no policy has the name.
    """

    def __new__(cls, vllm_config: VllmConfig, *_: object, **__: object) -> PolicyScheduler:
        is_async = cls is PolicyScheduler and vllm_config.scheduler_config.async_scheduling
        scheduler: PolicyScheduler = super().__new__(AsyncPolicyScheduler if is_async else cls)
        return scheduler

    def __init__(self, vllm_config: VllmConfig, *args: object, **kwargs: object) -> None:
        name = read_scheduler_settings(vllm_config.additional_config).policy
        policies = [make_policy(name, match_length=self._match_length) for _ in range(2)]
        super().__init__(vllm_config, *args, **kwargs)
        self._views = VllmRequests(self.max_model_len)
        self.waiting, self.kv_holding_waiting = (PolicyQueue(each, self._views, self._get_step) for each in policies)

    def _get_step(self) -> int:
        step: int = self.current_step
        return step

    def _match_length(self, request: VllmRequest) -> int:
        """Return how many tokens of a waiting request are cached; it does not change the order of eviction."""
        theirs, manager = request.theirs, self.kv_cache_manager
        num_tokens = 0
        if manager.prefix_cache_lookup_enabled(theirs):
            _, num_tokens, _ = manager.coordinator.find_longest_cache_hit(theirs.block_hashes, theirs.num_tokens - 1)
        request.num_cached_tokens = num_tokens
        return num_tokens

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Report the batch to the policies before vLLM advances its requests."""
        chunks = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._views.of(self.requests[request_id])
            start = request.theirs.num_computed_tokens
            chunks.append(ScheduledChunk(request, start, start + num_tokens, start < request.prefill_end))
        if chunks:
            self.waiting.on_scheduled(chunks)
            self.kv_holding_waiting.on_scheduled(chunks)
        self._views.forget(scheduler_output.finished_req_ids)
        super()._update_after_schedule(scheduler_output)


class AsyncPolicyScheduler(PolicyScheduler, AsyncScheduler):  # type: ignore[misc]
    """``PolicyScheduler`` over vLLM's ``AsyncScheduler``."""
