"""KvRouter: what it knows of replicas, and what it makes of it."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.events import batch, removed_run, stored

from benchmarks.studies.dynamo_tree import DynamoTree, has_dynamo
from observability.routing import (
    Candidate,
    HashedPrompt,
    KvRouter,
    Pick,
    ReplicaSet,
    ReplicaState,
    RoutingCostModel,
    Softmax,
    StickySessions,
)
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, ConfigError
from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace, hash_pages
from scheduler_components.cache.block_hash import weight_namespace
from scheduler_components.events import Tier
from scheduler_components.kv_events import BatchEncoder
from scheduler_components.values import AdapterLoad, LoadSnapshot, LoraLoad
from scheduler_engine.simulation import Router, SimulatedRequest, TraceRequest

PAGE = 4
PROMPT = tuple(range(5 * PAGE))
HASHES = hash_pages(PROMPT, PAGE)
NAMES = ("a", "b", "c")


def make_router(*names: int | str, **settings: object) -> KvRouter:
    router = KvRouter(page_size=PAGE, **settings)  # type: ignore[arg-type]
    for name in names or NAMES:
        router.on_replica_up(name, 0.0)
    return router


def route(router: KvRouter, prompt: tuple[int, ...] = PROMPT, now_s: float = 0.0, **options: object) -> Pick:
    pick = router.route_tokens(prompt, now_s=now_s, **options)  # type: ignore[arg-type]
    assert pick is not None
    return pick


def candidate(router: KvRouter, name: str, prompt: tuple[int, ...] = (), lora: str | None = None) -> Candidate:
    [found] = router.candidates([name], HashedPrompt(token_ids=prompt, page_size=PAGE), now_s=0.0, lora=lora)
    return found


def hashed(router: KvRouter, prompt: tuple[int, ...] = PROMPT) -> HashedPrompt:
    found = HashedPrompt(token_ids=prompt, page_size=PAGE)
    found.hash_in(router.namespaces())
    return found


def stored_page(*hashes: int, **fields: object) -> BlockStored:
    return stored(*hashes, block_size=PAGE, **fields)  # type: ignore[arg-type]


def prompt_of(number: int, blocks: int = 5) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + blocks * PAGE))


def test_it_is_a_router_of_the_simulation() -> None:
    router: Router = make_router(0, 1)
    assert (router.wants_events, router.wants_load) == (True, True)


def test_without_replicas_no_request_is_routed() -> None:
    assert KvRouter(page_size=PAGE).route_tokens(PROMPT, now_s=0.0) is None


def test_a_cached_prefix_attracts_a_request() -> None:
    router = make_router()
    router.on_events("b", BatchEncoder().encode(batch(stored_page(*HASHES[:3])), 0), 0.0)
    pick = route(router)
    assert (pick.replica, pick.device_blocks, pick.block_hashes) == ("b", 3, HASHES)


def test_load_outweighs_a_cached_prefix() -> None:
    router = make_router("a", "b")
    router.apply_events("b", [stored_page(*HASHES)], 0.0)
    router.on_load_report("b", LoadSnapshot(num_total_tokens=4 * PAGE), 0.0)
    assert route(router).replica == "b", "4 blocks of load against 5 to compute"
    router = make_router("a", "b", cost_model=RoutingCostModel(decode_weight=2))
    router.apply_events("b", [stored_page(*HASHES)], 0.0)
    router.on_load_report("b", LoadSnapshot(num_total_tokens=4 * PAGE), 0.0)
    assert route(router).replica == "a"


def test_what_was_sent_counts_until_a_report_includes_it() -> None:
    router = make_router("a", "b")
    first = route(router)
    assert [route(router, prompt_of(number)).replica for number in (1, 2, 3)] == ["b", "a", "b"]
    router.on_load_report("a", LoadSnapshot(sequence=1), 0.0)
    assert route(router, prompt_of(4)).replica == "a", "the report was made before the requests arrived"
    router.on_load_report("b", LoadSnapshot(sequence=1), 0.0)
    router.on_load_report("a", LoadSnapshot(sequence=2, dispatched_watermarks=((first.ticket[0], 3),)), 0.0)
    assert [route(router, prompt_of(number)).replica for number in (5, 6, 7)] == ["a", "a", "b"]


def test_a_sent_request_has_tokens_to_compute_and_tokens_to_hold() -> None:
    router = make_router("a", cost_model=RoutingCostModel(queue_weight=100))
    router.apply_events("a", [stored_page(*HASHES[:2])], 0.0)
    pick = route(router)
    load = LoadSnapshot(sequence=1, num_waiting_uncached_tokens=PAGE, num_total_tokens=6 * PAGE)

    def loads() -> tuple[float, float, int]:
        found = candidate(router, "a")
        return found.cost, found.load_blocks, found.num_dispatched

    assert loads() == (300 + 5, 3 + 5, 1), "two of its five blocks are cached"
    router.on_load_report("a", load, 0.0)
    assert loads() == (400 + 11, 4 + 11, 1)
    route(router, prompt_of(1))
    assert loads() == (900 + 16, 9 + 16, 2)
    router.finish(pick)
    assert loads() == (600 + 11, 6 + 11, 2)
    received = LoadSnapshot(sequence=2, num_total_tokens=PAGE, dispatched_watermarks=((pick.ticket[0], 2),))
    router.on_load_report("a", received, 0.0)
    assert (router.load_blocks("a"), router.load_blocks("unknown")) == (1, 0)
    assert loads() == (1, 1, 2)


def test_ended_and_cancelled_requests_count_no_more() -> None:
    router = make_router("a", "b")
    first, second = route(router), route(router, prompt_of(1))
    assert (first.replica, second.replica, router.num_in_flight("a")) == ("a", "b", 1)
    router.finish(first)
    assert (route(router, prompt_of(2)).replica, router.num_in_flight("a")) == ("a", 1)
    for _ in range(2):
        router.cancel(second)
        assert router.num_in_flight("b") == 0
    assert route(router, prompt_of(1)).device_blocks == 0, "the blocks of a cancelled request are not sent"


def test_sent_blocks_count_as_cached_until_they_expire() -> None:
    router = make_router()
    router.finish(route(router))
    assert [(each.replica, each.device_blocks) for each in (route(router, now_s=9.0),)] == [("a", 5)]
    router = make_router()
    router.finish(route(router))
    assert route(router, now_s=10.0).device_blocks == 0


def test_the_view_and_the_sent_blocks_are_one_prefix() -> None:
    router = make_router("a")
    router.speculative.add("a", HASHES[1:3], 0.0)
    router.apply_events("a", [stored_page(HASHES[0]), stored_page(HASHES[3], parent=HASHES[2])], 0.0)
    assert router.overlaps(["a"], HASHES, now_s=0.0) == [(4, 0, 0)]


def test_a_prefix_goes_on_to_lower_tiers() -> None:
    router = make_router("a", "b")
    router.apply_events("a", [stored_page(*HASHES[:2]), stored_page(*HASHES[2:3], medium="CPU")], 0.0)
    router.apply_events("a", [stored_page(*HASHES[3:], medium="STORAGE")], 0.0)
    router.apply_events("b", [stored_page(*HASHES[:4], medium="CPU")], 0.0)
    assert router.overlaps(["a", "b"], HASHES, now_s=0.0) == [(2, 1, 2), (0, 4, 0)]
    pick = route(router)
    assert (pick.replica, pick.host_blocks, pick.storage_blocks) == ("a", 1, 2)
    assert pick.cost == 5 - 2 - 0.75 - 2 * 0.25, "against 5 - 4 * 0.75 on b"


def test_a_prefix_that_is_in_storage_alone_counts() -> None:
    router = make_router("a")
    router.apply_events("a", [stored_page(*HASHES[:3], medium="STORAGE")], 0.0)
    assert router.overlaps(["a"], HASHES, now_s=0.0) == [(0, 0, 3)]


def test_adapters_attract_their_requests() -> None:
    router = make_router("a", "b")
    adapters = (AdapterLoad("poems", is_loaded=True), AdapterLoad("maths"))
    lora = LoraLoad(1, 2, 0.5, by_adapter=adapters)
    router.on_load_report("b", LoadSnapshot(sequence=1, lora=lora), 0.0)
    assert route(router, lora="poems").replica == "b"
    pick = route(router, lora="maths")
    assert pick.replica == "a", "no replica has it"
    assert route(router, prompt_of(1), lora="maths").replica == "a", "it will be loaded there"
    router.on_load_report("a", LoadSnapshot(sequence=1, lora=LoraLoad(0, 2, 0.0)), 0.0)
    assert route(router, prompt_of(2, 40), lora="maths").replica == "a", "the report does not include the request"
    for sequence, watermark in ((2, 2), (3, 3)):
        watermarks = ((pick.ticket[0], watermark), ("another router", 9))
        report = LoadSnapshot(sequence=sequence, lora=LoraLoad(0, 2, 0.0), dispatched_watermarks=watermarks)
        router.on_load_report("a", report, 0.0)
        loading_cost = candidate(router, "a", lora="maths").cost - candidate(router, "a").cost
        assert loading_cost == (0 if watermark == 2 else 64), "three requests were sent"


def test_an_adapter_has_another_number_on_each_replica() -> None:
    """The number is part of each block's hash. A replica's own events name it."""
    router = make_router("a", "b", "c")
    for name, number in (("a", 3), ("b", 7)):
        space = PrefixNamespace(lora_id=number, lora_name="poems")
        hashes = hash_pages(PROMPT, PAGE, space.seed())
        router.apply_events(name, [BlockStored(hashes[: number // 2], None, (), PAGE, number, lora_name="poems")], 0.0)
    pick = route(router, lora="poems")
    assert (pick.replica, pick.device_blocks) == ("b", 3)
    assert pick.block_hashes == hash_pages(PROMPT, PAGE, PrefixNamespace(lora_id=7, lora_name="poems").seed())
    pick = route(router, lora="poems", exclude={"a", "b"})
    assert pick.block_hashes == hash_pages(PROMPT, PAGE, PrefixNamespace(lora_id=3, lora_name="poems").seed())


def test_the_numbers_of_adapters_are_bounded() -> None:
    router = make_router("a")
    events = [BlockStored((number,), None, (), PAGE, number, lora_name=f"l{number}") for number in range(1, 4100)]
    router.apply_events("a", events, 0.0)
    first, last = (route(router, lora=name).block_hashes for name in ("l1", "l4099"))
    assert first == hash_pages(PROMPT, PAGE, PrefixNamespace(lora_name="l1").seed())
    assert last == hash_pages(PROMPT, PAGE, PrefixNamespace(lora_id=4099, lora_name="l4099").seed())


def test_namespaces_share_no_blocks() -> None:
    router = make_router("a", "b")
    space = PrefixNamespace(cache_salt="tenant")
    router.apply_events("b", [stored_page(*hash_pages(PROMPT, PAGE, space.seed()))], 0.0)
    assert route(router).replica == "a"
    pick = router.route_tokens(PROMPT, now_s=0.0, namespace=space)
    assert pick is not None
    assert (pick.replica, pick.device_blocks) == ("b", 5)


WEIGHTS = weight_namespace("v2")


def test_the_version_of_the_weights_is_part_of_the_blocks_of_a_replica_that_says_so() -> None:
    """Its events name the version, also those in which an adapter computed the blocks."""
    router = make_router("a", "b")
    stored_v2 = {"extra_keys": ((WEIGHTS.extra_key,),) * len(HASHES)}
    router.on_events("b", BatchEncoder().encode(batch(stored_page(*HASHES, **stored_v2)), 0), 0.0)
    [a, b] = router.candidates(["a", "b"], hashed(router), now_s=0.0)
    assert (a.overlap, b.overlap) == ((0, 0, 0), (0, 0, 0)), "the hashes of other weights never match"
    new = hash_pages(PROMPT, PAGE, WEIGHTS.seed())
    router.apply_events("b", [AllBlocksCleared(), stored_page(*new, **stored_v2)], 0.0)
    pick = route(router)
    assert (pick.replica, pick.device_blocks, pick.block_hashes) == ("b", 5, new)
    pick = route(router, exclude={"b"})
    assert (pick.replica, pick.block_hashes) == ("a", HASHES)
    of_lora = msgspec.structs.replace(WEIGHTS, lora_name="poems", lora_id=3)
    hashes = hash_pages(PROMPT, PAGE, of_lora.seed())
    router.apply_events("b", [BlockStored(hashes, None, (), PAGE, 3, lora_name="poems", **stored_v2)], 0.0)
    assert route(router, lora="poems").block_hashes == hashes
    router.apply_events("b", [stored_page(1)], 0.0)
    assert route(router, exclude={"a"}).block_hashes == HASHES, "an engine that restarts has its first weights"


def test_replicas_with_different_weights_come_and_go() -> None:
    router = make_router("a")
    router.apply_events("a", [stored_page(1, extra_keys=((WEIGHTS.extra_key,),))], 0.0)
    assert set(router.namespaces()) == {WEIGHTS}
    router.on_replica_up("b", 0.0)
    assert set(router.namespaces()) == {WEIGHTS, DEFAULT_NAMESPACE}
    router.on_replica_down("b", 0.0)
    assert set(router.namespaces()) == {WEIGHTS}
    router.on_replica_down("a", 0.0)
    assert set(router.namespaces()) == set()


def test_extra_keys_of_another_kind_are_no_weights() -> None:
    router = make_router("a")
    for keys in (((7,),), (("sha256:picture",),), (None,), ((),), ()):
        router.apply_events("a", [stored_page(1, extra_keys=keys)], 0.0)
        assert set(router.namespaces()) == {DEFAULT_NAMESPACE}


def test_a_prompt_that_is_hashed_before_is_routed_by_the_namespaces_of_that_moment() -> None:
    """What a replica says in the meantime makes its blocks unknown, and nothing worse."""
    router = make_router("a", "b")
    router.apply_events("a", [stored_page(*HASHES)], 0.0)
    prompt = hashed(router)
    router.apply_events("a", [stored_page(1, extra_keys=((WEIGHTS.extra_key,),))], 0.0)
    found = {each.replica: each.overlap for each in router.candidates(["a", "b"], prompt, now_s=0.0)}
    assert found == {"a": (0, 0, 0), "b": (0, 0, 0)}
    picks = [router.route_prompt(prompt, now_s=0.0) for _ in range(2)]
    assert [(each.replica, each.block_hashes) for each in picks if each] == [("a", ()), ("b", HASHES)]


def test_an_old_report_is_ignored() -> None:
    router = make_router("a", "b")
    router.on_load_report("a", LoadSnapshot(sequence=5, timestamp=5.0, num_total_tokens=400), 0.0)
    router.on_load_report("a", LoadSnapshot(sequence=4, timestamp=4.0), 0.0)
    assert (route(router).replica, router.num_old_reports) == ("b", 1)
    router.on_load_report("a", LoadSnapshot(sequence=1, timestamp=6.0), 0.0)
    assert route(router, prompt_of(1)).replica == "a", "the replica has restarted"


def test_an_unreadable_batch_costs_itself_and_a_counter() -> None:
    router = make_router("a")
    router.on_events("a", b"\xc1", 0.0)
    router.on_events("a", BatchEncoder().encode(batch(stored_page(*HASHES)), 0), 0.0)
    assert (router.num_unreadable_batches, route(router).device_blocks) == (1, 5)


def test_blocks_of_another_size_are_counted() -> None:
    """Such a replica was configured wrongly: no prompt ever matches its blocks."""
    router = make_router("a")
    router.apply_events("a", [stored_page(*HASHES), stored(1, block_size=2 * PAGE)], 0.0)
    assert router.num_other_page_sizes == 1


def test_a_cleared_replica_has_no_blocks() -> None:
    router = make_router("a", "b")
    router.apply_events("a", [stored_page(*HASHES)], 0.0)
    router.apply_events("a", [AllBlocksCleared()], 0.0)
    assert router.overlaps(["a"], HASHES, now_s=0.0) == [(0, 0, 0)]


def test_a_silent_replica_gets_nothing_until_it_is_heard() -> None:
    router = make_router(replicas=ReplicaSet(silence_s=2.0))
    for at_s in (1.5, 3.0, 4.5):
        router.on_load_report("b", LoadSnapshot(), at_s)
        router.apply_events("c", [], at_s)
        late = {route(router, prompt_of(number), at_s).replica for number in range(9)}
        assert late == ({"a", "b", "c"} if at_s <= 2 else {"b", "c"})
    router.on_events("a", BatchEncoder().encode(batch(), 0), 5.0)
    assert "a" in {route(router, prompt_of(number), 5.0).replica for number in range(9)}


def test_excluded_replicas_are_not_picked() -> None:
    router = make_router("a", "b")
    assert [route(router, prompt_of(number), exclude={"a"}).replica for number in range(3)] == ["b"] * 3
    assert router.route_tokens(PROMPT, now_s=0.0, exclude=["a", "b"]) is None


def test_a_draining_replica_ends_its_requests() -> None:
    router = make_router("a", "b")
    pick = route(router)
    router.replicas.drain("a")
    assert {route(router, prompt_of(number)).replica for number in range(4)} == {"b"}
    assert (router.num_in_flight("a"), router.replicas.state_of("a", 0.0)) == (1, ReplicaState.DRAINING)
    router.finish(pick)
    assert router.num_in_flight("a") == 0


def test_a_replica_that_returns_is_empty_and_has_new_tickets() -> None:
    router = make_router("a", "b")
    router.apply_events("a", [stored_page(*HASHES)], 0.0)
    lost = route(router)
    router.speculative.add("a", [1], 0.0)
    router.on_replica_down("a", 1.0)
    assert len(router.speculative) == 0
    assert {route(router, prompt_of(number)).replica for number in range(3)} == {"b"}
    assert (router.rank_of("a"), router.num_in_flight("a")) == (None, 0)
    router.on_load_report("a", LoadSnapshot(num_total_tokens=10**6), 1.0)
    router.apply_events("a", [stored_page(*HASHES)], 1.0)
    router.on_events("a", b"\xc1", 1.0)
    router.on_replica_up("a", 2.0)
    pick = route(router)
    assert (pick.replica, pick.device_blocks, pick.ticket == lost.ticket) == ("a", 0, False)
    router.finish(lost)
    assert router.num_in_flight("a") == 1


def test_numbers_in_the_view_are_used_again() -> None:
    router = make_router(*range(3))
    for _ in range(5):
        router.on_replica_down(1, 0.0)
        router.on_replica_up(1, 0.0)
        router.on_replica_up(0, 0.0)
    assert sorted(router.rank_of(each) or 0 for each in range(3)) == [0, 1, 2]
    assert len(router.view.ranks) <= 3


def test_sessions_reach_the_picker() -> None:
    router = make_router(picker=StickySessions())
    first = route(router, session="s")
    assert {route(router, prompt_of(number), session="s").replica for number in range(4)} == {first.replica}


def test_the_session_of_a_simulated_request_is_its_conversation() -> None:
    router = make_router(0, 1, 2, picker=StickySessions())
    requests = [
        SimulatedRequest(
            TraceRequest(index=index, arrival_s=0, input_length=600, output_length=1, hash_ids=(index, conversation))
        )
        for index, conversation in enumerate((7, 8, 7, 7, 8))
    ]
    assert [router.route(each, 0.0) for each in requests] == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("setting", [{"page_size": 0}, {"page_size": 4, "name": "\n"}])
def test_a_wrong_setting_is_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        KvRouter(**setting)  # type: ignore[arg-type]


@pytest.mark.parametrize("picker", ["least-cost", "softmax"])
def test_a_seed_repeats_all_picks(picker: str) -> None:
    def picks() -> list[int | str]:
        chosen = {} if picker == "least-cost" else {"picker": Softmax(rng=random.Random(9))}
        router = make_router(*range(5), **chosen)
        rng, found = random.Random(4), []
        for number in range(60):
            pick = route(router, prompt_of(rng.randrange(8)), number / 10)
            found.append(pick.replica)
            if rng.random() < 0.5:
                router.finish(pick)
            if rng.random() < 0.3:
                router.apply_events(pick.replica, [stored_page(*pick.block_hashes)], number / 10)
        return found

    assert picks() == picks()


# A tree of blocks: block n is below block n // 2, so the chain of a block is its path from the root.
CHAINS = st.integers(1, 60).map(lambda leaf: [leaf >> shift for shift in range(leaf.bit_length() - 1, -1, -1)])
CHANGES = st.lists(st.tuples(st.integers(0, 3), CHAINS, st.booleans()), max_size=25)


@pytest.mark.skipif(not has_dynamo(), reason="ai-dynamo-runtime is not installed")
@given(CHANGES, st.lists(CHAINS, min_size=1, max_size=6))
@settings(max_examples=60)
def test_overlaps_equal_those_of_dynamo(changes: list[tuple[int, list[int], bool]], prompts: list[list[int]]) -> None:
    router, tree = make_router(*range(4)), DynamoTree()
    held: dict[int, set[int]] = {worker: set() for worker in range(4)}
    for worker, chain, is_stored in changes:
        if is_stored:
            for parent, block in zip([None, *chain], chain, strict=False):
                router.apply_events(worker, [stored(block, parent=parent)], 0.0)
                tree.store(worker, [block], parent)
            held[worker] |= set(chain)
        elif chain[-1] in held[worker] and not held[worker] & {2 * chain[-1], 2 * chain[-1] + 1}:
            router.apply_events(worker, [removed_run(chain[-1], 1)], 0.0)
            tree.remove(worker, [chain[-1]])
            held[worker].discard(chain[-1])
    for prompt in prompts:
        found = {
            int(str(worker[0] if isinstance(worker, tuple) else worker)): depth
            for worker, depth in tree.match_lengths(prompt).items()
        }
        ours = [blocks[0] for blocks in router.overlaps(range(4), prompt, now_s=0.0)]
        assert ours == [found.get(worker, 0) for worker in range(4)]


class OneByOne:
    """The rule of a pick, without what makes it fast: each replica alone, its costs term by term."""

    def __init__(self, model: RoutingCostModel) -> None:
        self.model = model
        self.blocks: dict[int, dict[Tier, set[int]]] = {}
        self.sent: dict[int, dict[int, float]] = {}
        self.reported: dict[int, tuple[int, int]] = {}
        self.unreported: dict[int, dict[int, tuple[int, int]]] = {}
        self.num_dispatched: dict[int, int] = {}

    def overlap(self, replica: int, hashes: tuple[int, ...], now_s: float) -> tuple[int, int, int]:
        blocks, depth, ends = self.blocks[replica], 0, []
        sent = {block for block, expiry_s in self.sent[replica].items() if expiry_s > now_s}
        for held in (blocks[Tier.DEVICE] | sent, blocks[Tier.HOST], blocks[Tier.STORAGE]):
            while depth < len(hashes) and hashes[depth] in held:
                depth += 1
            ends.append(depth)
        return ends[0], ends[1] - ends[0], ends[2] - ends[1]

    def cost(self, replica: int, overlap: tuple[int, int, int], num_tokens: int) -> float:
        model, unreported = self.model, self.unreported[replica].values()
        device, host, storage = overlap
        uncached = max(0.0, num_tokens / PAGE - (device + model.host_weight * host + model.storage_weight * storage))
        queued, held = self.reported[replica]
        queued, held = queued + sum(each for each, _ in unreported), held + sum(each for _, each in unreported)
        return model.prefill_weight * uncached + (model.queue_weight * queued + model.decode_weight * held) / PAGE

    def pick(self, names: list[int], prompt: tuple[int, ...], now_s: float) -> tuple[int, tuple[int, int, int], float]:
        hashes = hash_pages(prompt, PAGE)
        overlaps = {name: self.overlap(name, hashes, now_s) for name in names}
        costs = {name: self.cost(name, overlaps[name], len(prompt)) for name in names}
        best = min(names, key=lambda name: (costs[name], self.num_dispatched[name]))
        return best, overlaps[best], costs[best]


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["route", "route", "route", "store", "remove", "report", "finish", "cancel", "down", "wait"]),
        st.integers(0, 3),
        st.integers(0, 5),
        st.sampled_from([("GPU", Tier.DEVICE), ("CPU", Tier.HOST), ("STORAGE", Tier.STORAGE)]),
    ),
    max_size=30,
)


@given(ACTS, st.sampled_from([RoutingCostModel(), RoutingCostModel(prefill_weight=0.5, queue_weight=4.0)]))
@settings(max_examples=60)
def test_each_pick_is_that_of_the_rule_for_one_replica_after_the_other(
    acts: list[tuple[str, int, int, tuple[str, Tier]]], model: RoutingCostModel
) -> None:
    """The same replica, blocks and cost, over any history of events, reports, requests and failures."""
    router, rule, now_s, open_picks = make_router(*range(4), cost_model=model), OneByOne(model), 0.0, list[Pick]()

    def come_up(name: int) -> None:
        rule.blocks[name], rule.sent[name], rule.unreported[name] = {tier: set() for tier in Tier}, {}, {}
        rule.reported.pop(name, None)  # the last one that came up is the last of equal ones
        rule.reported[name], rule.num_dispatched[name] = (0, 0), 0

    for name in range(4):
        come_up(name)
    for number, (act, name, size, (medium, tier)) in enumerate(acts, start=1):
        prompt = prompt_of(size % 2, size)
        hashes = hash_pages(prompt, PAGE)
        if act == "route":
            pick = route(router, (*prompt, 7), now_s)
            expected = rule.pick(list(rule.reported), (*prompt, 7), now_s)
            assert (pick.replica, (pick.device_blocks, pick.host_blocks, pick.storage_blocks), pick.cost) == expected
            uncached = model.uncached_blocks((len(prompt) + 1) / PAGE, expected[1])
            rule.unreported[expected[0]][pick.ticket[1]] = (round(uncached * PAGE), len(prompt) + 1)
            rule.num_dispatched[expected[0]] += 1
            rule.sent[expected[0]] |= dict.fromkeys(hashes[pick.device_blocks :], now_s + 10.0)
            open_picks.append(pick)
        elif act in ("store", "remove") and size:
            if act == "store":
                router.apply_events(name, [stored_page(*hashes, medium=medium)], now_s)
                rule.blocks[name][tier] |= set(hashes)
            else:
                router.apply_events(name, [BlockRemoved(hashes, medium)], now_s)
                rule.blocks[name][tier] -= set(hashes)
            if tier is Tier.DEVICE:
                rule.sent[name] = {block: at_s for block, at_s in rule.sent[name].items() if block not in hashes}
        elif act == "report":
            load = LoadSnapshot(sequence=number, num_waiting_uncached_tokens=size, num_total_tokens=3 * size)
            router.on_load_report(name, load, now_s)
            rule.reported[name] = (size, 3 * size)
        elif act in ("finish", "cancel") and open_picks:
            pick = open_picks.pop(size % len(open_picks))
            (router.finish if act == "finish" else router.cancel)(pick)
            assert isinstance(pick.replica, int)
            rule.unreported[pick.replica].pop(pick.ticket[1], None)
            if act == "cancel":
                for block in pick.block_hashes[pick.device_blocks :]:
                    rule.sent[pick.replica].pop(block, None)
        elif act == "down":
            router.on_replica_up(name, now_s)
            open_picks = [pick for pick in open_picks if pick.replica != name]
            come_up(name)
        elif act == "wait":
            now_s += 4.0


def test_the_adapters_that_clients_name_are_bounded() -> None:
    router = KvRouter(page_size=4)
    router.on_replica_up(0, 0.0)
    for number in range(5000):
        router.route_tokens((), now_s=0.0, lora=f"a{number}")
    [known] = router._known.values()
    assert len(known.sent_adapters) == 4096
    assert known.has_adapter("a4999")


def test_a_name_that_is_too_long_for_a_load_report_is_refused_at_the_start() -> None:
    KvRouter(page_size=4, name="x" * 52).on_replica_up(0, 0.0)
    with pytest.raises(ConfigError, match="name"):
        KvRouter(page_size=4, name="x" * 64)
