"""The ports by which control requests reach a scheduler: they abort, retract and clear what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_components import AllBlocksCleared
from scheduler_components.agreement import ParallelGroups
from scheduler_components.quiesce import QuiesceState
from scheduler_components.values import FlushCache, SessionParams
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.rank.quiescable_scheduler import PausableScheduler, make_quiesce_stepper
from scheduler_engine.engine.scheduler.request import EngineRequest

PROMPTS = [list(range(8)), list(range(20, 28)), list(range(40, 48)), list(range(60, 68))]


@pytest.fixture
def bench(make_bench: Callable[..., Any]) -> Any:
    """Two requests run and two wait."""
    bench = make_bench(max_running_requests=2)
    for number, prompt in enumerate(PROMPTS):
        bench.submit(f"r{number}", prompt, max_new=9)
    bench.scheduler.step()
    return bench


@pytest.fixture
def port(bench: Any) -> PausableScheduler:
    return PausableScheduler(scheduler=bench.scheduler)


def test_it_counts_running_and_waiting_requests_and_transfers(port: PausableScheduler) -> None:
    assert (port.num_running, port.num_waiting, port.num_operations) == (2, 2, 0)


def test_abort_all_ends_running_and_waiting_requests_and_publishes_their_pages(
    bench: Any, port: PausableScheduler
) -> None:
    assert port.abort_all() == 4
    num_batches = len(bench.publisher.batches)
    assert bench.stored_tokens(), "the computed pages stay in the cache"
    bench.drain()
    assert (port.num_running, port.num_waiting) == (0, 0)
    assert {delta.rid: delta.finish_reason for delta in bench.outputs.deltas if delta.finish_reason} == {
        f"r{number}": "abort" for number in range(4)
    }
    assert len(bench.publisher.batches) >= num_batches
    assert port.abort_all() == 0


def test_abort_all_leaves_no_page_to_a_session(make_bench: Callable[..., Any]) -> None:
    """A turn that is aborted ends, and the end of a turn locks its pages."""
    bench = make_bench()
    sessions = bench.scheduler.sessions
    sessions.open("s", capacity_tokens=64)
    params = SessionParams("s")
    bench.scheduler.submit(
        EngineRequest("turn", sessions.extend(params, range(9)), SamplingLimits(max_new_tokens=9)), params
    )
    bench.scheduler.step()
    assert PausableScheduler(scheduler=bench.scheduler).abort_all() == 1
    assert (sessions.num_held_pages, "s" in sessions) == (0, True)


def test_retract_all_returns_running_requests_to_the_queue(bench: Any, port: PausableScheduler) -> None:
    assert port.retract_all() == 2
    assert (port.num_running, port.num_waiting) == (0, 4)
    assert port.retract_all() == 0
    assert len(bench.drain()) > 9
    assert sum(delta.finish_reason == "length" for delta in bench.outputs.deltas) == 4


def test_clear_empties_the_cache_and_reports_it_to_readers(bench: Any, port: PausableScheduler) -> None:
    bench.drain()
    assert list(bench.scheduler.cache.block_hashes())
    port.clear("v2")
    assert not list(bench.scheduler.cache.block_hashes())
    bench.scheduler.kv_events.flush()
    assert isinstance(bench.publisher.events()[-1], AllBlocksCleared)
    port.clear_storage_index()  # there is no storage: nothing to do


def test_the_stepper_executes_a_request_through_these_ports(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    stepper = make_quiesce_stepper(bench.scheduler, QuiesceState(), groups=ParallelGroups())
    bench.submit("r", PROMPTS[0])
    bench.drain()
    stepper.enqueue(3, FlushCache())
    assert stepper.step() is None, "carried out, and confirmed by the next agreement"
    reply = stepper.step()
    assert reply is not None
    assert (reply.request_id, reply.problem) == (3, "")
    assert not list(bench.scheduler.cache.block_hashes())
