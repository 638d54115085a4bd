"""Ranks load, drain and evict adapters alike, whatever time their loads take."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.agreed_queue_replica import worlds
from kit.lora_replica import LIMITS, MAX_LOAD_STEPS, AdaptedRequest, LoraReplica, ScriptedLoader
from kit.searches import num_examples
from kit.variants import found, instead_of, variants
from kit.waiting_ranks import ManualLoader

from scheduler_components import ConfigError, ParallelState
from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.errors import QueueFullError
from scheduler_components.values import AdapterLoad, LoadSections, RequestHints
from scheduler_components.waiting.lora_queue import LoraLimits, LoraQueue, NullAdapterLoader

STEPS = 60
RUN_STEPS = 8
MAX_DRAIN_STEPS = RUN_STEPS + 3 * MAX_LOAD_STEPS + 4
"""The requests that use the adapter end, then at most three loads in a row, and the agreements between."""

Queue = LoraQueue[AdaptedRequest]


def run(replica: LoraReplica, seed: int) -> None:
    random = Random(seed)
    for name in "ab":
        replica.each(lambda queue, name=name: queue.register(name, name.upper()))
    for _ in range(STEPS):
        replica.do(random)
    replica.finish()


def run_hot_and_cold(replica: LoraReplica) -> None:
    """A request for a third adapter is served although a new request for each loaded one comes in every step."""
    for name in "abc":
        replica.each(lambda queue, name=name: queue.register(name, name.upper()))
    cold = None
    for step in range(30 + MAX_DRAIN_STEPS):
        for name in "ab":
            replica.submit(name, RUN_STEPS)
        if step == 30:
            cold = replica.submit("c", 1)
        replica.step()
        if cold in replica.ranks[0].ends or cold in replica.ranks[0].running:
            break
    assert cold not in replica.ranks[0].waiting, f"an adapter was not drained within {MAX_DRAIN_STEPS} steps"


@settings(max_examples=num_examples(1) // 4, deadline=None)
@given(st.integers(0, 2**32))
def test_an_adapter_is_drained_within_the_steps_of_the_requests_that_use_it(seed: int) -> None:
    run_hot_and_cold(LoraReplica(seed))


@settings(max_examples=num_examples(1), deadline=None)
@given(st.integers(0, 2**32), worlds)
def test_ranks_decide_alike_within_bounds_and_no_adapter_is_evicted_while_it_is_used(
    seed: int, world: ParallelState
) -> None:
    run(LoraReplica(seed, world=world), seed)


# Broken variants: each of them fails the property above.


class BrokenQueue(Queue):
    @instead_of("fill")
    def admits_when_its_own_load_is_done(self, proposal):
        facts = self.loader.poll()
        for fact in facts:
            found = next((each for each in self._registered.values() if each.key == fact.key), None)
            if found is not None and (not fact.problem):
                found.state = "loaded"
        self.loader.poll = lambda: facts
        super().fill(proposal)
        del self.loader.poll

    @instead_of("_evict_idle")
    def evicts_what_is_used(self):
        loaded = [each for each in self._registered.values() if each.state == "loaded" and (not each.is_pinned)]
        if loaded:
            loaded[0].users.clear()
            self._evict(loaded[0])
        return bool(loaded)

    @instead_of("enter")
    def forgets_users_of_requests_that_never_waited(self, request):
        waits = super().enter(request)
        if not waits:
            self.end(request)
        return waits

    never_drains = found(_drain_for=lambda self, num_wanted: None)
    evicts_by_its_own_clock = found(
        _evict_idle=lambda self: self.loader.random.random() < 0.7 and super()._evict_idle()
    )
    loads_beyond_its_slots = found(_evict_idle=lambda self: True)

    @instead_of("_on_load_ended")
    def keeps_what_failed_elsewhere(self, departure):
        unload, self.loader.unload = self.loader.unload, lambda adapter: None
        super()._on_load_ended(departure)
        self.loader.unload = unload

    forgets_the_waiting_of_a_failed_load = found(_fail=lambda self, found, problem: found.waiting.clear())

    @instead_of("unregister")
    def keeps_an_unregistered_adapter(self, name):
        super().unregister(name)
        self._leaving.clear()


BROKEN = variants(BrokenQueue)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_queue_is_found(name: str) -> None:
    [variant] = BROKEN[name]

    def is_sound(seed: int) -> bool:
        def open_queue(loader: ScriptedLoader) -> Queue:
            return variant(loader=loader, limits=LIMITS)

        try:
            run(LoraReplica(seed, open_queue=open_queue), seed)
            run_hot_and_cold(LoraReplica(seed, open_queue=open_queue))
        except Exception:  # noqa: BLE001 - an assertion, or an error of the queue
            return False
        return True

    assert not all(map(is_sound, range(30)))


# One rank, whose loads succeed in the next step.


class Rank:
    """A queue of one rank with its agreement."""

    def __init__(self, **limits: float) -> None:
        self.queue: Queue = LoraQueue(limits=LoraLimits(**({"max_loaded": 2} | limits)), loader=NullAdapterLoader())
        self.now_s = 0.0
        self.agreement = StepAgreement(parts=[self.queue], clock=lambda: self.now_s)
        self.num_steps = 0

    def step(self, num_steps: int = 1) -> list[tuple[str, str]]:
        left: list[tuple[str, str]] = []
        for _ in range(num_steps):
            self.num_steps += 1
            self.agreement.step(self.num_steps)
            left += ((each.rid, each.reason) for each in self.queue.queue.pop_departures())
        return left

    def enter(self, rid: str, lora: str | None) -> tuple[AdaptedRequest, bool]:
        request = AdaptedRequest(rid, RequestHints(lora=lora), 1)
        return request, self.queue.enter(request)

    @property
    def loaded(self) -> set[str]:
        return {each.name for each in self.queue.lora_load().by_adapter if each.is_loaded}


def a_rank(*names: str, **limits: float) -> Rank:
    rank = Rank(**limits)
    for name in names:
        rank.queue.register(name, f"/adapters/{name}")
    return rank


def test_a_request_of_the_base_model_waits_for_nothing() -> None:
    rank = a_rank()
    request, waits = rank.enter("r0", None)
    assert (waits, request.lora_id) == (False, None)


def test_an_adapter_is_loaded_when_a_request_names_it_and_later_requests_do_not_wait() -> None:
    rank = a_rank("a")
    first, waits = rank.enter("r0", "a")
    assert waits
    assert rank.loaded == set()
    assert rank.step(4) == [("r0", "ready")]
    assert rank.loaded == {"a"}
    second, waits = rank.enter("r1", "a")
    assert not waits
    assert first.lora_id == second.lora_id == 1


def test_the_least_recently_used_idle_adapter_is_evicted() -> None:
    rank = a_rank("a", "b", "c")
    for name in ("a", "b", "a"):
        request, _ = rank.enter(f"{name}{rank.num_steps}", name)
        rank.step(4)
        rank.queue.end(request)
    rank.enter("c0", "c")
    rank.step(4)
    assert rank.loaded == {"a", "c"}


def test_a_pinned_adapter_stays_and_one_slot_is_left_to_others() -> None:
    rank = a_rank("b", "c")
    rank.queue.register("a", "/a", is_pinned=True, request_id=7)
    rank.step(3)
    assert [(reply.request_id, reply.problem) for reply in rank.queue.pop_replies()] == [(7, "")]
    for name in "bc":
        request, _ = rank.enter(name, name)
        rank.step(4)
        rank.queue.end(request)
    assert rank.loaded == {"a", "c"}
    with pytest.raises(ConfigError, match="would leave no slot"):
        rank.queue.register("d", "/d", is_pinned=True)


def test_a_busy_adapter_is_drained_for_another_and_new_requests_wait_behind_it() -> None:
    rank = a_rank("a", "b", max_loaded=1)
    busy, _ = rank.enter("r0", "a")
    rank.step(4)
    other, waits = rank.enter("r1", "b")
    assert waits
    rank.step(2)
    late, waits = rank.enter("r2", "a")
    assert waits, "a new request uses an adapter that is drained"
    assert rank.step(5) == []
    rank.queue.end(busy)
    assert rank.step(5) == [("r1", "ready")]
    assert rank.loaded == {"b"}
    rank.queue.end(other)
    assert rank.step(6) == [("r2", "ready")]
    assert late.lora_id == 1


def test_more_requests_than_lanes_for_more_adapters_than_slots_are_all_served() -> None:
    """Requests for an adapter without a slot would fill the lanes, and those that use the slots wait behind them."""
    limits = LoraLimits(max_loaded=2, max_waiting=90, max_wait_s=1e6)
    replica = LoraReplica(1, open_queue=lambda loader: LoraQueue(loader=loader, limits=limits))
    for name in "abc":
        replica.each(lambda queue, name=name: queue.register(name, name.upper()))
    for rank in replica.ranks:
        rank.loader.failure_rate = 0.0
    rids = [replica.submit("abc"[number % 3], 2) for number in range(90)]
    for _ in range(3 * MAX_DRAIN_STEPS):
        replica.step()
    assert {replica.ranks[0].ends.get(rid) for rid in rids} == {"finished"}


def test_an_adapter_is_kept_if_the_request_for_another_is_aborted() -> None:
    rank = a_rank("a", "b", max_loaded=1)
    rank.enter("r0", "a")
    rank.step(4)
    other, _ = rank.enter("r1", "b")
    rank.step(2)
    rank.enter("r2", "a")
    rank.queue.end(other)
    rank.queue.unregister("b")
    assert rank.step(3) == [("r2", "ready")]


def test_requests_that_wait_for_an_unregistered_adapter_fail_and_those_that_use_it_finish() -> None:
    rank = a_rank("a", "b", max_loaded=1)
    user, _ = rank.enter("r0", "a")
    rank.step(4)
    rank.enter("r1", "b")
    rank.step(2)
    rank.enter("r2", "a")
    rank.queue.unregister("a")
    with pytest.raises(ConfigError, match="is no loaded adapter; give one of: b"):
        rank.enter("r3", "a")
    assert rank.step(3) == [("r2", "failed")]
    rank.queue.end(user)
    assert rank.step(5) == [("r1", "ready")]


def test_a_name_that_is_registered_again_has_another_number() -> None:
    rank = a_rank("a")
    rank.queue.unregister("a")
    assert rank.queue.register("a", "/other").lora_id == 2


def test_nothing_waits_longer_than_its_limit() -> None:
    rank = a_rank("a", "b", max_loaded=1, max_wait_s=5.0)
    rank.enter("r0", "a")
    rank.step(4)
    rank.enter("r1", "b")
    rank.queue.register("c", "/c", request_id=9)
    rank.step()
    rank.now_s = 5.0
    assert rank.step(2) == [("r1", "expired")]
    [reply] = rank.queue.pop_replies()
    assert (reply.request_id, reply.problem) == (9, "adapter 'c' was not loaded: waited longer than 5 s")
    assert [each.name for each in rank.queue.adapters] == ["a", "b"]
    assert not rank.queue.has_pending_loads


def test_the_load_report_counts_the_requests_of_each_adapter() -> None:
    rank = a_rank("a", "b", max_loaded=1)
    rank.enter("r0", "a")
    rank.step(4)
    rank.enter("r1", "b")
    load = rank.queue.load_sections().lora
    assert load is not None and load == rank.queue.lora_load()
    assert load.by_adapter == (AdapterLoad("a", 1, 0, True), AdapterLoad("b", 0, 1, False))
    assert (load.slots_used, load.slots_total, load.running_adapters, load.waiting_adapters) == (1, 1, ("a",), ("b",))


def test_the_load_report_of_an_engine_without_adapters_has_no_section() -> None:
    assert LoraQueue[AdaptedRequest]().load_sections() == LoadSections()


def test_each_refusal_names_its_field() -> None:
    rank = a_rank("a", max_registered=1, max_waiting=1)
    for name, field in (("", "lora_name"), ("x" * 129, "lora_name"), ("a", "lora_name"), ("b", "lora_name")):
        with pytest.raises(ConfigError) as caught:
            rank.queue.register(name, "/x")
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="lora_name"):
        rank.queue.unregister("b")
    with pytest.raises(ConfigError, match="lora_path"):
        rank.enter("r0", "b")
    rank.enter("r1", "a")
    with pytest.raises(QueueFullError):
        rank.enter("r2", "a")
    rank.queue.end(AdaptedRequest("r2", RequestHints(lora="a"), 1))
    assert rank.queue.stats().requests_refused == 1


def test_a_load_that_has_ended_counts_in_the_next_step_however_many_adapters_are_wanted() -> None:
    loader = ManualLoader()
    queue = Queue(loader=loader, limits=LoraLimits(max_loaded=1))
    agreement = StepAgreement(parts=[queue], clock=lambda: 0.0)
    for number, name in enumerate("abcd"):
        queue.register(name, "folder", request_id=number)
    for step in range(1, 4):
        agreement.step(step)
    loader.finish("a", "")
    agreement.step(4)
    assert [each.request_id for each in queue.pop_replies()] == [0]
