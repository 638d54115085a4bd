"""A snapshot has the current state of queues and pool: every fact in its own field, none negative."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import LoadInquirer, ParallelState
from scheduler_components.load import TokenCountedQueue
from scheduler_components.testing import FakePool, FakeQueues
from scheduler_components.testing.fakes import FakeRequest
from scheduler_components.values import (
    DisaggregationLoad,
    LoadSections,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    QueueLoad,
    SpeculativeLoad,
)

counts = st.integers(0, 2**30)


class Rates:
    gen_throughput, cache_hit_rate = 12.5, 0.75


def make_inquirer(**given_parts: Any) -> LoadInquirer:
    arguments = {"parallel": ParallelState(), "queues": FakeQueues(), "pool": FakePool(), "clock": lambda: 1234.5}
    return LoadInquirer(**{**arguments, **given_parts})


def test_every_fact_has_its_own_field() -> None:
    parts = LoadSections(
        queues=QueueLoad(grammar=2),
        disaggregation=DisaggregationLoad(mode="prefill", waiting_reqs=5, pending_tokens=1000),
        lora=LoraLoad(slots_used=1, slots_total=4, utilization=0.25),
        speculative=SpeculativeLoad(accept_length=2.5, accept_rate=0.5),
        memory=MemoryLoad(weight_gb=1.0, kv_cache_gb=2.0, graph_gb=3.0, token_capacity=1600),
    )
    inquirer = make_inquirer(
        parallel=ParallelState(dp_rank=3, dp_size=4),
        queues=FakeQueues(
            running=[1, 2, 3, 4], waiting=[FakeRequest(100, 30), FakeRequest(200)], num_chunked_tokens_left=7
        ),
        rates=Rates(),
        sections=lambda: parts,
    )
    assert inquirer.get_loads() == LoadSnapshot(
        sequence=1,
        timestamp=1234.5,
        dp_rank=3,
        num_running_reqs=4,
        num_waiting_reqs=2 + 5,
        num_pending_tokens=300 + 7 + 1000,
        num_waiting_uncached_tokens=270 + 7 + 1000,
        num_used_tokens=400,
        num_total_tokens=400 + 300 + 7 + 1000,
        max_total_num_tokens=1600,
        page_size=16,
        max_running_requests=8,
        token_usage=0.25,
        gen_throughput=12.5,
        cache_hit_rate=0.75,
        utilization=0.5,
        queues=parts.queues,
        disaggregation=parts.disaggregation,
        lora=parts.lora,
        speculative=parts.speculative,
        memory=parts.memory,
    )


@given(st.lists(st.builds(FakeRequest, counts, counts), max_size=30), counts)
@settings(deadline=None)
def test_a_counted_queue_and_a_plain_list_give_the_same_load(waiting: list[FakeRequest], chunked_tokens: int) -> None:
    plain = make_inquirer(queues=FakeQueues(waiting=waiting, num_chunked_tokens_left=chunked_tokens))
    counted = make_inquirer(
        queues=FakeQueues(waiting=TokenCountedQueue(waiting), num_chunked_tokens_left=chunked_tokens)
    )
    assert plain.get_loads() == counted.get_loads()


@given(running=counts, max_running=counts, used=counts, capacity=counts)
@settings(deadline=None)
def test_shares_are_shares_also_without_capacity(running: int, max_running: int, used: int, capacity: int) -> None:
    queues = FakeQueues(running=range(min(running, max_running)), max_running_requests=max_running)
    load = make_inquirer(queues=queues, pool=FakePool(1, capacity, min(used, capacity))).get_loads()
    assert 0.0 <= load.token_usage <= load.utilization <= 1.0


def test_a_rebound_list_is_seen() -> None:
    queues = FakeQueues(running=[1, 2, 3])
    inquirer = make_inquirer(queues=queues)
    assert inquirer.get_loads().num_running_reqs == 3
    queues.running, queues.waiting = [], [FakeRequest()]
    assert (inquirer.get_loads().num_running_reqs, inquirer.get_loads().num_waiting_reqs) == (0, 1)


def test_each_snapshot_has_the_next_number() -> None:
    inquirer = make_inquirer()
    assert [inquirer.get_loads().sequence for _ in range(4)] == [1, 2, 3, 4]


def test_gauges_fall_to_zero_when_everything_is_aborted() -> None:
    waiting = TokenCountedQueue([FakeRequest(), FakeRequest()])
    queues, pool = FakeQueues(running=[1], waiting=waiting, num_chunked_tokens_left=9), FakePool()
    inquirer = make_inquirer(queues=queues, pool=pool)
    assert inquirer.get_loads().num_total_tokens > 0
    waiting.clear()
    queues.running, queues.num_chunked_tokens_left, pool.used_tokens = [], 0, 0
    idle = inquirer.get_loads()
    assert idle == LoadSnapshot(
        sequence=2, timestamp=1234.5, max_total_num_tokens=1600, page_size=16, max_running_requests=8
    )


def test_a_decode_instance_waits_for_no_uncached_tokens() -> None:
    parts = LoadSections(disaggregation=DisaggregationLoad(mode="decode", waiting_reqs=2))
    load = make_inquirer(queues=FakeQueues(waiting=[FakeRequest()]), sections=lambda: parts).get_loads()
    assert (load.num_waiting_reqs, load.num_pending_tokens, load.num_waiting_uncached_tokens) == (3, 100, 0)


def test_an_error_of_a_source_is_raised() -> None:
    class Broken(FakePool):
        @property
        def used_tokens(self) -> int:
            raise RuntimeError("pool is gone")

        @used_tokens.setter
        def used_tokens(self, _: int) -> None: ...

    with pytest.raises(RuntimeError, match="pool is gone"):
        make_inquirer(pool=Broken()).get_loads()
