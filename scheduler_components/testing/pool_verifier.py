"""Compares what a stream told with what the pool really holds. Pure: batches and readings in, differences out.

No rule of the wire finds a publisher that forgets: a stream without a removal that should be there is as well-formed as
one with it. Whoever can read the pool itself (``HeldBlocksSource``) can tell.

Nothing has to stand still for it. A reading names the last batch that tells of changes before it, so the judge applies
the stream up to that number and compares. Readings in the order of their numbers bound each difference: the pool and
the stream still agreed on the block at the reading before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import msgspec

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, ConfigError, KVCacheEvent
from scheduler_components.events import MediumGroup, medium_group
from scheduler_components.values import KvPoolSnapshot

__all__ = ["PoolDifference", "PoolVerifier"]

_REMOTE = "REMOTE"  # told by vLLM of blocks that another worker holds


class PoolDifference(msgspec.Struct, frozen=True):
    """One block on which stream and pool differ; as text, a sentence.

    Attributes:
        rule: ``pool-missing``: the pool holds it and the stream does not say so; ``pool-extra``: the other way round.
        block_hash, place: the block.
        reported_by: number of the last batch that spoke of the block there; None when none did, or when only a folded
            base did, which does not say which.
        since: number of the first batch that can be wrong. One above ``found_at`` when none was sent where one was due.
        found_at: number of the reading that found it.
    """

    rule: str
    block_hash: int
    place: MediumGroup
    reported_by: int | None
    since: int
    found_at: int

    def __str__(self) -> str:
        medium, group = self.place
        where = medium if group is None else f"{medium}, group {group}"
        if self.rule == "pool-missing":
            told = "no batch stored it" if self.reported_by is None else f"batch {self.reported_by} removed it"
            differ = f"the pool holds it and {told}"
        else:
            told = "the stream stored it" if self.reported_by is None else f"batch {self.reported_by} stored it"
            differ = f"{told} and the pool does not hold it"
        return f"block {self.block_hash} on {where}: {differ}; {self._when()}"

    def _when(self) -> str:
        if self.since > self.found_at:
            return f"a batch is missing after {self.found_at}" if self.found_at >= 0 else "no batch was ever sent"
        if self.since == self.found_at:
            return f"wrong since batch {self.since}"
        return f"wrong since one of the batches {self.since} to {self.found_at}"


class PoolVerifier:
    """Applies batches in the order of their numbers, and compares readings with what they add up to.

    A block is reported when a reading first finds it wrong, and again only after one that found it right.

    Args:
        is_complete: the batches begin where the cache was empty. Otherwise a block that was never spoken of is not
            missed, until an AllBlocksCleared says that nothing else stands.

    Attributes:
        num_compared: blocks compared so far, each once per reading.
    """

    __slots__ = ("_agreed_at", "_cleared_by", "_held", "_is_complete", "_sequence", "_told_by", "_wrong",
                 "num_compared")  # fmt: skip

    def __init__(self, *, is_complete: bool = True) -> None:
        self.num_compared = 0
        self._is_complete = is_complete
        self._held: dict[MediumGroup, set[int]] = {}
        self._told_by: dict[tuple[MediumGroup, int], int | None] = {}
        self._cleared_by: int | None = None
        self._wrong: set[tuple[str, MediumGroup, int]] = set()
        self._agreed_at: dict[MediumGroup, int] = {}
        self._sequence = -1

    def apply(self, sequence: int, events: Iterable[KVCacheEvent], *, is_base: bool = False) -> None:
        """Apply one batch; ``is_base``: it is part of a folded base, whose numbers are not those of its events."""
        self._sequence = sequence
        reported_by = None if is_base else sequence
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._forget()
                self._is_complete, self._cleared_by = True, reported_by
            elif isinstance(event, BlockStored | BlockRemoved) and event.locality != _REMOTE:
                place = medium_group(event.medium, event.group_idx)
                held = self._held.setdefault(place, set())
                (held.update if isinstance(event, BlockStored) else held.difference_update)(event.block_hashes)
                self._told_by.update(dict.fromkeys(((place, each) for each in event.block_hashes), reported_by))

    def mark_lost(self) -> None:
        """Batches were lost here: only what is told from here on can be compared."""
        self._forget()
        self._is_complete, self._cleared_by = False, None

    def compare(self, reading: KvPoolSnapshot) -> list[PoolDifference]:
        """Return what has become wrong since the last reading, in the places that this one names.

        Those of which the least batches can be to blame come first.

        Raises:
            ConfigError: the reading's number is unknown, or below that of the last batch applied.
        """
        found_at = reading.sequence
        if found_at is None:
            raise ConfigError("sequence", None, "says not where the stream stood", "read between two quiet moments")
        if found_at < self._sequence:
            hint = f"compare before batch {self._sequence} is applied"
            raise ConfigError("sequence", found_at, "is of a reading before the last batch", hint)
        return [each for place, held in reading.blocks.items() for each in self._compare(place, set(held), found_at)]

    def _compare(self, place: MediumGroup, pool: Set[int], found_at: int) -> Iterator[PoolDifference]:
        told = self._held.get(place, set())
        self.num_compared += len(pool | told)
        differing = {("pool-missing", place, each) for each in pool - told if self._can_miss(place, each)}
        differing |= {("pool-extra", place, each) for each in told - pool}
        known = {each for each in self._wrong if each[1] == place}
        first = self._agreed_at.get(place, -1) + 1
        found = []
        for rule, _, block_hash in differing - known:
            reported_by = self._told_by.get((place, block_hash), self._cleared_by)
            since = first if reported_by is None else max(first, reported_by)
            found.append(PoolDifference(rule, block_hash, place, reported_by, since, found_at))
        yield from sorted(found, key=lambda each: (-each.since, each.rule, each.block_hash))
        self._wrong = (self._wrong - known) | differing
        self._agreed_at[place] = found_at

    def _can_miss(self, place: MediumGroup, block_hash: int) -> bool:
        return self._is_complete or (place, block_hash) in self._told_by

    def _forget(self) -> None:
        self._held.clear()
        self._told_by.clear()
