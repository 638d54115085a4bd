"""DeviceLoads: pages on their way from the host back to the device."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.errors import OutOfPagesError
from scheduler_components.hicache.controller import HiCacheController
from scheduler_components.hicache.operations import LoadSettled
from scheduler_components.hicache.policy import HiCachePolicy
from scheduler_components.hicache.tier_stats import TierStats
from scheduler_components.hicache.tier_tree import TierTree, shares_of
from scheduler_components.tier_ports import PageWitness

__all__ = ["DeviceLoads", "Load"]


@dataclass(slots=True, kw_only=True)
class Load:
    """Pages on their way from the host to the device."""

    device_end: RadixNode
    end: RadixNode
    device_pages: list[int]
    is_settled: bool = False
    has_failed: bool = False


@dataclass(slots=True, kw_only=True)
class DeviceLoads:
    """Loads of prefixes that requests wait for.

    Attributes:
        tiers: the tree.
        controller: makes the operations and settles them.
        policy: what is worth a load.
        stats: counts what comes of it.
        witness: is told which device pages were loaded.
        room_pages: pages that may be loaded until the next agreement.
    """

    tiers: TierTree
    controller: HiCacheController
    policy: HiCachePolicy
    stats: TierStats
    witness: PageWitness
    room_pages: int = field(default=0, init=False)
    _under_way: dict[int, Load] = field(default_factory=dict, init=False)

    @property
    def is_idle(self) -> bool:
        """No load is under way, so none will give room back."""
        return not self._under_way

    def begin(self, path: list[RadixNode], max_pages: int) -> Load | None:
        """Load what follows on the host where a path leaves the device, as far as the agreed room and the pool allow.

        None when that is not worth it, or when the device pages are not to be had now.
        """
        tiers = self.tiers
        num_on_device = tiers.num_on_device(path)
        on_device, on_host = path[:num_on_device], path[num_on_device:]
        num_pages = min(sum(node.num_pages for node in on_host), max_pages, self.room_pages)
        if num_pages < self.policy.load_threshold_pages:
            return None
        on_host = tiers.cut_run(on_host, num_pages)
        tiers.touch(on_device + on_host)
        device_end = on_device[-1] if on_device else tiers.tree.root
        tiers.device_order.lock(tiers.tree.path_of(device_end))
        tiers.host_order.lock(tiers.tree.path_of(on_host[-1]))
        try:
            device_pages = tiers.allocate(num_pages)
        except OutOfPagesError:
            tiers.host_order.unlock(tiers.tree.path_of(on_host[-1]))
            tiers.device_order.unlock(tiers.tree.path_of(device_end))
            return None
        self.room_pages -= num_pages
        load = Load(device_end=device_end, end=on_host[-1], device_pages=device_pages)
        host_pages = [page for node in on_host for page in node.host_pages]
        self._under_way[self.controller.load(host_pages, device_pages)] = load
        return load

    def settle(self, settled: LoadSettled) -> None:
        """Put loaded pages on the device, or free them, on all ranks alike."""
        load = self._under_way.pop(settled.op)
        tiers, num_pages = self.tiers, len(load.device_pages)
        load.is_settled = True
        path_up = tiers.tree.path_of(load.end)
        if settled.is_good:
            for node, pages in shares_of(tiers.run_up_from(load.end, num_pages), load.device_pages):
                if node.pages:  # a request has computed it in the meantime
                    tiers.device.free(pages)
                else:
                    self.witness.loaded(bytes(node.digests), pages)
                    tiers.put_on_device(node, array("I", pages))
            self.stats.pages_loaded += num_pages
        else:
            load.has_failed = True
            tiers.device.free(load.device_pages)
            self.stats.pages_not_loaded += num_pages
        tiers.host_order.unlock(path_up)
        tiers.device_order.unlock(tiers.tree.path_of(load.device_end))
        tiers.touch(path_up[::-1])
