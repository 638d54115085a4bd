"""The tiers of a page, and who is on which: every transition comes through here, to be digested and told."""

from __future__ import annotations

from array import array
from enum import IntEnum

from scheduler_components.cache.block_hash import block_hashes_of
from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.cache.recorder import EventRecorder, NullEventRecorder

__all__ = ["MEDIUM_OF", "Tier", "TierMembership", "media_of", "tiers_of"]


class Tier(IntEnum):
    """Where a page lies; nearest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


MEDIUM_OF: dict[Tier, str | None] = {Tier.DEVICE: None, Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}
"""The medium of each tier's events; None is the device, as every consumer reads it."""

# Odd, so that multiplying by one loses nothing: the same pages on another tier give another digest.
_FACTORS = {Tier.DEVICE: 0x9E3779B97F4A7C15, Tier.HOST: 0xC2B2AE3D27D4EB4F, Tier.STORAGE: 0x165667B19E3779F9}
_MASK = 2**64 - 1


def tiers_of(node: RadixNode) -> tuple[Tier, ...]:
    """Return the tiers that a node of the tree is on."""
    on = (Tier.DEVICE, bool(node.pages)), (Tier.HOST, bool(node.host_pages)), (Tier.STORAGE, node.is_stored)
    return tuple(tier for tier, is_on in on if is_on)


def media_of(node: RadixNode) -> tuple[str | None, ...]:
    """Return the media that a node of the tree is on, as its events name them."""
    return tuple(MEDIUM_OF[tier] for tier in tiers_of(node))


class TierMembership:
    """Which pages are on which tier, as one running digest and as events.

    The digest is a sum over (page, tier), so it costs what a transition moves and not what the cache holds, and it
    does not depend on page indices, which are each rank's own.

    Args:
        recorder: takes the events.
    """

    __slots__ = ("_recorder", "digest", "num_pages")

    def __init__(self, recorder: EventRecorder | NullEventRecorder) -> None:
        self._recorder = recorder
        self.digest = 0
        self.num_pages = dict.fromkeys(Tier, 0)

    def place_on_device(self, node: RadixNode, pages: array[int]) -> None:
        """The device holds the node's pages now."""
        node.pages = pages
        self._enter(node, Tier.DEVICE)

    def place_on_host(self, node: RadixNode, pages: array[int]) -> None:
        """The host holds the node's pages now."""
        node.host_pages = pages
        self._enter(node, Tier.HOST)

    def place_in_storage(self, node: RadixNode) -> None:
        """Storage holds the node's pages now."""
        node.is_stored = True
        self._enter(node, Tier.STORAGE)

    def take_from_device(self, node: RadixNode) -> array[int]:
        """The device no longer holds the node; returns the pages that it was on."""
        pages, node.pages = node.pages, array("I")
        self._leave(node, Tier.DEVICE)
        return pages

    def take_from_host(self, node: RadixNode) -> array[int]:
        """The host no longer holds the node; returns the pages that it was on."""
        pages, node.host_pages = node.host_pages, array("I")
        self._leave(node, Tier.HOST)
        return pages

    def forget_storage(self, node: RadixNode) -> None:
        """Whether storage holds the node is no longer known; nothing when it never was."""
        if node.is_stored:
            node.is_stored = False
            self._leave(node, Tier.STORAGE)

    def clear(self) -> None:
        """Every page has left every tier."""
        self.digest = 0
        self.num_pages = dict.fromkeys(Tier, 0)
        self._recorder.cleared()

    def _enter(self, node: RadixNode, tier: Tier) -> None:
        self.digest = (self.digest + _weight(node, tier)) & _MASK
        self.num_pages[tier] += node.num_pages
        self._recorder.stored(node, MEDIUM_OF[tier])

    def _leave(self, node: RadixNode, tier: Tier) -> None:
        self.digest = (self.digest - _weight(node, tier)) & _MASK
        self.num_pages[tier] -= node.num_pages
        self._recorder.removed(node, MEDIUM_OF[tier])


def _weight(node: RadixNode, tier: Tier) -> int:
    return sum(block_hashes_of(node.digests)) * _FACTORS[tier]
