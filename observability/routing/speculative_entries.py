"""SpeculativeEntries: blocks that were sent to a replica and that its events have not reported yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass, field

from observability.routing.cost_model import ReplicaId
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from scheduler_components._internal.validators import check_integer, check_number
from scheduler_components.events import FULL_ATTENTION_KINDS, REMOTE, Tier, medium_tier

__all__ = ["SpeculativeEntries"]


@dataclass(slots=True, kw_only=True)
class SpeculativeEntries:
    """Blocks that count as cached on a replica, because a request with them was sent there.

    Events come late: after the queue, the prefill and the network. Without these entries, all requests of a new prompt
    that arrive in the meantime look uncached everywhere, and are spread over all replicas. An entry ends when an event
    names its block, when it expires, or when the replica has too many.

    Attributes:
        ttl_s: after the block was sent. Longer than a request usually waits, or entries end too early.
        max_blocks_per_replica: the oldest entries are dropped beyond it.
        num_expired: entries whose time was over. They are removed when the next ones of their replica are added.
        num_dropped: entries beyond the limit.

    Raises:
        ConfigError: a size or a time is invalid.
    """

    ttl_s: float = 10.0
    max_blocks_per_replica: int = 1 << 15
    num_expired: int = field(default=0, init=False)
    num_dropped: int = field(default=0, init=False)
    _expiries: dict[ReplicaId, OrderedDict[int, float]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("ttl_s", self.ttl_s)
        check_integer("max_blocks_per_replica", self.max_blocks_per_replica)

    def __len__(self) -> int:
        return sum(map(len, self._expiries.values()))

    @property
    def replicas(self) -> KeysView[ReplicaId]:
        """The replicas with entries. They change with the entries."""
        return self._expiries.keys()

    def add(self, replica: ReplicaId, hashes: Sequence[int], now_s: float) -> None:
        """Add the blocks of one prompt that were sent, root first. One that is already there expires later."""
        expiries = self._expiries.setdefault(replica, OrderedDict())
        expiry_s = now_s + self.ttl_s
        for block_hash in reversed(hashes):  # so that the end of a prefix is dropped before its beginning
            expiries[block_hash] = expiry_s
            expiries.move_to_end(block_hash)
        while expiries and next(iter(expiries.values())) <= now_s:
            expiries.popitem(last=False)
            self.num_expired += 1
        while len(expiries) > self.max_blocks_per_replica:
            expiries.popitem(last=False)
            self.num_dropped += 1
        if not expiries:
            del self._expiries[replica]

    def discard(self, replica: ReplicaId, hashes: Iterable[int]) -> None:
        """Remove blocks, because events name them or the request was not sent."""
        expiries = self._expiries.get(replica)
        if expiries:
            for block_hash in hashes:
                expiries.pop(block_hash, None)
            if not expiries:
                del self._expiries[replica]

    def on_events(self, replica: ReplicaId, events: Iterable[KVCacheEvent]) -> None:
        """Remove the blocks that a replica stored or removed on its device: from now on the view knows more."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clear(replica)
            elif isinstance(event, BlockStored | BlockRemoved) and _is_on_device(event):
                self.discard(replica, event.block_hashes)

    def clear(self, replica: ReplicaId) -> None:
        """Remove all blocks of a replica."""
        self._expiries.pop(replica, None)

    def extend(self, replica: ReplicaId, hashes: Sequence[int], depth: int, now_s: float) -> int:
        """Return how far a prefix that is cached up to ``depth`` blocks goes on in the entries of a replica."""
        expiries = self._expiries.get(replica)
        if expiries:
            while depth < len(hashes) and expiries.get(hashes[depth], now_s) > now_s:
                depth += 1
        return depth


def _is_on_device(event: BlockStored | BlockRemoved) -> bool:
    if event.locality == REMOTE or medium_tier(event.medium) != Tier.DEVICE:
        return False
    return isinstance(event, BlockRemoved) or event.kv_cache_spec_kind in FULL_ATTENTION_KINDS
