"""The tree over three tiers: what evictions keep, what splits take along, and how its check finds what is wrong."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from scheduler_components import CacheIntegrityError
from scheduler_components.cache import DEFAULT_NAMESPACE, RadixNode
from scheduler_components.cache.block_hash import pack_tokens
from scheduler_components.events import Tier
from scheduler_components.hicache.tiers import TierTree
from scheduler_engine.device.hicache_sim import SimulatedHostPages


@pytest.fixture
def tiers() -> TierTree:
    """Eight device pages of one token, eight host pages."""
    host = SimulatedHostPages(8, rng=random.Random(0), failure=0.0)
    return TierTree(page_size=1, capacity_tokens=8, host=host, num_host_pages=8, record=True)


def compute(tiers: TierTree, tokens: list[int]) -> RadixNode:
    path = tiers.match_path(pack_tokens(tokens), b"")
    cached = tiers.device.match_from_path(path[: tiers.num_on_device(path)]).pages
    return tiers.device.insert(tokens, [*cached, *tiers.device.allocate(len(tokens) - len(cached))]).node


def copy_to_host(tiers: TierTree, node: RadixNode) -> None:
    pages = tiers.host.pages.reserve(node.num_pages)
    tiers.host.pages.commit(pages)
    tiers.host.num_pages_used += node.num_pages
    tiers.membership.place_on_host(node, array("I", pages))


def test_eviction_drops_nodes_without_a_host_copy(tiers: TierTree) -> None:
    kept, dropped = compute(tiers, [1, 2, 3]), compute(tiers, [7, 8])
    copy_to_host(tiers, kept)
    tiers.check()
    assert tiers.device.evict(5) == 5
    tiers.check()
    assert (tiers.num_dropped_pages, dropped.parent) == (2, None)
    assert tiers.membership.tiers_of(kept) == (Tier.HOST,)
    assert list(tiers.host.order) == [kept]
    compute(tiers, [9])
    assert tiers.device.evict(1) == 1
    assert tiers.num_dropped_pages == 3


def test_nothing_is_left_on_any_tier_after_a_clear(tiers: TierTree) -> None:
    for tokens in ([1, 2, 3], [7, 8]):
        node = compute(tiers, tokens)
        copy_to_host(tiers, node)
        tiers.membership.place_in_storage(node)
    tiers.clear()
    tiers.check()
    assert (tiers.membership.digest, tiers.membership.num_pages) == (0, dict.fromkeys(Tier, 0))
    assert tiers.host.num_pages_free == 8
    assert compute(tiers, [1, 2, 3]).num_pages == 3
    tiers.check()


def test_a_dropped_node_no_longer_counts_as_stored(tiers: TierTree) -> None:
    node = compute(tiers, [1, 2])
    tiers.membership.place_in_storage(node)
    tiers.device.evict(2)
    tiers.check()
    assert not tiers.membership.stored


def test_both_parts_of_a_split_are_on_the_tiers_of_the_run(tiers: TierTree) -> None:
    run = compute(tiers, [1, 2, 3])
    copy_to_host(tiers, run)
    tiers.membership.place_in_storage(run)
    tiers.writing.add(run)
    tiers.backing_up.add(run)
    host_pages, digest = tiers.membership.host_pages[run].tolist(), tiers.membership.digest
    upper = tiers.device.split(run, 1)
    assert [tiers.membership.host_pages[node].tolist() for node in (upper, run)] == [host_pages[:1], host_pages[1:]]
    assert tiers.membership.tiers_of(upper) == tiers.membership.tiers_of(run) == tuple(Tier)
    assert tiers.writing == tiers.backing_up == {upper, run}
    assert tiers.membership.digest == digest
    tiers.check()


def test_a_full_host_evicts_its_oldest_leaf_and_no_more_than_is_needed(tiers: TierTree) -> None:
    old, young = compute(tiers, [1, 2, 3, 4]), compute(tiers, [5, 6, 7, 8])
    for node in (old, young):
        copy_to_host(tiers, node)
    assert not tiers.evict_host(1), "all that the host has is on the device too"
    tiers.device.evict(8)
    assert tiers.evict_host(1)
    tiers.check()
    assert (tiers.host.num_pages_free, old.parent) == (1, None)
    assert [node.num_pages for node in tiers.match_path(pack_tokens([1, 2, 3, 4]), b"")] == [3]
    assert tiers.membership.tiers_of(young) == (Tier.HOST,)


def test_all_evictable_pages_can_be_evicted(tiers: TierTree) -> None:
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        copy_to_host(tiers, compute(tiers, tokens))
    tiers.device.evict(8)
    assert not tiers.evict_host(9)
    assert tiers.evict_host(8)
    tiers.check()


def test_a_recomputed_node_is_not_evicted_from_the_host(tiers: TierTree) -> None:
    node = compute(tiers, [1, 2])
    copy_to_host(tiers, node)
    tiers.device.evict(2)
    assert list(tiers.host.order) == [node]
    assert compute(tiers, [1, 2]) is node
    tiers.check()
    assert tiers.membership.tiers_of(node) == (Tier.DEVICE, Tier.HOST)
    assert list(tiers.host.order) == []


def test_locked_host_pages_are_not_evicted(tiers: TierTree) -> None:
    node = compute(tiers, [1, 2])
    copy_to_host(tiers, node)
    tiers.host.lock(tiers.tree.path_to_root(node))
    tiers.device.evict(2)
    assert not tiers.evict_host(7)
    tiers.host.unlock(tiers.tree.path_to_root(node))
    tiers.check()
    assert tiers.evict_host(7)


def orphan_on_host(tiers: TierTree) -> None:
    parent = compute(tiers, [1, 2])
    tiers.insert_on_host(parent, pack_tokens([3]), array("I", reserved(tiers)), DEFAULT_NAMESPACE)
    tiers.touch(tiers.tree.path_to_root(parent)[::-1])


def reserved(tiers: TierTree) -> list[int]:
    pages = tiers.host.pages.reserve(1)
    tiers.host.pages.commit(pages)
    return pages


def lose_host_page(tiers: TierTree) -> None:
    node = compute(tiers, [1, 2])
    copy_to_host(tiers, node)
    tiers.host.pages.release([tiers.membership.host_pages[node].pop()])


def miscount(tiers: TierTree) -> None:
    compute(tiers, [1, 2])
    tiers.membership.num_pages[Tier.DEVICE] += 1


def misdigest(tiers: TierTree) -> None:
    compute(tiers, [1, 2])
    tiers.membership.digest ^= 1


def lock_a_child_alone(tiers: TierTree) -> None:
    child = compute(tiers, [9, 9, 1])
    copy_to_host(tiers, child.parent)
    copy_to_host(tiers, child)
    tiers.host.lock([child])


def leave_no_tier(tiers: TierTree) -> None:
    node = compute(tiers, [1, 2])
    copy_to_host(tiers, node)
    tiers.device.evict(4)
    tiers.host.order.discard(node)
    tiers.host.pages.release(tiers.membership.remove_from_host(node))


DAMAGES: dict[str, tuple[Callable[[TierTree], object], str]] = {
    "a child on the host below a parent that is not": (orphan_on_host, "in the eviction order|its parent is not"),
    "a stored node below one that is not": (
        lambda tiers: tiers.membership.stored.add(compute(tiers, [9, 9, 1])),
        "is stored, its parent is not",
    ),
    "a node that left the tree": (lambda tiers: tiers.writing.add(RadixNode()), "a node that is not in the tree"),
    "a host page too few": (lose_host_page, "not committed|cached|one host page per page"),
    "a page too many": (miscount, "3 pages on DEVICE, but its nodes have 2|5 pages on DEVICE, but its nodes have 4"),
    "another digest": (misdigest, "but that of the nodes is"),
    "a lock below none": (lock_a_child_alone, "has fewer host locks than its children"),
    "a node that no tier has": (leave_no_tier, "is neither on the device nor on the host|eviction order"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_full_check_finds_each_damage(tiers: TierTree, name: str) -> None:
    damage, message = DAMAGES[name]
    compute(tiers, [9, 9])
    tiers.check()
    damage(tiers)
    with pytest.raises(CacheIntegrityError, match=message):
        tiers.check()
