"""What must be true of every pool at every moment between two steps, and who breaks it. Pure: facts in, problems out.

1. **Counts.** available + evictable + protected + held by sessions + uncached of requests + in transfer = total, idle
   and busy; and each term is what the lists say. A pool of request slots is a pool: free + held = size.
2. **Places.** Every page is in one place: once in the free list, or in one node of the tree, or of one holder. A page
   in none is *lost*, one in two is *owned twice* or *owned and free*. What a holder uses of the cache is in the tree.
3. **Locks.** The locks of each node of the tree are the holders whose prefix ends in it or below it.
4. **Told.** The blocks that the events add up to are those that the cache holds.

Counts are cheap and say that something is wrong. The census looks at every page and says what, whose, and with a ledger
of owners since when: who gave a page that is free and owned, who took one that nobody has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias, cast

import msgspec

from scheduler_components.ports import AuditedPool, HeldBlocksSource, OwnerTrails, TreeNode
from scheduler_components.values import AllocationRecord, PageHolding, PoolCount

__all__ = ["PoolViolation", "ViolationRule", "find_pool_violations", "find_event_violations"]

ViolationRule: TypeAlias = Literal[
    "count", "lost", "owned-and-free", "owned-twice", "free-twice", "no-such-page", "not-cached", "locks",
    "event-missing", "event-extra",
]  # fmt: skip

_CACHE = "the cache"
_MAX_SHOWN = 8
_MAX_TRAIL = 12

_BLAMED: dict[str, tuple[str, ...]] = {
    "lost": ("allocated", "freed", "cached"),
    "owned-and-free": ("freed",),
    "free-twice": ("freed",),
    "owned-twice": ("allocated", "cached"),
    "not-cached": ("unlocked", "freed", "locked"),
    "locks": ("locked", "unlocked"),
}
"""The actions that can have brought a problem about; the last of them is to blame."""


class PoolViolation(msgspec.Struct, frozen=True):
    """One broken rule of one pool; as text, a sentence.

    Attributes:
        rule: which; see the top of this file.
        pool: name of the pool, or the medium of told blocks.
        detail: the arithmetic, as a clause.
        pages: the pages, or hashes of blocks, that it is about; the lowest come first.
        holders: who holds them now.
        trail: what the ledger of owners knows of them, oldest first; its end, where it is long.
    """

    rule: ViolationRule
    pool: str
    detail: str
    pages: tuple[int, ...] = ()
    holders: tuple[str, ...] = ()
    trail: tuple[AllocationRecord, ...] = ()

    @property
    def key(self) -> tuple[str, str, object]:
        """Equal for the same problem, found twice."""
        return self.rule, self.pool, self.pages or self.detail

    @property
    def culprit(self) -> AllocationRecord | None:
        """The entry of the ledger that is to blame; None where it knows none."""
        blamed = [record for record in self.trail if record.action in _BLAMED.get(self.rule, ())]
        if self.rule == "locks":
            blamed = _unpaired(blamed, self.holders) or blamed
        return blamed[-1] if blamed else None

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.pages[:_MAX_SHOWN])) + (", ..." if len(self.pages) > _MAX_SHOWN else "")
        text = f"[{self.pool}] {self.rule}: {self.detail}" + (f": {shown}" if shown else "")
        held = f"; held by {', '.join(self.holders[:_MAX_SHOWN])}" if self.holders else ""
        return text + held + (f"; {self.culprit}" if self.culprit is not None else "")


def _unpaired(records: list[AllocationRecord], holders: Collection[str]) -> list[AllocationRecord]:
    """Of locks and unlocks, those of holders that have no lock any more and did not give back what they took."""
    balance = Counter[str]()
    for record in records:
        balance[record.holder] += 1 if record.action == "locked" else -1
    return [each for each in records if each.holder not in holders and balance[each.holder]]


def find_pool_violations(pool: AuditedPool, owners: OwnerTrails) -> list[PoolViolation]:
    """Look at every page and every lock of a pool. Costs what it holds: for idle moments and for doubts."""
    holdings, nodes = list(pool.holdings()), list(pool.tree_nodes())
    count, free = pool.count(), pool.free_pages()
    found = [
        *_problems_of_count(count, free, nodes, holdings),
        *_problems_of_places(count, free, nodes, holdings),
        *_problems_of_locks(count.name, nodes, holdings),
    ]
    return [_with_trail(problem, owners) for problem in found]


def _with_trail(problem: PoolViolation, owners: OwnerTrails) -> PoolViolation:
    if problem.rule == "count" or not problem.pages:
        return problem
    return msgspec.structs.replace(problem, trail=tuple(owners.history(problem.pool, problem.pages)[-_MAX_TRAIL:]))


def _problems_of_count(
    count: PoolCount, free: Sequence[int], nodes: Iterable[TreeNode], holdings: Iterable[PageHolding]
) -> Iterator[PoolViolation]:
    if count.num_missing:
        yield PoolViolation("count", count.name, f"{count.num_missing} pages are missing")
    listed = Counter(available=len(free))
    for node in nodes:
        listed["protected" if node.lock_count else "evictable"] += len(node.pages)
    terms = {"request": "uncached", "session": "session_held", "transfer": "in_transfer"}
    for holding in holdings:
        listed[terms[holding.kind]] += len(holding.pages)
    for term in ("available", "evictable", "protected", "session_held", "uncached", "in_transfer"):
        counted: int = getattr(count, term)
        if counted != listed[term]:
            # The difference alone: it stays what it is while the pool works, and so the problem stays the same one.
            yield PoolViolation(
                "count", count.name, f"{term} is {counted - listed[term]:+d} pages off what the lists say"
            )


def _problems_of_places(
    count: PoolCount, free: Sequence[int], nodes: Iterable[TreeNode], holdings: Sequence[PageHolding]
) -> Iterator[PoolViolation]:
    name, places = count.name, _Places(count.name)
    for node in nodes:
        places.claim(_CACHE, node.pages)
    cached = set(places.owner_of)
    for holding in holdings:
        places.claim(holding.holder, holding.pages)
    yield from places.problems
    is_free = set(free)
    if len(is_free) != len(free):
        twice = [page for page, times in Counter(free).items() if times > 1]
        yield PoolViolation(
            "free-twice", name, f"{len(twice)} pages stand in the free list more than once", _tuple(twice)
        )
    both = is_free & places.owner_of.keys()
    if both:
        holders = tuple(sorted({places.owner_of[page] for page in both}))
        yield PoolViolation("owned-and-free", name, f"{len(both)} pages are free and owned", _tuple(both), holders)
    for holding in holdings:
        if not cached.issuperset(holding.shared):
            stale = set(holding.shared) - cached
            detail = f"{len(stale)} pages that {holding.holder} uses are not in the cache"
            yield PoolViolation("not-cached", name, detail, _tuple(stale), (holding.holder,))
    pages = set(range(count.first_page, count.first_page + count.total))
    if wrong := (is_free | places.owner_of.keys()) - pages:
        yield PoolViolation("no-such-page", name, f"{len(wrong)} pages are none of this pool", _tuple(wrong))
    if lost := pages - is_free - places.owner_of.keys():
        yield PoolViolation("lost", name, f"{len(lost)} pages are neither free nor owned", _tuple(lost))


class _Places:
    """Who owns which page, as far as one owner each goes."""

    __slots__ = ("_name", "owner_of", "problems")

    def __init__(self, name: str) -> None:
        self._name = name
        self.owner_of: dict[int, str] = {}
        self.problems: list[PoolViolation] = []

    def claim(self, owner: str, pages: Sequence[int]) -> None:
        owner_of = self.owner_of
        if not owner_of.keys().isdisjoint(pages):
            both = {page for page in pages if page in owner_of}
            holders = tuple(sorted({owner, *(owner_of[page] for page in both)}))
            self._twice(f"{len(both)} pages have two owners", both, holders)
        if len(set(pages)) != len(pages):
            twice = {page for page, times in Counter(pages).items() if times > 1}
            self._twice(f"{len(twice)} pages stand twice with {owner}", twice, (owner,))
        owner_of.update(dict.fromkeys(pages, owner))

    def _twice(self, detail: str, pages: Collection[int], holders: tuple[str, ...]) -> None:
        self.problems.append(PoolViolation("owned-twice", self._name, detail, _tuple(pages), holders))


def _problems_of_locks(
    name: str, nodes: Iterable[TreeNode], holdings: Iterable[PageHolding]
) -> Iterator[PoolViolation]:
    in_tree = {id(node): node for node in nodes}
    holders_of: dict[int, list[str]] = {}
    for holding in holdings:
        node = cast("TreeNode | None", holding.node)
        if node is not None and node.parent is None and holding.shared:
            yield _not_in_tree(name, holding)
        while node is not None and node.parent is not None:
            if id(node) not in in_tree:
                yield _not_in_tree(name, holding)
                break
            holders_of.setdefault(id(node), []).append(holding.holder)
            node = node.parent
    for identity, node in in_tree.items():
        holders = holders_of.get(identity, [])
        if node.lock_count != len(holders):
            detail = f"a node has {node.lock_count} locks and {len(holders)} holders"
            yield PoolViolation("locks", name, detail, tuple(node.pages), tuple(sorted(holders)))


def _not_in_tree(name: str, holding: PageHolding) -> PoolViolation:
    detail = f"the prefix that {holding.holder} has locked is not in the tree"
    return PoolViolation("locks", name, detail, tuple(holding.shared), (holding.holder,))


def find_event_violations(told: HeldBlocksSource, held: HeldBlocksSource) -> Iterator[PoolViolation]:
    """Compare what events add up to with what the cache holds, in the places that the cache names."""
    told_blocks, held_blocks = told.held_blocks(), held.held_blocks()
    for place, hashes in held_blocks.items():
        here, said = set(hashes), set(told_blocks.get(place, ()))
        name = place[0]
        if missing := here - said:
            yield PoolViolation("event-missing", name, f"{len(missing)} cached blocks were never told", _tuple(missing))
        if extra := said - here:
            yield PoolViolation("event-extra", name, f"{len(extra)} told blocks are not cached", _tuple(extra))


def _tuple(pages: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(pages))
