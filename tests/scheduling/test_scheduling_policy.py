"""Scheduling policies: their orders, the bounds on waiting that they state, and the arrivals by which others starve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from msgspec.structs import replace

from scheduler_components import ConfigError
from scheduler_components.ports import SchedulableRequest, SchedulingPolicy
from scheduler_components.scheduling.scheduling_policy import (
    POLICY_NAMES,
    DfsWeight,
    EarliestDeadline,
    FirstComeFirstServed,
    HighestResponseRatio,
    LongestPrefixMatch,
    LoraGrouping,
    PriorityPolicy,
    ShortestRemainingPrefill,
    VirtualTokenCounter,
    check_policy_name,
    ignores_batches,
    make_policy,
)
from scheduler_components.testing.policy_checks import (
    NUM_AHEAD,
    POLICY_CHECKS,
    OpenPolicy,
    PolicyPromises,
    PolicyRequest,
)
from scheduler_components.values import RequestHints, ScheduledChunk

Policy = SchedulingPolicy[PolicyRequest]

PROMISES: dict[str, tuple[OpenPolicy, PolicyPromises]] = {
    "fcfs": (lambda _: FirstComeFirstServed(), PolicyPromises(max_wait_steps=NUM_AHEAD, is_flat=True)),
    "priority": (
        lambda _: PriorityPolicy(aging_steps=20),
        PolicyPromises(max_wait_steps=20 + NUM_AHEAD, is_flat=True),
    ),
    "strict priority": (lambda _: PriorityPolicy(aging_steps=None), PolicyPromises(is_flat=True)),
    "lpm": (
        lambda match_length: LongestPrefixMatch(match_length=match_length, matches_per_step=8),
        PolicyPromises(matches_per_step=8, is_flat=True),
    ),
    "dfs-weight": (
        lambda match_length: DfsWeight(match_length=match_length, matches_per_step=8),
        PolicyPromises(matches_per_step=8, is_flat=True),
    ),
    "shortest-prefill-first": (
        lambda match_length: ShortestRemainingPrefill(match_length=match_length, longest_wait_steps=20),
        PolicyPromises(max_wait_steps=20 + NUM_AHEAD, is_flat=True),
    ),
    "hrrn": (
        lambda match_length: HighestResponseRatio(match_length=match_length),
        PolicyPromises(max_wait_steps=16 * (NUM_AHEAD + 1), is_flat=True),
    ),
    "earliest-deadline": (lambda _: EarliestDeadline(), PolicyPromises(is_flat=True)),
    "virtual-token-counter": (
        lambda _: VirtualTokenCounter(),
        PolicyPromises(max_wait_steps=NUM_AHEAD, is_flat=True, shares_by_tenant=True),
    ),
    "lora-grouping": (
        lambda _: LoraGrouping(longest_wait_steps=20),
        PolicyPromises(max_wait_steps=20 + NUM_AHEAD, is_flat=True),
    ),
}


@pytest.mark.parametrize("name", PROMISES)
@pytest.mark.parametrize("check", POLICY_CHECKS)
def test_each_policy_passes_the_checks(check: Callable[[OpenPolicy, PolicyPromises], None], name: str) -> None:
    open_policy, promises = PROMISES[name]
    check(open_policy, replace(promises, keeps_places=True))


def request(
    arrival: int, tokens: Iterable[int] = (1,), *, cached: int = 0, priority: int = 0, tenant: str = "",
    deadline_s: float | None = None, lora: str | None = None,
) -> PolicyRequest:  # fmt: skip
    hints = RequestHints(priority=priority, tenant=tenant, deadline_s=deadline_s, lora=lora)
    return PolicyRequest(
        rid=f"r{arrival}", arrival=arrival, token_ids=tuple(tokens), num_cached_tokens=cached, hints=hints
    )


def filled(policy: Policy, requests: Iterable[PolicyRequest], step: int = 0) -> Policy:
    for each in requests:
        policy.add(each, step)
    return policy


def arrivals(policy: Policy, step: int = 0, count: int | None = None) -> list[int]:
    return [each.arrival for each in islice(policy.order(step), count)]


def cached_tokens(each: PolicyRequest) -> int:
    return each.num_cached_tokens


# Cached prefixes.


def test_at_most_as_many_requests_are_held_back_as_may_be_matched() -> None:
    """10,000 requests with one uncached prefix cost no more than 128."""
    requests = [request(arrival, (*range(40), arrival)) for arrival in range(6)]
    policy = filled(LongestPrefixMatch(matches_per_step=3), [*requests, request(6, range(90, 130))])
    assert arrivals(policy) == [0, 1, 2, 3, 4, 5, 6]
    policy = filled(LongestPrefixMatch(matches_per_step=6), [*requests, request(6, range(90, 130))])
    assert arrivals(policy) == [0, 6, 1, 2, 3, 4, 5]


def test_more_waiting_requests_than_matches_take_turns() -> None:
    """SGLang orders them by arrival. Here a request that became cached is first within 100 / 8 steps."""
    requests = [request(arrival, range(arrival * 100, arrival * 100 + 50)) for arrival in range(100)]
    policy = filled(LongestPrefixMatch(match_length=cached_tokens, matches_per_step=8), requests)
    for step in range(13):
        arrivals(policy, step)
        requests[37].num_cached_tokens = 48
    step_found = next(step for step in range(13, 26) if arrivals(policy, step, 1) == [37])
    assert step_found <= 25


def test_the_newest_request_is_matched_first() -> None:
    matched: list[int] = []

    def match_length(each: PolicyRequest) -> int:
        matched.append(each.arrival)
        return 0

    policy = filled(LongestPrefixMatch(match_length=match_length, matches_per_step=2), map(request, range(4)))
    for step in range(2):
        arrivals(policy, step)
    policy.add(request(4), 2)
    arrivals(policy, 2)
    assert matched == [3, 2, 1, 0, 4, 3]


def test_prefixes_that_differ_within_a_token_share_only_whole_tokens() -> None:
    """Tokens are compared as bytes: 0x0101 and 0x0201 share one byte and no token."""
    requests = [request(0, (5, 7), cached=1), request(1, (0x0101, 7), cached=1), request(2, (0x0201, 7), cached=1)]
    assert arrivals(filled(DfsWeight(), requests)) == [0, 1, 2]


def test_a_walk_covers_the_earliest_requests_and_the_others_follow() -> None:
    requests = [request(0), *(request(arrival, (7, 7, 7), cached=2) for arrival in range(1, 6))]
    assert arrivals(filled(DfsWeight(matches_per_step=3), requests)) == [1, 2, 0, 3, 4, 5]


def test_a_long_chain_of_prefixes_needs_no_deep_stack() -> None:
    requests = [request(arrival, range(arrival + 2), cached=arrival + 1) for arrival in range(2_000)]
    assert arrivals(filled(DfsWeight(matches_per_step=2_000), requests))[:2] == [1_999, 1_998]


# Short prefills, and long waits.


# Shares of tenants, and adapters.


def computed(each: PolicyRequest, num_tokens: int, *, is_prefill: bool = True) -> list[ScheduledChunk[PolicyRequest]]:
    return [ScheduledChunk(each, 0, num_tokens, is_prefill)]


def test_a_weight_multiplies_what_a_tenant_has_received() -> None:
    requests = [request(0, tenant="a"), request(1, tenant="b")]
    policy = filled(VirtualTokenCounter(prefill_weight=3, decode_weight=1), requests)
    policy.on_scheduled(computed(requests[0], 1) + computed(requests[1], 2, is_prefill=False))
    assert arrivals(policy) == [1, 0]


def test_counters_of_tenants_that_left_do_not_pile_up() -> None:
    """A client may send any number of tenants."""
    policy = VirtualTokenCounter[PolicyRequest]()
    for arrival in range(5_000):
        each = request(arrival, tenant=f"tenant {arrival}")
        policy.add(each, arrival)
        arrivals(policy, arrival)
        policy.discard(each)
        policy.on_scheduled(computed(each, 10))
    assert len(policy._counters) <= 2_048


def test_an_idle_tenant_saves_up_nothing_and_loses_nothing() -> None:
    busy, idle = request(0, tenant="busy"), request(1, tenant="idle")
    policy = filled(VirtualTokenCounter(), [busy])
    policy.on_scheduled(computed(busy, 1_000))
    arrivals(policy)
    policy.add(idle, 1)
    assert arrivals(policy, 1) == [0, 1], "it was lifted to the counter of the busy tenant"
    policy.discard(idle)
    policy.on_scheduled(computed(idle, 500))
    policy.add(idle, 2)
    assert arrivals(policy, 2) == [0, 1], "its own counter is higher"
    policy.on_scheduled(computed(busy, 501))
    assert arrivals(policy, 3) == [1, 0]


def test_a_tenant_that_returns_is_lifted_to_the_lowest_counter() -> None:
    busy, idle = request(0, tenant="busy"), request(1, tenant="idle")
    policy = filled(VirtualTokenCounter(), [busy, idle])
    policy.on_scheduled(computed(idle, 10))
    policy.discard(idle)
    policy.on_scheduled(computed(busy, 1_000))
    arrivals(policy, 1)
    policy.add(idle, 2)
    assert arrivals(policy, 2) == [0, 1], "it has received 10, and the others 1,000"


def test_adapters_of_the_last_batch_are_first_and_then_the_earliest() -> None:
    requests = [request(at, lora=lora) for at, lora in enumerate(("a", "b", "c", None, "a", "b", "c"))]
    policy = filled(LoraGrouping(), requests)
    assert arrivals(policy) == [3, 0, 4, 1, 5, 2, 6]
    policy.on_scheduled(computed(requests[2], 1))
    assert arrivals(policy, 1) == [2, 6, 3, 0, 4, 1, 5]
    policy.on_scheduled(computed(requests[1], 1))
    assert arrivals(policy, 2) == [1, 5, 3, 0, 4, 2, 6]


# Starvation: what a docstring says that starves does.

STARVES: dict[str, tuple[Policy, PolicyRequest, Callable[[int], PolicyRequest]]] = {
    "strict priority": (PriorityPolicy(aging_steps=None), request(0), partial(request, priority=1)),
    "earliest-deadline": (EarliestDeadline(), request(0), partial(request, deadline_s=1e9)),
    "lpm": (LongestPrefixMatch(), request(0), partial(request, tokens=range(50), cached=48)),
    "dfs-weight": (DfsWeight(), request(0), partial(request, tokens=range(50), cached=48)),
}


def starving_steps(policy: Policy, patient: PolicyRequest, newcomer: Callable[[int], PolicyRequest]) -> int:
    """Serve one request per step while one arrives; return the steps until the patient one is served, at most 2,000."""
    policy.add(patient, 0)
    for step in range(2_000):
        policy.add(newcomer(step + 1), step)
        first = next(policy.order(step))
        if first is patient:
            return step
        policy.discard(first)
        policy.on_scheduled(computed(first, first.num_input_tokens))
    return 2_000


@pytest.mark.parametrize("name", STARVES)
def test_a_policy_that_says_so_starves(name: str) -> None:
    policy, patient, newcomer = STARVES[name]
    assert "starves" in type(policy).wait_bound  # type: ignore[attr-defined]
    assert starving_steps(policy, patient, newcomer) == 2_000


def test_ever_new_tenants_starve_one_that_has_received_much() -> None:
    old = request(0, tenant="old")
    policy = VirtualTokenCounter[PolicyRequest]()
    policy.on_scheduled(computed(old, 1_000_000))

    def newcomer(arrival: int) -> PolicyRequest:
        return request(arrival, tenant=f"tenant {arrival}")

    policy.add(newcomer(3_000), 0)
    assert starving_steps(policy, old, newcomer) == 2_000


def test_a_policy_says_bounded_or_starves_and_is_checked_for_it() -> None:
    for name, (open_policy, promises) in PROMISES.items():
        policy = open_policy(cached_tokens)
        assert policy.wait_bound.startswith(("bounded", "starves"))  # type: ignore[attr-defined]
        assert (promises.max_wait_steps is None) == (name in STARVES), name


def test_first_come_first_served_blocks_behind_its_head() -> None:
    """The consumer stops at the first refusal, so a request that does not fit yet stops all later ones."""
    policy = filled(FirstComeFirstServed(), [request(0, range(10_000)), request(1)])
    admitted = [each for each in islice(policy.order(0), 1) if each.num_input_tokens < 100]
    assert admitted == []


# Settings, and keys that have no order.


def test_a_policy_that_ignores_batches_is_known() -> None:
    """`Batcher.repeats_decodes` relies on it: such a policy is as it was after any batch."""

    def ignores(policy: SchedulingPolicy[SchedulableRequest]) -> bool:
        code = type(policy).on_scheduled.__code__
        return code.co_code == type(make_policy("fcfs")).on_scheduled.__code__.co_code

    policies = {name: make_policy(name) for name in POLICY_NAMES}
    assert {name for name, each in policies.items() if ignores_batches(each)} == {
        name for name, each in policies.items() if ignores(each)
    }
    assert not ignores_batches(policies["virtual-token-counter"])


def test_a_policy_of_a_user_reads_batches_unless_it_denies_it() -> None:
    class Plain(FirstComeFirstServed[SchedulableRequest]):
        """Inherits what it says."""

    class Reading(FirstComeFirstServed[SchedulableRequest]):
        def on_scheduled(self, chunks: object) -> None:
            """Read them."""

    class Denying(Reading):
        reads_batches = False

    assert [ignores_batches(make()) for make in (Plain, Reading, Denying)] == [True, False, True]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_name_makes_a_policy(name: str) -> None:
    policy: Policy = make_policy(name)
    assert arrivals(filled(policy, [request(0), request(1)])) in ([0, 1], [1, 0])
    assert make_policy(name) is not make_policy(name)


def test_the_names_are_sglangs_and_vllms_where_they_have_one() -> None:
    assert {"fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first", "priority"} < set(POLICY_NAMES)


def test_policies_that_match_are_made_with_the_given_function() -> None:
    for name in ("lpm", "dfs-weight", "shortest-prefill-first", "hrrn"):
        requests = [request(0, range(90)), request(1, range(100, 190))]
        policy = filled(make_policy(name, match_length=lambda each: 64 * each.arrival), requests)
        assert arrivals(policy, 1) == [1, 0], name


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        make_policy("sjf")
    assert str(refused.value) == (
        "schedule_policy='sjf': is not a scheduling policy; give one of fcfs, priority, lpm, dfs-weight, "
        "shortest-prefill-first, hrrn, earliest-deadline, virtual-token-counter, lora-grouping, "
        "module:name of your own"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: PriorityPolicy(aging_steps=0),
        lambda: LongestPrefixMatch(matches_per_step=0),
        lambda: DfsWeight(matches_per_step=0),
        lambda: ShortestRemainingPrefill(matches_per_step=0),
        lambda: ShortestRemainingPrefill(longest_wait_steps=0),
        lambda: HighestResponseRatio(matches_per_step=-1),
        lambda: LoraGrouping(longest_wait_steps=0),
        lambda: VirtualTokenCounter(decode_weight=0),
        lambda: VirtualTokenCounter(prefill_weight=float("nan")),
    ],
)
def test_a_setting_out_of_range_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("policy", "hints", "message"),
    [
        (EarliestDeadline(), {"deadline_s": float("nan")}, "deadline_s=nan: has no place in an order; give a number"),
        (PriorityPolicy(), {"priority": "high"}, "priority='high': has no place in an order; give a number"),
        (VirtualTokenCounter(), {"tenant": 7}, "tenant=7: is not a name; give a string"),
        (LoraGrouping(), {"lora": ["a"]}, r"lora=\['a'\]: is not a name; give a string"),
    ],
)
def test_a_hint_without_an_order_is_refused_in_one_sentence(
    policy: Policy, hints: dict[str, object], message: str
) -> None:
    bad = PolicyRequest(rid="bad", arrival=1, hints=RequestHints(**hints))  # type: ignore[arg-type]
    policy.add(request(0), 0)
    with pytest.raises(ConfigError, match=message):
        policy.add(bad, 0)
    policy.discard(bad)
    assert arrivals(policy) == [0]


_ORDERS = """
import sys
from scheduler_components.scheduling.scheduling_policy import POLICY_NAMES, make_policy
from scheduler_components.testing import policy_checks

for name in POLICY_NAMES:
    use = policy_checks._Use(name, lambda match_length: make_policy(name, match_length=match_length))
    print(name, [use.check_order() for _ in policy_checks._history(use, num_steps=40)])
"""


@pytest.mark.processes
def test_orders_do_not_depend_on_hashes() -> None:
    """Hashes of strings differ between the processes of ranks."""
    root = str(Path(__file__).parents[2])
    orders = {
        subprocess.run(
            [sys.executable, "-c", _ORDERS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(orders) == 1
    assert len(orders.pop()) > 10_000


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module:Policy", "cannot be imported (No module named 'no_such_module')"),
        (":Policy", "cannot be imported ("),
        ("json:Policy", "has no 'Policy' in module 'json'"),
        ("sys:maxsize", "is not a class or function that makes a policy"),
        (
            "scheduler_components.scheduling.preemption_policy:LatestArrival",
            "is a class without add, discard, order, on_scheduled",
        ),
        (
            "scheduler_components.scheduling.scheduling_policy:POLICY_NAMES",
            "is not a class or function that makes a policy",
        ),
        ("threading:main_thread", "cannot be called with match_length alone (too many positional arguments)"),
    ],
)
def test_a_path_without_a_policy_is_one_sentence(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"schedule_policy={name!r}: {problem}")):
        check_policy_name(name)


def test_a_policy_of_your_own_is_made_with_the_match() -> None:
    found = make_policy("functools:cache", match_length=len)
    assert found.__wrapped__ is len  # type: ignore[attr-defined]


def test_a_module_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_policies.py").write_text("def policy(:\n")
    (tmp_path / "failing_policies.py").write_text("{}['table']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("broken_policies", "failing_policies"):
        with pytest.raises(ConfigError, match=f"schedule_policy='{module}:Policy': cannot be imported"):
            check_policy_name(f"{module}:Policy")
