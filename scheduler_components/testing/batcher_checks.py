"""Checks of every batcher. Run each of ``BATCHER_CHECKS`` on a batcher of your own, or on the kit's with your policies.

A check takes a function that opens a batcher over ``BatchLimits``, queues and a KV cache (``OpenBatcher``). It serves a
workload of prompts that share prefixes and overfill the pool, verifies every batch and every page, and raises
``ConformanceError`` with its trace. Let the batcher reserve little of the possible output (a new-token ratio of 0.2),
so that it has to preempt::

    def open_batcher(limits, queues, kv_cache):
        few = BatchConditions(new_token_ratio=NewTokenRatioTracker(initial=0.2, minimum=0.0))
        return Batcher(limits=limits, queues=queues, kv_cache=kv_cache, conditions=few, policy=MyPolicy())

    @pytest.mark.parametrize("check", BATCHER_CHECKS)
    def test_my_batcher(check):
        check(open_batcher)

``first_difference`` compares two batchers over one history; ``BatcherComparisonMachine`` searches for a history in
which they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import attrs

from scheduler_components.scheduling.admission_budget import BATCH_MODES, BatchLimits
from scheduler_components.testing.batcher_session import (
    BatcherSession,
    OpenBatcher,
    PlannedRequest,
    max_batcher_steps,
)
from scheduler_components.values import RequestHints

__all__ = ["BATCHER_CHECKS", "BATCHER_WORKLOAD", "SMALL_LIMITS", "first_difference", "random_workload"]

SMALL_LIMITS = BatchLimits(max_running_requests=4, max_prefill_tokens=24, chunk_tokens=10)
"""Limits that a few short requests reach."""

_PAGE_SIZE = 4
_SYSTEM = tuple(range(1, 13))


def random_workload(seed: int, *, num_requests: int = 14, max_tokens: int = 80) -> tuple[PlannedRequest, ...]:
    """Return requests of random lengths, arrivals, hints and aborts, each of at most ``max_tokens`` positions."""
    random = Random(seed)
    workload = []
    for number in range(num_requests):
        size = random.randint(1, max_tokens * 3 // 4)
        shared = _SYSTEM[: random.randint(0, min(size - 1, len(_SYSTEM)))]
        prompt = (*shared, *(100 * number + index for index in range(size - len(shared))))
        step = random.randint(0, 12)
        workload.append(
            PlannedRequest(
                prompt,
                random.randint(1, max_tokens - size),
                RequestHints(
                    priority=random.randint(-1, 2),
                    tenant=random.choice("abc"),
                    deadline_s=random.choice((None, 5.0, 9.0)),
                    lora=random.choice((None, "x", "y")),
                ),
                step,
                step + random.randint(0, 9) if random.random() < 0.15 else None,
            )
        )
    return tuple(sorted(workload, key=lambda planned: planned.step))


BATCHER_WORKLOAD = random_workload(25)
"""Fourteen requests that overfill a pool of 24 pages; with first come, first served some are preempted."""


def check_no_limit_is_exceeded(open_batcher: OpenBatcher) -> None:
    """Every batch keeps to the tokens, chunks, slots, watermark and tenants of its limits, in both modes."""
    variants = [attrs.evolve(SMALL_LIMITS, mode=mode) for mode in BATCH_MODES]
    variants += [
        attrs.evolve(SMALL_LIMITS, counts_decodes=True, max_prefill_tokens=7),
        attrs.evolve(SMALL_LIMITS, watermark_pages=12, max_prefill_tokens=200, chunk_tokens=100),
        attrs.evolve(SMALL_LIMITS, max_running_per_tenant=1, head_of_line_blocking=False),
        attrs.evolve(SMALL_LIMITS, max_running_requests=1, chunk_tokens=1),
    ]
    for limits in variants:
        session = _session(f"No batch exceeds {limits}", open_batcher, limits)
        session.serve(BATCHER_WORKLOAD)
        session.expect_outputs()


def check_a_pool_for_one_request_makes_progress(open_batcher: OpenBatcher) -> None:
    """A pool that holds the longest request alone serves all, in a bounded number of steps."""
    for mode in BATCH_MODES:
        limits = attrs.evolve(SMALL_LIMITS, mode=mode)
        session = _session(f"A pool that holds one request serves all ({mode})", open_batcher, limits, num_pages=20)
        session.serve(random_workload(3, num_requests=8))
        session.expect_outputs()
        session.expect_nothing_held()


def check_no_requests_preempt_each_other_forever(open_batcher: OpenBatcher) -> None:
    """Requests that each need most of the pool, and arrive together, all end."""
    for first_priority in (0, 3):
        title = "Requests that each need most of the pool do not preempt each other for ever"
        session = _session(title, open_batcher, SMALL_LIMITS, num_pages=12)
        session.serve(
            [
                PlannedRequest(
                    tuple(range(1000 * number, 1000 * number + 8)),
                    36,
                    RequestHints(priority=first_priority - number, tenant="ab"[number % 2]),
                )
                for number in range(5)
            ]
        )
        session.expect_outputs()


def check_no_page_is_lost(open_batcher: OpenBatcher) -> None:
    """After every step each page has one owner, and in the end no request holds a page."""
    for seed in (1, 7):  # In the second, requests are aborted while they run.
        session = _session("Every page has one owner, and in the end none is held", open_batcher, SMALL_LIMITS)
        session.serve(random_workload(seed))
        session.expect_nothing_held()


def check_preempted_requests_lose_no_token(open_batcher: OpenBatcher) -> None:
    """Every request generates exactly the tokens that it generates alone, however often it was preempted."""
    for mode in BATCH_MODES:
        limits = attrs.evolve(SMALL_LIMITS, mode=mode)
        session = _session(f"A preempted request loses no token ({mode})", open_batcher, limits, num_pages=22)
        session.serve(random_workload(4, num_requests=10))
        session.expect_outputs()


def check_arrivals_do_not_hold_up_decodes(open_batcher: OpenBatcher) -> None:
    """A request that decodes ends while a prefill arrives in every step, in both modes."""
    num_steps = 150
    arrivals = [PlannedRequest((100 + n,) * 12, 1, step=n) for n in range(1, num_steps)]
    workload = [PlannedRequest((1, 2, 3), 6), *arrivals]
    for mode in BATCH_MODES:
        limits = attrs.evolve(SMALL_LIMITS, mode=mode)
        session = _session(f"A request decodes while prefills arrive in every step ({mode})", open_batcher, limits)
        for step in range(num_steps):
            session.begin_step(workload, step)
            session.step()
            if session.requests[0].finish_reason is not None:
                break
        session.trace.require(
            session.requests[0].finish_reason is not None, f"an end of r0 within {num_steps} steps", session.requests[0]
        )


def check_an_empty_batcher_is_idle(open_batcher: OpenBatcher) -> None:
    """Without requests a batch is empty, and a batcher that has served everything is empty again."""
    session = _session("A batcher without requests makes empty batches", open_batcher, SMALL_LIMITS)
    for _ in range(2):
        batch = session.step()
        session.trace.expect((False, 0, 0), (batch.has_work, batch.num_admitted, batch.num_retracted))
        session.serve([PlannedRequest((1, 2, 3), 2)])
    session.expect_nothing_held()


def check_ranks_decide_equally(open_batcher: OpenBatcher) -> None:
    """Ranks that make the same calls make the same batches, although their requests hash differently.

    A decision that depends on the order of a set of requests or of their ids differs between ranks.
    """
    for seed in (2, 10, 17):
        batches: list[str] = []
        for rank in range(3):
            session = _session("All ranks make the same batches", open_batcher, SMALL_LIMITS, salt=rank)
            session.serve(random_workload(seed))
            for number, (expected, found) in enumerate(zip(batches, session.batches, strict=False)):
                session.trace.expect(expected, found, f"the batch of step {number} on the first rank")
            batches = batches or session.batches
            session.trace.expect(len(batches), len(session.batches), "steps on the first rank")


def _session(
    title: str, open_batcher: OpenBatcher, limits: BatchLimits, *, num_pages: int = 24, salt: int = 0
) -> BatcherSession:
    return BatcherSession.open(title, open_batcher, limits=limits, page_size=_PAGE_SIZE, num_pages=num_pages, salt=salt)


def first_difference(
    open_first: OpenBatcher,
    open_second: OpenBatcher,
    workload: Sequence[PlannedRequest] = BATCHER_WORKLOAD,
    *,
    limits: BatchLimits = SMALL_LIMITS,
    num_pages: int = 24,
) -> str | None:
    """Serve one workload with two batchers; return the first step in which their batches differ, as text, or None.

    Args:
        open_first, open_second: open the batchers.
        workload: in order of ``step``.
        limits, num_pages: of both.

    Raises:
        ConformanceError: one of them breaks a rule before they differ.
    """
    first, second = (
        BatcherSession.open(name, opened, limits=limits, page_size=_PAGE_SIZE, num_pages=num_pages)
        for name, opened in (("The first batcher", open_first), ("The second batcher", open_second))
    )
    for step in range(max_batcher_steps(workload)):
        for session in (first, second):
            session.begin_step(workload, step)
            session.step()
        one, other = first.batches[-1], second.batches[-1]
        if one != other:
            return f"step {step}:\n  first:  {one}\n  second: {other}"
        if all(planned.step <= step for planned in workload) and not first.unfinished:
            return None
    raise first.trace.failure("an end of all requests", f"{first.unfinished}")


BATCHER_CHECKS = (
    check_an_empty_batcher_is_idle,
    check_no_limit_is_exceeded,
    check_a_pool_for_one_request_makes_progress,
    check_no_requests_preempt_each_other_forever,
    check_no_page_is_lost,
    check_preempted_requests_lose_no_token,
    check_arrivals_do_not_hold_up_decodes,
    check_ranks_decide_equally,
)
