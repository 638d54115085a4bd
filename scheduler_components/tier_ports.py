"""What a hierarchical cache asks of one rank: its host pages, and whoever moves pages between the tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler_components.hicache.operations import Instruction, IoEvent

__all__ = ["HostPages", "PageMover", "PageWitness"]


class HostPages(Protocol):
    """The pages of the host tier; ``hicache.host_pool.HostPool`` with memory behind them."""

    def reserve(self, num_pages: int) -> list[int]:
        """Take free pages, to write to.

        Raises:
            OutOfPagesError: this rank cannot; nothing is taken.
        """
        ...

    def commit(self, pages: Sequence[int]) -> None:
        """Make reserved pages readable."""
        ...

    def abort(self, pages: Sequence[int]) -> None:
        """Give reserved pages back."""
        ...

    def release(self, pages: Sequence[int]) -> None:
        """Give committed pages back."""
        ...

    def check_integrity(self, committed: Sequence[int]) -> None:
        """Check that free, reserved and committed pages add up, ``committed`` being those that the tree holds.

        Raises:
            CacheIntegrityError: with the count that does not add up.
        """
        ...


class PageMover(Protocol):
    """Moves pages between device, host and storage, as the hierarchical cache tells it to, without blocking."""

    def submit(self, instructions: Sequence[Instruction]) -> None:
        """Begin these, in order."""
        ...

    def poll(self) -> Sequence[IoEvent]:
        """Return what has happened since the last call, on this rank.

        Raises:
            CacheIntegrityError: an instruction could not be obeyed: the kit is to blame.
        """
        ...

    @property
    def load_room_pages(self) -> int:
        """Pages that this rank can begin to copy to the device now."""
        ...

    @property
    def has_storage(self) -> bool:
        """This rank has a storage backend attached and can use it."""
        ...

    def close(self) -> None:
        """End what is under way and let go of threads and backend; safe to call twice."""
        ...


class PageWitness(Protocol):
    """Knows what pages ought to contain: a simulated device that makes their bytes, a test that checks them."""

    def computed(self, digests: bytes, pages: Sequence[int]) -> None:
        """The device has computed these pages; their whole digests stand one after the other."""
        ...

    def loaded(self, digests: bytes, pages: Sequence[int]) -> None:
        """These device pages were copied from the host, and requests may use them from now on.

        Raises:
            CacheIntegrityError: a page is another one's, or changed on its way.
        """
        ...
