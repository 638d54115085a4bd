"""Preparations: what is moved closer for a request before it runs. Storage to host first, then host to device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_components.cache.block_hash import pack_tokens
from scheduler_components.cache.namespace import PLAIN_NAMESPACE, PrefixNamespace
from scheduler_components.hicache.device_loads import Load
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.hicache.storage_reads import Prefetch
from scheduler_components.hicache.transfers import TierTransfers

__all__ = ["Preparations"]


@dataclass(slots=True, kw_only=True)
class _Preparation:
    """One request's."""

    prefetch: Prefetch | None = None
    load: Load | None = None
    num_loaded_pages: int = 0
    has_given_up: bool = False


@dataclass(slots=True, kw_only=True)
class Preparations:
    """The requests that wait, and what is under way for them. Calls and their order decide everything.

    Attributes:
        transfers: moves the pages.
        policy: when to stop a prefetch, and what is worth a load.
    """

    transfers: TierTransfers
    policy: HiCachePolicy
    _by_rid: dict[str, _Preparation] = field(default_factory=dict, init=False)

    def expect(self, rid: str, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> None:
        """A request has come that will match ``token_ids``: begin to read from storage what no nearer tier has."""
        namespace, packed = namespace or PLAIN_NAMESPACE, pack_tokens(token_ids)
        tiers, transfers = self.transfers.tiers, self.transfers
        path = tiers.path_to(packed, namespace.seed())
        if transfers.reads.is_worth_it(packed, path):
            # What is read can only hang below a prefix that is on the host.
            transfers.writes.write_path(path[: tiers.num_on_device(path)])
            self._by_rid[rid] = _Preparation(prefetch=transfers.reads.begin(packed, namespace, path))

    def is_ready(
        self, rid: str, token_ids: Sequence[int], namespace: PrefixNamespace | None = None, *, is_next: bool = True
    ) -> bool:
        """Say whether a request need not wait for pages, and begin to bring them closer. Ask at every step.

        Args:
            rid, token_ids, namespace: as ``expect`` was told; a request that it was not told of only waits for loads.
            is_next: it is this request's turn; under ``best_effort`` its prefetch stops with what has landed.
        """
        preparation = self._by_rid.setdefault(rid, _Preparation())
        prefetch, load = preparation.prefetch, preparation.load
        if prefetch is not None and prefetch.num_landed is None:
            if is_next and self.policy.prefetch == "best_effort":
                self.transfers.reads.stop(prefetch)
            return False
        if load is not None:
            if not load.is_settled:
                return False
            preparation.has_given_up = preparation.has_given_up or load.has_failed
        return preparation.has_given_up or not self._begin_load(preparation, token_ids, namespace or PLAIN_NAMESPACE)

    def forget(self, rid: str) -> None:
        """A request is gone before it ran: nothing is brought closer for it any more."""
        preparation = self._by_rid.pop(rid, _Preparation())
        if preparation.prefetch is not None and preparation.prefetch.num_landed is None:
            self.transfers.reads.cancel(preparation.prefetch)

    def book_admission(self, rid: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        """A request begins to run: count where its prompt was found."""
        preparation = self._by_rid.get(rid, _Preparation())
        num_read_pages = preparation.prefetch.num_landed or 0 if preparation.prefetch is not None else 0
        page_size = self.transfers.tiers.tree.page_size
        self.transfers.stats.book_admission(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            loaded_tokens=preparation.num_loaded_pages * page_size,
            read_tokens=num_read_pages * page_size,
        )
        self.forget(rid)

    def _begin_load(self, preparation: _Preparation, token_ids: Sequence[int], namespace: PrefixNamespace) -> bool:
        """Begin to load what of the prompt is on the host alone, or wait for room to; False when nothing is to do."""
        tiers, loads = self.transfers.tiers, self.transfers.loads
        path = tiers.path_to(pack_tokens(token_ids), namespace.seed())
        num_pages = sum(node.num_pages for node in path[tiers.num_on_device(path) :])
        # A request loads no more in all than its prompt has, so that two that evict each other's pages come to an end.
        num_left = len(token_ids) // tiers.tree.page_size - preparation.num_loaded_pages
        if min(num_pages, num_left) < self.policy.load_threshold_pages:
            return False
        if loads.room_pages < self.policy.load_threshold_pages:
            # Loads that are under way will give room back; otherwise nobody will.
            preparation.has_given_up = loads.is_idle
            return not preparation.has_given_up
        load = loads.begin(path, num_left)
        if load is None:
            # Who holds the device's pages will give them back, and without them the request could not run either.
            preparation.has_given_up = not tiers.num_device_pages_held
            return not preparation.has_given_up
        preparation.load = load
        preparation.num_loaded_pages += len(load.device_pages)
        return True
