"""Sessions keep pages in the reference scheduler, and give them back before a request is preempted or refused."""

from __future__ import annotations

from kit.reference_scheduler import drain

from scheduler_components import ParallelState
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_components.values import SessionParams
from scheduler_engine.device.device import CostModel, SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import IntegrityConfig, SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

FREE = CostModel(base_ms=0, prefill_us_per_token=0, decode_us_per_request=0, context_us_per_1k_tokens=0)
CHECKS = CheckPolicy(
    action="raise", count_every_steps=1, locks_every_steps=1, full_check_every_steps=1, is_full_check_in_steps=True
)


def a_scheduler() -> Scheduler:
    """A pool of 16 pages of 4 tokens, all of which are checked after every step."""
    config = SchedulerConfig(
        page_size=4, kv_tokens=64, integrity=IntegrityConfig(checks=CHECKS, follows_events=True), new_token_ratio=0.1
    )
    return Scheduler.compose(config, ParallelState.trivial(), SimulatedDevice(cost=FREE))


def serve(
    scheduler: Scheduler, rid: str, tokens: range, session: SessionParams | None = None, max_new_tokens: int = 4
) -> EngineRequest:
    whole = tokens if session is None else scheduler.sessions.extend(session, tokens)
    request = EngineRequest(rid, whole, SamplingLimits(max_new_tokens=max_new_tokens))
    scheduler.submit(request, session)
    drain(scheduler)
    return request


def test_a_turn_finds_the_pages_of_the_turn_before_although_the_pool_was_filled_in_between() -> None:
    scheduler = a_scheduler()
    scheduler.sessions.open("s", capacity_tokens=60)
    serve(scheduler, "r0", range(100, 120), SessionParams("s"))
    for number in range(4):  # each of them fills most of the rest of the pool
        serve(scheduler, f"other-{number}", range(number * 40, number * 40 + 30))
    assert scheduler.sessions.num_held_pages == 5
    second = serve(scheduler, "r1", range(200, 203), SessionParams("s", rid="r0"))
    assert second.num_cached_prompt_tokens == 20


def test_a_request_that_needs_the_whole_pool_gets_the_pages_of_sessions_and_no_request_is_preempted() -> None:
    scheduler = a_scheduler()
    for number, name in enumerate("ab"):
        scheduler.sessions.open(name, capacity_tokens=60)
        serve(scheduler, f"r{number}", range(100 * number + 1, 100 * number + 16), SessionParams(name))
    assert scheduler.sessions.num_held_pages == 8
    large = serve(scheduler, "large", range(300, 345), max_new_tokens=16)
    assert (large.num_output_tokens, large.num_retractions) == (16, 0)
    assert scheduler.sessions.num_held_pages == 0
    assert list(scheduler.sessions.extend(SessionParams("a", rid="r0"), [1]))[:15] == list(range(1, 16))


def test_a_clear_releases_the_pages_of_sessions() -> None:
    scheduler = a_scheduler()
    scheduler.sessions.open("s", capacity_tokens=60)
    serve(scheduler, "r0", range(100, 120), SessionParams("s"))
    scheduler.clear_cache("2")
    assert scheduler.cache.free_tokens == scheduler.cache.capacity_tokens
    assert serve(scheduler, "r1", range(1), SessionParams("s", rid="r0")).num_prompt_tokens == 25


def test_a_replaced_turn_in_flight_is_aborted() -> None:
    scheduler = a_scheduler()
    scheduler.sessions.open("s", capacity_tokens=60)
    serve(scheduler, "r0", range(8), SessionParams("s"))
    params = SessionParams("s", rid="r0")
    first = EngineRequest("r1", scheduler.sessions.extend(params, [1]), SamplingLimits(max_new_tokens=9))
    scheduler.submit(first, params)
    second = serve(scheduler, "r2", range(2, 4), SessionParams("s", rid="r0", replace=True))
    assert str(first.finish_reason) == "abort"
    assert second.num_output_tokens == 4
