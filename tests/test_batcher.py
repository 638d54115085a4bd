"""The batcher keeps its rules whatever the policies do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.variants import found, instead_of, variants

from scheduler_components.batcher import BatchConditions, Batcher
from scheduler_components.cache import PrefixNamespace
from scheduler_components.scheduling.admission_budget import BatchLimits
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_components.scheduling.preemption_policy import PREEMPTION_POLICY_NAMES, make_preemption_policy
from scheduler_components.scheduling.scheduling_policy import FirstComeFirstServed, PriorityPolicy
from scheduler_components.testing.batcher_checks import (
    BATCHER_CHECKS,
    SMALL_LIMITS,
    random_workload,
)
from scheduler_components.testing.batcher_session import (
    BatcherSession,
    CheckedRequest,
    OpenBatcher,
    PlannedRequest,
)
from scheduler_components.values import CachedTokens, RequestHints, RequestState

Fcfs = FirstComeFirstServed[CheckedRequest]


def opening(
    policy: Callable[[], object] = Fcfs, preemption: Callable[[], object] | None = None, ratio: float = 0.2
) -> OpenBatcher:
    """Open batchers with these policies, which reserve little, so that a small pool preempts."""

    def open_batcher(limits, queues, kv_cache):
        tracker = NewTokenRatioTracker(initial=ratio, minimum=0.0)
        parts = {} if preemption is None else {"preemption": preemption()}
        conditions = BatchConditions(new_token_ratio=tracker)
        return Batcher(limits=limits, queues=queues, kv_cache=kv_cache, policy=policy(), conditions=conditions, **parts)

    return open_batcher


def a_session(open_batcher: OpenBatcher, *, num_pages: int = 24, limits: BatchLimits = SMALL_LIMITS) -> BatcherSession:
    return BatcherSession.open("test", open_batcher, limits=limits, num_pages=num_pages)


def is_rare(name: str, check: Callable[[OpenBatcher], None]) -> bool:
    """A limit does not depend on the victim, so make test checks it with one policy."""
    return check.__name__ == "check_no_limit_is_exceeded" and name != PREEMPTION_POLICY_NAMES[0]


CHECKED_POLICIES = [
    pytest.param(name, check, marks=[pytest.mark.soak_only] if is_rare(name, check) else [])
    for name in PREEMPTION_POLICY_NAMES
    for check in BATCHER_CHECKS
]


@pytest.mark.parametrize(("name", "check"), CHECKED_POLICIES)
def test_every_preemption_policy_passes_all_checks(name: str, check: Callable[[OpenBatcher], None]) -> None:
    check(opening(preemption=lambda: make_preemption_policy(name)))


# Policies that fail.


class FailingPolicy(Fcfs):
    twice = found("returned <r0.* twice", order=lambda self, step: (each for each in super().order(step) for _ in "ab"))
    leaves_out = found(r"left out \d+ of \d+ waiting requests", order=lambda self, step: iter(()))
    leaves_out_the_last = found(
        r"left out 1 of \d+ waiting requests", order=lambda self, step: iter(list(super().order(step))[:-1])
    )
    names_the_admitted = found("which does not wait", discard=lambda self, request: None)
    names_none = found("returned None, which does not wait", order=lambda self, step: iter([None]))
    returns_nothing = found("raised TypeError", order=lambda self, step: None)
    raises_on_scheduled = found(r"on_scheduled\(\) raised ZeroDivisionError", on_scheduled=lambda self, chunks: 1 / 0)

    @instead_of("order", "key is not comparable")
    def raises_late(self, step):
        for number, request in enumerate(super().order(step)):
            if number == 1:
                raise TypeError("key is not comparable")
            yield request

    @instead_of("add", r"add\(\) raised ValueError\('key is nan'\)")
    def raises_on_add(self, request, step):
        if request.arrival == 3:
            raise ValueError("key is nan")
        super().add(request, step)

    @instead_of("discard", r"discard\(\) raised KeyError\(3\)")
    def raises_on_discard(self, request):
        if request.arrival == 3:
            raise KeyError(request.arrival)
        super().discard(request)


FAILING = variants(FailingPolicy)


@pytest.mark.parametrize("name", FAILING)
def test_a_policy_that_fails_is_replaced_and_reported_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The batches are those of first come, first served, from the failing step on and in the failing step."""
    policy, words = FAILING[name]
    workload = random_workload(5)
    sound, failing = a_session(opening()), a_session(opening(policy))
    with caplog.at_level(logging.ERROR, logger="scheduler_components.batcher"):
        for session in (sound, failing):
            session.serve(workload)
            session.expect_outputs()
            session.expect_nothing_held()
    assert failing.batches == sound.batches
    [record] = caplog.records
    assert record.getMessage().startswith(f"the scheduling policy {policy.__name__} failed: ")
    assert record.getMessage().endswith("; requests are served first come, first served from now on")
    assert re.search(words, record.getMessage())
    assert failing.batcher.num_replaced_policies == 1


OTHER = CheckedRequest("other", [1], 1)


@pytest.mark.parametrize("select_victim", [lambda candidates: OTHER, lambda candidates: {}["no key"]])
def test_a_preemption_policy_that_fails_is_replaced_and_reported_once(
    select_victim: Callable[[object], CheckedRequest], caplog: pytest.LogCaptureFixture
) -> None:
    workload, policy = random_workload(5), SimpleNamespace(select_victim=select_victim)
    sound, failing = a_session(opening(ratio=0.0)), a_session(opening(preemption=lambda: policy, ratio=0.0))
    for session in (sound, failing):
        session.serve(workload)
    assert failing.batches == sound.batches
    [record] = caplog.records
    assert record.getMessage().endswith("; the latest arrival is preempted from now on")
    assert failing.batcher.preemptions == sound.batcher.preemptions
    assert sound.batcher.preemptions["LatestArrival"] > 1


def test_the_earliest_running_request_is_never_a_candidate() -> None:
    offered: list[list[int]] = []

    class PreemptsTheFirst:
        def select_victim(self, candidates: Sequence[CheckedRequest]) -> CheckedRequest:
            offered.append([each.arrival for each in candidates])
            assert min(each.arrival for each in session.queues.running) not in offered[-1]
            return candidates[0]

    session = a_session(opening(preemption=PreemptsTheFirst, ratio=0.0))
    session.serve(random_workload(2))
    assert session.batcher.num_replaced_policies == 0
    assert max(map(len, offered)) > 1 and all(arrivals == sorted(arrivals) for arrivals in offered)


class Mirror(Fcfs):
    """Keeps the calls, to compare them with the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, CheckedRequest] = {}
        self.steps: list[int] = []
        self.num_tokens = 0

    def add(self, request: CheckedRequest, step: int) -> None:
        assert request.arrival not in self.waiting
        self.waiting[request.arrival] = request
        self.steps.append(step)
        super().add(request, step)

    def discard(self, request: CheckedRequest) -> None:
        del self.waiting[request.arrival]
        super().discard(request)

    def on_scheduled(self, chunks: Sequence[object]) -> None:
        self.num_tokens += sum(chunk.num_tokens for chunk in chunks)


def test_a_policy_knows_exactly_the_waiting_requests_and_every_scheduled_token() -> None:
    mirror = Mirror()
    session = a_session(opening(lambda: mirror))
    workload, num_tokens = random_workload(8), 0
    for step in range(60):
        session.begin_step(workload, step)
        if session.unfinished:
            num_tokens += sum(chunk.num_tokens for chunk in session.step().chunks)
        assert sorted(mirror.waiting) == sorted(each.arrival for each in session.queues.waiting)
    assert mirror.num_tokens == num_tokens
    assert mirror.steps == sorted(mirror.steps) and mirror.steps[-1] > mirror.steps[0]
    assert any(each.num_retractions for each in session.requests)


# Admission.


def planned(*, tenant: str = "", prompt: int = 4, new: int = 30, first: int = 0) -> PlannedRequest:
    return PlannedRequest(tuple(range(first, first + prompt)), new, RequestHints(tenant=tenant))


def test_a_tenant_at_its_cap_blocks_those_behind_it_only_where_that_is_wanted() -> None:
    for blocks, running in ((True, "a"), (False, "ab")):
        limits = attrs.evolve(SMALL_LIMITS, max_running_per_tenant=1, head_of_line_blocking=blocks)
        session = a_session(opening(), limits=limits, num_pages=60)
        for number, tenant in enumerate("aab"):
            session.add(planned(tenant=tenant, first=100 * number))
        session.step()
        assert "".join(each.hints.tenant for each in session.queues.running) == running
        assert session.batcher.refusals == {"tenant": 1}


def test_refusals_are_counted_by_reason() -> None:
    reasons = set()
    many = attrs.evolve(SMALL_LIMITS, max_prefill_tokens=8, max_running_requests=9)
    watermark = attrs.evolve(SMALL_LIMITS, watermark_pages=2)
    for limits, num_pages in ((SMALL_LIMITS, 60), (many, 60), (watermark, 13)):
        session = a_session(opening(ratio=0.0), num_pages=num_pages, limits=limits)
        session.serve(random_workload(9, max_tokens=40))
        reasons |= set(session.batcher.refusals)
    assert reasons == {"tokens", "slots", "pages", "watermark"}


def test_a_step_without_a_free_slot_does_not_read_the_order() -> None:
    """So 10,000 waiting requests cost no more than one, whatever the policy."""

    class Unread(Fcfs):
        def order(self, step: int) -> Iterator[CheckedRequest]:
            raise AssertionError("read")

    session = a_session(opening(), num_pages=60)
    for number in range(6):
        session.add(planned(first=100 * number))
    while len(session.queues.running) < SMALL_LIMITS.max_running_requests:
        session.step()
    policy = session.batcher.policy = Unread()
    for request in session.queues.waiting:
        policy.add(request, 1)
    refusals = session.batcher.refusals["slots"]
    session.step()
    assert (session.batcher.policy, session.batcher.refusals["slots"]) == (policy, refusals + 1)


def test_many_waiting_requests_of_a_capped_tenant_are_not_all_read() -> None:
    class Counting(Fcfs):
        num_read = 0

        def order(self, step: int) -> Iterator[CheckedRequest]:
            for request in super().order(step):
                Counting.num_read += 1
                yield request

    limits = attrs.evolve(SMALL_LIMITS, max_running_per_tenant=1, head_of_line_blocking=False)
    session = a_session(opening(Counting), limits=limits, num_pages=60)
    for number in range(300):
        session.add(planned(tenant="a", first=10 * number))
    session.batcher.next_batch()
    assert 128 <= Counting.num_read <= 130


def test_no_request_is_admitted_in_a_step_that_preempts_one() -> None:
    """The pages of the victim are for those that run, also where the next request is small and urgent."""
    limits = attrs.evolve(SMALL_LIMITS, max_running_requests=2)
    session = a_session(opening(PriorityPolicy, ratio=0.0), num_pages=8, limits=limits)
    for number in range(2):
        session.add(planned(first=100 * number, prompt=8, new=16))
    session.step()
    session.add(PlannedRequest((500,), 1, RequestHints(priority=5)))
    while not (batch := session.step()).num_retracted:
        pass
    assert (batch.num_admitted, session.step().num_admitted) == (0, 1)


class Copies:
    """Tiers whose copies hold pages."""

    num_pages_in_transfer = num_look_ahead = 0

    def __init__(self) -> None:
        self.prefetch_queue, self.written = self, []

    def start(self, *_: object) -> None: ...

    def is_done(self, *_: object, is_next: bool) -> bool:
        return True

    def record_admission(self, rid: str, **_: int) -> CachedTokens:
        return CachedTokens()

    def write_to_host(self, token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        self.written.append(list(token_ids))


def test_a_request_waits_for_pages_that_copies_return_and_preempts_no_one_for_them() -> None:
    copies = Copies()
    session = a_session(opening(ratio=0.0), num_pages=5)
    session.kv_cache.tiers = copies
    for number in range(2):
        session.add(planned(first=100 * number, prompt=8, new=12))
    session.step()
    copies.num_pages_in_transfer = 1
    while len(session.step().chunks) == 2:
        pass
    third = session.add(planned(first=500, prompt=1, new=1))
    for _ in range(2):
        batch = session.step()
        assert (len(batch.chunks), batch.num_admitted, batch.num_retracted) == (1, 0, 0)
    assert len(session.queues.running) == 2 and third.state is RequestState.WAITING
    copies.num_pages_in_transfer = 0
    assert session.step().num_retracted == 1
    assert copies.written == [session.requests[1].token_ids]


# Modes.


def test_prefill_first_computes_decodes_only_without_a_prefill() -> None:
    limits = attrs.evolve(SMALL_LIMITS, mode="prefill_first")
    session = a_session(opening(), limits=limits, num_pages=60)
    session.add(planned(new=4))
    session.step()
    session.add(planned(first=500, prompt=25, new=2))
    kinds = ["".join("p" if chunk.is_prefill else "d" for chunk in session.step().chunks) for _ in range(5)]
    assert kinds == ["p", "p", "p", "dd", "d"]


def test_prefill_first_does_not_hold_up_decodes_for_ever() -> None:
    """Prompts that end with their first token free their slot in every step."""
    limits = attrs.evolve(SMALL_LIMITS, mode="prefill_first")
    session = a_session(opening(), limits=limits, num_pages=60)
    first = session.add(planned(new=3))
    session.step()
    for number in range(40):
        session.add(planned(first=100 * number, new=1))
        session.step()
    assert first.finish_reason is not None


@settings(deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(PREEMPTION_POLICY_NAMES),
    st.sampled_from(["mixed", "prefill_first"]),
    st.booleans(),
    st.integers(20, 30),
)
def test_any_workload_is_served(seed: int, name: str, mode: str, counts_decodes: bool, num_pages: int) -> None:
    limits = attrs.evolve(SMALL_LIMITS, mode=mode, counts_decodes=counts_decodes)
    session = a_session(opening(preemption=lambda: make_preemption_policy(name)), limits=limits, num_pages=num_pages)
    session.serve(random_workload(seed, num_requests=8))
    session.expect_outputs()
    session.expect_nothing_held()


def test_retract_all_keeps_the_order_of_arrival_and_every_token() -> None:
    session = a_session(opening(), num_pages=60)
    requests = [session.add(planned(first=100 * number)) for number in range(3)]
    session.step()
    session.step()
    assert session.batcher.retract_all() == 3
    assert list(session.queues.waiting) == requests
    assert [each.num_retractions for each in requests] == [1, 1, 1]
    session.serve([])
    session.expect_outputs()
