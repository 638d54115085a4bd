"""PrefetchQueue: fetch the pages of waiting requests, from storage to the host, then from the host to the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_components.cache import PrefixNamespace
from scheduler_components.cache.block_hash import pack_tokens
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.hicache.transfers import LoadBack, Prefetch, TierTransfers
from scheduler_components.values import CachedTokens

__all__ = ["PrefetchQueue"]


@dataclass(slots=True, kw_only=True)
class _WaitingRequest:
    """The transfers of one waiting request."""

    prefetch: Prefetch | None = None
    load: LoadBack | None = None
    num_loaded_pages: int = 0
    skips_loads: bool = False
    is_counted: bool = False
    num_steps_since_miss: int = 0
    num_retries: int = 0


@dataclass(slots=True, kw_only=True)
class PrefetchQueue:
    """The waiting requests whose pages are fetched from storage and host.

    The result depends only on the calls and their order, which are the same on all ranks.

    Attributes:
        transfers: moves the pages.
        policy: when to stop a prefetch, and which loads are worth their transfer.
        num_look_ahead: waiting requests behind the next one whose pages are fetched already.
    """

    num_look_ahead: ClassVar[int] = 3

    transfers: TierTransfers
    policy: HiCachePolicy
    _by_rid: dict[str, _WaitingRequest] = field(default_factory=dict, init=False)

    def start(self, rid: str, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> None:
        """Begin to read the pages of a new request's ``token_ids`` that neither device nor host holds from storage."""
        prefetch = self._begin_prefetch(token_ids, namespace or self.transfers.tiers.device.namespace)
        if prefetch is not None:
            self._by_rid[rid] = _WaitingRequest(prefetch=prefetch)

    def _begin_prefetch(self, token_ids: Sequence[int], namespace: PrefixNamespace) -> Prefetch | None:
        """Begin to read the missing pages from storage; return None if that is not worthwhile."""
        tiers, transfers, packed = self.transfers.tiers, self.transfers, pack_tokens(token_ids)
        path = tiers.match_path(packed, namespace.seed())
        if not transfers.reads.should_prefetch(packed, path):
            return None
        # Pages from storage can only be attached below a prefix that is on the host.
        transfers.writes.write_path(path[: tiers.num_on_device(path)])
        return transfers.reads.start(packed, namespace, path)

    def is_done(
        self, rid: str, token_ids: Sequence[int], namespace: PrefixNamespace | None = None, *, is_next: bool = True
    ) -> bool:
        """Return whether a request can run without waiting for pages. Begin its next transfer. Call it at every step.

        Args:
            rid, token_ids, namespace: as given to ``start``. A request without ``start`` waits for loads only.
            is_next: this request is the next to run. It stops waiting for storage (``best_effort``), or its timeout
                begins (``timeout``). A request that is not next queries storage again after a miss.
        """
        waiting = self._by_rid.setdefault(rid, _WaitingRequest())
        namespace = namespace or self.transfers.tiers.device.namespace
        if self.policy.write == "write_through_selective" and not waiting.is_counted:
            waiting.is_counted = True
            path = self.transfers.tiers.match_path(pack_tokens(token_ids), namespace.seed())
            self.transfers.writes.on_hit(path)
        if not is_next:
            self._retry_after_miss(waiting, token_ids, namespace)
        prefetch, load = waiting.prefetch, waiting.load
        if prefetch is not None and prefetch.num_read is None:
            if not is_next:
                return False
            if self.policy.prefetch != "best_effort":
                self.transfers.controller.prefetches.mark_blocking(prefetch.number)
                return False
            self.transfers.reads.terminate(prefetch)
        if load is not None:
            if not (load.is_settled or load.by_layer):
                return False
            waiting.skips_loads = waiting.skips_loads or load.has_failed
        by_layer = is_next and self.policy.load == "by_layer"
        return waiting.skips_loads or not self._must_wait_for_load(waiting, token_ids, namespace, by_layer=by_layer)

    def _retry_after_miss(self, waiting: _WaitingRequest, token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        """Query storage again every ``prefetch_retry_steps`` calls if the last prefetch returned no page."""
        policy, missed = self.policy, waiting.prefetch
        if missed is None or missed.num_read != 0 or waiting.num_retries >= policy.prefetch_max_retries:
            return
        waiting.num_steps_since_miss += 1
        if not policy.prefetch_retry_steps or waiting.num_steps_since_miss < policy.prefetch_retry_steps:
            return
        waiting.num_steps_since_miss = 0
        waiting.num_retries += 1
        waiting.prefetch = self._begin_prefetch(token_ids, namespace) or missed

    def prefetched_spans(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield (rid, (first, end)): the tokens of each waiting request that come from storage and are not computed.

        A span covers the pages that all ranks have reserved, and after the prefetch those that have landed, until the
        request runs. An empty span means that storage had no page.
        """
        page_size = self.transfers.tiers.tree.page_size
        for rid, waiting in self._by_rid.items():
            prefetch = waiting.prefetch
            if prefetch is not None:
                num_pages = prefetch.num_reserved if prefetch.num_read is None else prefetch.num_read
                yield rid, (prefetch.first_page * page_size, (prefetch.first_page + num_pages) * page_size)

    def cancel(self, rid: str) -> None:
        """Stop the prefetch of a request that will not run."""
        waiting = self._by_rid.pop(rid, _WaitingRequest())
        if waiting.prefetch is not None and waiting.prefetch.num_read is None:
            self.transfers.reads.terminate(waiting.prefetch)

    def record_admission(self, rid: str, *, prompt_tokens: int, cached_tokens: int) -> CachedTokens:
        """Count a request that begins to run; return on which tiers its cached tokens were found."""
        waiting = self._by_rid.get(rid, _WaitingRequest())
        num_read_pages = waiting.prefetch.num_read or 0 if waiting.prefetch is not None else 0
        page_size = self.transfers.tiers.tree.page_size
        loaded = min(waiting.num_loaded_pages * page_size, cached_tokens)
        read = min(num_read_pages * page_size, loaded)
        cached = CachedTokens(cached_tokens - loaded, loaded - read, read)
        stats = self.transfers.stats
        stats.prompt_tokens += prompt_tokens
        stats.device_hit_tokens += cached.device
        stats.host_hit_tokens += cached.host
        stats.storage_hit_tokens += cached.storage
        self.cancel(rid)
        return cached

    def _must_wait_for_load(
        self, waiting: _WaitingRequest, token_ids: Sequence[int], namespace: PrefixNamespace, *, by_layer: bool
    ) -> bool:
        """Begin to load the part of the prompt that is only on the host. Return whether the request must wait.

        It need not wait if no load is worthwhile, or if ``by_layer`` loads the whole part.
        """
        tiers, loads = self.transfers.tiers, self.transfers.loads
        path = tiers.match_path(pack_tokens(token_ids), namespace.seed())
        num_pages = sum(node.num_pages for node in path[tiers.num_on_device(path) :])
        # A request loads at most as many pages as its prompt has, so two requests cannot evict each other forever.
        num_left = len(token_ids) // tiers.tree.page_size - waiting.num_loaded_pages
        if min(num_pages, num_left) < self.policy.load_threshold_pages:
            return False
        if loads.budget_pages < self.policy.load_threshold_pages:
            # Only loads under way can return budget.
            waiting.skips_loads = loads.is_idle
            return not waiting.skips_loads
        load = loads.start(path, num_left, by_layer=by_layer)
        if load is None:
            # The holders of the device's pages will free them. Without them the request could not run either.
            waiting.skips_loads = not tiers.device.used_tokens
            return not waiting.skips_loads
        waiting.load = load
        waiting.num_loaded_pages += load.num_pages
        return not by_layer or load.num_pages < min(num_pages, num_left)
