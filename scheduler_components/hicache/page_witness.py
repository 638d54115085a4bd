"""NO_WITNESS: the page witness of an engine that does not look into its pages."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_components.tier_ports import PageWitness

__all__ = ["NO_WITNESS"]


class _NoWitness:
    def computed(self, digests: bytes, pages: Sequence[int]) -> None:
        pass

    def loaded(self, digests: bytes, pages: Sequence[int]) -> None:
        pass


NO_WITNESS: PageWitness = _NoWitness()
