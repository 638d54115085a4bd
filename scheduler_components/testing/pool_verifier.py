"""Compare a stream with the pool itself: batches and readings in, differences out. It does no I/O.

No rule of the wire finds a missing event: a stream without a necessary removal is as well-formed as one with it. Only a
reading of the pool (``HeldBlocksSource``) shows the difference.

The engine need not be idle. A reading names the last batch before it, so the verifier applies the stream up to that
number and compares. Readings in the order of their numbers bound each difference: at the previous reading, pool and
stream agreed on the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import msgspec

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, ConfigError, KVCacheEvent
from scheduler_components.events import MediumGroup, medium_group
from scheduler_components.values import KvPoolSnapshot

__all__ = ["PoolDifference", "PoolVerifier"]

_REMOTE = "REMOTE"  # vLLM publishes it for blocks of another worker.


class PoolDifference(msgspec.Struct, frozen=True):
    """One block on which stream and pool differ; ``str`` gives a sentence.

    Attributes:
        rule: ``pool-missing``: the pool holds the block and the stream does not; ``pool-extra``: the reverse.
        block_hash, place: the block.
        reported_by: number of the last batch with the block; None if no batch has it, or only a snapshot.
        since: number of the first batch that can be wrong; one above ``found_at`` if a batch is missing.
        found_at: number of the reading.
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
            cause = "no batch stored it" if self.reported_by is None else f"batch {self.reported_by} removed it"
            differ = f"the pool holds it and {cause}"
        else:
            cause = "the stream stored it" if self.reported_by is None else f"batch {self.reported_by} stored it"
            differ = f"{cause} and the pool does not hold it"
        return f"block {self.block_hash} on {where}: {differ}; {self._when()}"

    def _when(self) -> str:
        if self.since > self.found_at:
            return f"a batch is missing after {self.found_at}" if self.found_at >= 0 else "no batch was ever sent"
        if self.since == self.found_at:
            return f"wrong since batch {self.since}"
        return f"wrong since one of the batches {self.since} to {self.found_at}"


class PoolVerifier:
    """Applies batches in the order of their numbers, and compares readings with the resulting blocks.

    A difference is reported at its first reading, and again only after a reading without it.

    Args:
        is_complete: the batches begin with an empty cache. Otherwise a block without any event is not reported as
            missing, until an AllBlocksCleared.

    Attributes:
        num_compared: compared blocks, each once per reading.
    """

    __slots__ = ("_agreed_at", "_cleared_by", "_held", "_is_complete", "_reported_by", "_sequence", "_wrong",
                 "num_compared")  # fmt: skip

    def __init__(self, *, is_complete: bool = True) -> None:
        self.num_compared = 0
        self._is_complete = is_complete
        self._held: dict[MediumGroup, set[int]] = {}
        self._reported_by: dict[tuple[MediumGroup, int], int | None] = {}
        self._cleared_by: int | None = None
        self._wrong: set[tuple[str, MediumGroup, int]] = set()
        self._agreed_at: dict[MediumGroup, int] = {}
        self._sequence = -1

    def apply(self, sequence: int, events: Iterable[KVCacheEvent], *, is_snapshot: bool = False) -> None:
        """Apply one batch; ``is_snapshot``: it is part of a snapshot, whose numbers are not those of its events."""
        self._sequence = sequence
        reported_by = None if is_snapshot else sequence
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._reset()
                self._is_complete, self._cleared_by = True, reported_by
            elif isinstance(event, BlockStored | BlockRemoved) and event.locality != _REMOTE:
                place = medium_group(event.medium, event.group_idx)
                held = self._held.setdefault(place, set())
                (held.update if isinstance(event, BlockStored) else held.difference_update)(event.block_hashes)
                self._reported_by.update(dict.fromkeys(((place, each) for each in event.block_hashes), reported_by))

    def mark_lost(self) -> None:
        """Record a loss of batches: only later events can be compared."""
        self._reset()
        self._is_complete, self._cleared_by = False, None

    def compare(self, reading: KvPoolSnapshot) -> list[PoolDifference]:
        """Return the new differences since the last reading, in the places of this reading.

        Differences with the fewest possible causes come first.

        Raises:
            ConfigError: the reading's number is unknown, or below that of the last applied batch.
        """
        found_at = reading.sequence
        if found_at is None:
            raise ConfigError(
                "sequence", None, "does not name the last batch", "use two equal readings around a silence"
            )
        if found_at < self._sequence:
            hint = f"compare it before you apply batch {self._sequence}"
            raise ConfigError("sequence", found_at, "belongs to a reading before the last batch", hint)
        return [each for place, held in reading.blocks.items() for each in self._compare(place, set(held), found_at)]

    def _compare(self, place: MediumGroup, pool: Set[int], found_at: int) -> Iterator[PoolDifference]:
        published = self._held.get(place, set())
        self.num_compared += len(pool | published)
        differing = {("pool-missing", place, each) for each in pool - published if self._can_miss(place, each)}
        differing |= {("pool-extra", place, each) for each in published - pool}
        known = {each for each in self._wrong if each[1] == place}
        first = self._agreed_at.get(place, -1) + 1
        found = []
        for rule, _, block_hash in differing - known:
            reported_by = self._reported_by.get((place, block_hash), self._cleared_by)
            since = first if reported_by is None else max(first, reported_by)
            found.append(PoolDifference(rule, block_hash, place, reported_by, since, found_at))
        yield from sorted(found, key=lambda each: (-each.since, each.rule, each.block_hash))
        self._wrong = (self._wrong - known) | differing
        self._agreed_at[place] = found_at

    def _can_miss(self, place: MediumGroup, block_hash: int) -> bool:
        return self._is_complete or (place, block_hash) in self._reported_by

    def _reset(self) -> None:
        self._held.clear()
        self._reported_by.clear()
