"""Preemption policies: which running request gives up its pages when the pool is full.

The batcher never offers the earliest arrival, so one request always finishes, whatever a policy selects. A preempted
request keeps its tokens and waits again; its KV is computed again, or loaded from the host tier where the cache has
one. Ties go to the latest arrival, because it has waited the shortest time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from scheduler_components._internal.validators import check_choice
from scheduler_components.ports import PreemptibleRequest, PreemptionPolicy

__all__ = [
    "PREEMPTION_POLICY_NAMES",
    "LatestArrival",
    "LeastRecomputation",
    "LongestRemaining",
    "LowestPriority",
    "make_preemption_policy",
]

P = TypeVar("P", bound=PreemptibleRequest)


class LatestArrival:
    """The latest arrival. With requests admitted in order of arrival, it keeps that order: vLLM's and SGLang's FCFS."""

    __slots__ = ()

    def select_victim(self, candidates: Sequence[P]) -> P:
        return candidates[-1]


class LeastRecomputation:
    """The request with the fewest computed positions, which are those that it loses.

    Pages that stay in the cache until it runs again cost less. That they do is not known yet, so it counts all.
    """

    __slots__ = ()

    def select_victim(self, candidates: Sequence[P]) -> P:
        return min(reversed(candidates), key=_num_computed_tokens)


class LowestPriority:
    """The request with the lowest priority, as in vLLM's priority scheduling."""

    __slots__ = ()

    def select_victim(self, candidates: Sequence[P]) -> P:
        return min(reversed(candidates), key=_priority)


class LongestRemaining:
    """The request that may still generate the most tokens, so that requests near their end finish and free pages."""

    __slots__ = ()

    def select_victim(self, candidates: Sequence[P]) -> P:
        return max(reversed(candidates), key=_num_output_tokens_left)


def _num_computed_tokens(request: PreemptibleRequest) -> int:
    return request.num_computed_tokens


def _priority(request: PreemptibleRequest) -> int:
    return request.hints.priority


def _num_output_tokens_left(request: PreemptibleRequest) -> int:
    return request.num_output_tokens_left


_POLICIES: Mapping[str, type[LatestArrival | LeastRecomputation | LowestPriority | LongestRemaining]] = {
    "latest-arrival": LatestArrival,
    "least-recomputation": LeastRecomputation,
    "lowest-priority": LowestPriority,
    "longest-remaining": LongestRemaining,
}

PREEMPTION_POLICY_NAMES = tuple(_POLICIES)
"""Names of the policies, as ``make_preemption_policy`` takes them."""


def make_preemption_policy(name: str) -> PreemptionPolicy[P]:
    """Return the policy of this name.

    Raises:
        ConfigError: there is none; the hint lists the names.
    """
    check_choice("preemption_policy", name, PREEMPTION_POLICY_NAMES, "is not a preemption policy")
    policy: PreemptionPolicy[P] = _POLICIES[name]()
    return policy
