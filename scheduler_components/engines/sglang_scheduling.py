"""Hooks that put this kit's scheduling policy and admission budget into SGLang's scheduler.

SGLang sorts its list of waiting requests by ``SchedulePolicy.calc_priority``, and a ``PrefillAdder`` admits from its
front until its budget is spent. With the variable ``SCHEDULER_COMPONENTS_SCHEDULING`` a ``SchedulingPolicy`` of this
kit sorts the list, and an ``AdmissionBudget`` answers the adder's questions. SGLang still matches, locks and allocates.
Written for SGLang 0.5.23.

Each wrong setting, and each engine that this file does not support, logs one sentence; SGLang then decides by itself. A
policy that does not return every waiting request once is removed in the same way, at the first step in which it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import floor
from typing import Annotated, Any

from pydantic import Field, field_validator

from scheduler_components._internal.validators import check_choice
from scheduler_components.errors import ConfigError
from scheduler_components.kv_events.config import JsonSettings
from scheduler_components.ports import SchedulingPolicy
from scheduler_components.scheduling.admission_budget import AdmissionBudget, AdmissionDemand
from scheduler_components.scheduling.scheduling_policy import POLICY_NAMES, check_policy_name, make_policy
from scheduler_components.values import RequestHints

__all__ = ["SCHEDULING_VARIABLE", "SglangScheduling", "SglangSchedulingSettings", "SglangWaitingRequest"]

_log = logging.getLogger("sglang.scheduler_components")

SCHEDULING_VARIABLE = "SCHEDULER_COMPONENTS_SCHEDULING"

_POLICY_MODULE = "sglang.srt.managers.schedule_policy"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

_UNSUPPORTED = ("earliest-deadline", "virtual-token-counter", "lora-grouping")
"""SGLang's requests have no deadline and no tenant, and this plugin does not report batches to the policy."""

_CACHE_AWARE = ("lpm", "dfs-weight", "shortest-prefill-first", "hrrn")


class SglangSchedulingSettings(JsonSettings):
    """The value of the variable, a JSON object.

    Attributes:
        policy: a name of ``scheduling_policy.POLICY_NAMES``, or ``module:name`` of your own; empty for SGLang's order.
        admission: whether an ``AdmissionBudget`` decides what the adder admits.
        watermark_pages: with ``admission``, pages that an admission leaves free.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """

    text_name = SCHEDULING_VARIABLE
    example = '{"policy": "lpm"}'

    policy: str = ""
    admission: bool = False
    watermark_pages: Annotated[int, Field(ge=0)] = 0

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        if policy and ":" not in policy:
            names = tuple(name for name in POLICY_NAMES if name not in _UNSUPPORTED)
            check_choice("policy", policy, names, "is not a policy that SGLang's requests can be ordered by")
        if policy:
            check_policy_name(policy)
        return policy


@dataclass(slots=True, kw_only=True, eq=False)
class SglangWaitingRequest:
    """A waiting request of SGLang, as a policy reads it.

    Attributes:
        request: SGLang's ``Req``.
        arrival: number of its entry into the waiting list. SGLang appends a retracted request, so it gets a new number.
        hints: its priority, if SGLang schedules by priority, and its adapter.
    """

    request: Any
    arrival: int
    hints: RequestHints

    @property
    def rid(self) -> str:
        return str(self.request.rid)

    @property
    def token_ids(self) -> Any:
        return self.request.origin_input_ids + self.request.output_ids

    @property
    def num_input_tokens(self) -> int:
        return len(self.request.origin_input_ids) + len(self.request.output_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that SGLang's last match found on any tier."""
        return int(self.request.num_matched_prefix_tokens)

    @property
    def num_output_tokens_left(self) -> int:
        return int(self.request.sampling_params.max_new_tokens) - len(self.request.output_ids)


@dataclass(slots=True, kw_only=True)
class SglangScheduling:
    """The hooks, and the policy with the requests that it knows. One scheduler process has one of them.

    Attributes:
        settings: the parsed variable.
    """

    settings: SglangSchedulingSettings
    _policy: SchedulingPolicy[SglangWaitingRequest] | None = field(default=None, init=False)
    _waiting: dict[int, SglangWaitingRequest] = field(default_factory=dict, init=False)  # by identity of SGLang's Req
    _step: int = field(default=0, init=False)
    _num_arrivals: int = field(default=0, init=False)
    _adders: dict[type, type] = field(default_factory=dict, init=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> SglangScheduling:
        """Read the variable. A wrong setting logs one sentence and counts as not given."""
        try:
            return cls(settings=SglangSchedulingSettings.from_cli(environ.get(SCHEDULING_VARIABLE, "").strip() or "{}"))
        except ConfigError as error:
            _log.error("SGLang orders and admits requests itself, without scheduler-components: %s", error)
            return cls(settings=SglangSchedulingSettings())

    def register(self, hooks: Any) -> None:
        """Register what the settings name with SGLang's module of hooks."""
        kinds, register = hooks.HookType, hooks.HookRegistry.register
        if self.settings.policy:
            register(f"{_POLICY_MODULE}.SchedulePolicy.__init__", self.make_policy, kinds.AROUND)
            register(f"{_POLICY_MODULE}.SchedulePolicy.calc_priority", self.calc_priority, kinds.AROUND)
            register(f"{_SCHEDULER}._add_request_to_queue", self.on_request_queued, kinds.BEFORE)
        if self.settings.admission:
            register(f"{_SCHEDULER}.get_prefill_adder_class", self.prefill_adder_class, kinds.AROUND)

    def make_policy(self, original: Callable[..., None], theirs: Any, *args: Any, **kwargs: Any) -> None:
        """Hook around the constructor of SGLang's policy: make this kit's, which matches in SGLang's cache."""
        original(theirs, *args, **kwargs)
        if self.settings.policy in _CACHE_AWARE and getattr(theirs.tree_cache, "disable", True):
            _log.warning("policy %r needs SGLang's prefix cache, which is off: SGLang orders", self.settings.policy)
            return
        match = import_module(_POLICY_MODULE).match_kv_cache

        def match_length(waiting: SglangWaitingRequest) -> int:
            match(waiting.request, theirs.tree_cache, waiting.token_ids)
            return waiting.num_cached_tokens

        try:
            self._policy = make_policy(self.settings.policy, match_length=match_length)
        except Exception as error:  # noqa: BLE001 - as in _sort: the policy may be a user's
            self._remove_policy(error)
            return
        _log.info("scheduler-components orders the waiting requests by policy %r", self.settings.policy)

    def on_request_queued(self, _scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
        """Hook before a request enters the list: a retracted one enters it again, behind all others."""
        known = self._waiting.pop(id(request), None)
        if known is not None and self._policy is not None:
            try:
                self._policy.discard(known)
            except Exception as error:  # noqa: BLE001 - as in _sort
                self._remove_policy(error)

    def calc_priority(
        self,
        original: Callable[..., None],
        theirs: Any,
        waiting_queue: list[Any],
        running_batch: Any = None,
        processed_tokens: int = 0,
    ) -> None:
        """Hook around SGLang's sort of the waiting list. SGLang's own sort runs first if it matches no prefix.

        SGLang's policies that match no prefix leave the matches for load reports and refresh the cache's LRU list, and
        cost little. With another one of SGLang's, this kit's policy does the matching instead.
        """
        is_ours = self._policy is not None
        if not is_ours or theirs.policy.value not in _CACHE_AWARE:
            original(theirs, waiting_queue, running_batch, processed_tokens)
        if is_ours and not self._sort(theirs, waiting_queue):
            original(theirs, waiting_queue, running_batch, processed_tokens)

    def _sort(self, theirs: Any, waiting_queue: list[Any]) -> bool:
        """Sort the list by the policy, in place. Return False if the policy failed, which removes it for good."""
        assert self._policy is not None
        self._step += 1
        try:
            self._update_waiting(theirs, waiting_queue)
            places = {id(each.request): place for place, each in enumerate(self._policy.order(self._step))}
            if len(places) != len(waiting_queue):
                raise ValueError(f"it ordered {len(places)} of {len(waiting_queue)} waiting requests")
            waiting_queue.sort(key=lambda request: places[id(request)])
        except Exception as error:  # noqa: BLE001 - whatever a policy raises, SGLang goes on with its own order
            self._remove_policy(error)
            return False
        return True

    def _remove_policy(self, error: Exception) -> None:
        """Let SGLang order from now on, because the policy has failed."""
        _log.error("SGLang orders the waiting requests again: policy %r failed: %s", self.settings.policy, error)
        self._policy, self._waiting = None, {}

    def _update_waiting(self, theirs: Any, waiting_queue: list[Any]) -> None:
        """Report to the policy which requests have left the list and which have entered it."""
        assert self._policy is not None
        present = set(map(id, waiting_queue))
        for key in [key for key in self._waiting if key not in present]:
            self._policy.discard(self._waiting.pop(key))
        for request in waiting_queue:
            if id(request) not in self._waiting:
                self._waiting[id(request)] = added = self._waiting_request(theirs, request)
                self._policy.add(added, self._step)

    def _waiting_request(self, theirs: Any, request: Any) -> SglangWaitingRequest:
        self._num_arrivals += 1
        priority = getattr(request, "priority", None) if theirs.enable_priority_scheduling else None
        if priority is not None and theirs.schedule_low_priority_values_first:
            priority = -priority
        hints = RequestHints(priority=priority or 0, lora=request.lora_id)
        return SglangWaitingRequest(request=request, arrival=self._num_arrivals, hints=hints)

    def prefill_adder_class(self, original: Callable[..., type], scheduler: Any) -> type:
        """Hook around the scheduler's choice of its adder."""
        base = original(scheduler)
        if base not in self._adders:
            self._adders[base] = make_prefill_adder(base, self.settings.watermark_pages)
        return self._adders[base]


def make_prefill_adder(base: Any, watermark_pages: int) -> type:
    """Return a subclass of SGLang's ``PrefillAdder`` whose questions an ``AdmissionBudget`` answers.

    SGLang's accounts remain the source, because its budget knows what its cache can evict. They count tokens, so a page
    of the budget is one token here. SGLang admits less than what is left and the budget admits all that is left, so one
    token more is reserved. With pools of several kinds (sliding windows, Mamba) and for diffusion models, SGLang's own
    answers remain.
    """
    results: Any = import_module(_POLICY_MODULE).AddReqResult
    plain_budget = import_module("sglang.srt.mem_cache.prefill_budget").PrefillBudget

    class BudgetedPrefillAdder(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.kit_budget: AdmissionBudget | None = None
            if type(self.memory_budget) is plain_budget and self.dllm_config is None and self.rem_mamba_slots is None:
                self.kit_budget = AdmissionBudget(tokens=0, slots=1, watermark_pages=watermark_pages * self.page_size)

        def budget_state(self) -> Any:
            budget = self.kit_budget
            if budget is None:
                return super().budget_state()
            if self._lacks_pages(budget, 0):
                return results.NO_TOKEN
            limits = (self.rem_input_tokens, self.rem_chunk_tokens)
            budget.tokens = max(0, min(limit for limit in limits if limit is not None))
            return results.CONTINUE if budget.refusal_of(AdmissionDemand()) is None else results.OTHER

        def _check_prefill_budget(
            self, req: Any, *, total_tokens: int, chunk_limit: int | None, **others: Any
        ) -> tuple[bool, int | None]:
            if self.kit_budget is None:
                answer: tuple[bool, int | None] = super()._check_prefill_budget(
                    req, total_tokens=total_tokens, chunk_limit=chunk_limit, **others
                )
                return answer
            return (False, None) if self._lacks_pages(self.kit_budget, total_tokens) else (True, chunk_limit)

        def _lacks_pages(self, budget: AdmissionBudget, num_tokens: int) -> bool:
            """Ask the budget for the pages of a request only, with SGLang's present accounts."""
            memory = self.memory_budget
            budget.tokens = 1
            budget.available_pages = memory._available_and_evictable()  # remaining_total without its offset
            budget.reserved_pages = floor(memory.total_offset) + 1
            budget.num_running = len(self.can_run_list)
            if self.running_batch is not None:
                budget.num_running += len(self.running_batch.reqs)
            return budget.refusal_of(AdmissionDemand(num_pages=num_tokens)) is not None

    return BudgetedPrefillAdder
