"""What the scheduler asks of tiers behind its prefix cache; and the answers of a cache that has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from scheduler_components import TierStats
from scheduler_components.cache import RadixCache
from scheduler_components.hicache import HiRadixCache, TierStepper

if TYPE_CHECKING:
    from scheduler_components.hicache import ThreadPageMover

__all__ = [
    "NO_TIERS",
    "CacheTiers",
    "HostTiers",
    "PrefixCache",
]

PrefixCache: TypeAlias = RadixCache | HiRadixCache
"""Both do the same for a request; one of them keeps what it evicts."""

_WAIT_S = 0.001


class CacheTiers(Protocol):
    """Brings pages closer before a request runs."""

    def step(self) -> None:
        """Agree with the other ranks; once in every step of the scheduler."""
        ...

    def expect(self, rid: str, token_ids: Sequence[int]) -> None:
        """A request has come."""
        ...

    def is_ready(self, rid: str, token_ids: Sequence[int], *, is_next: bool) -> bool:
        """Say whether a waiting request need not wait for pages."""
        ...

    def admitted(self, rid: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        """A request begins to run for the first time."""
        ...

    def forget(self, rid: str) -> None:
        """A request is gone, or runs again after a retraction."""
        ...

    def wait(self) -> None:
        """Let a moment pass, when there is nothing to compute."""
        ...

    def stats(self) -> TierStats | None:
        """Return the counters of this moment; None where there are no tiers."""
        ...

    @property
    def num_operations(self) -> int:
        """Transfers under way; the same on every rank."""
        ...

    @property
    def state_digest(self) -> int:
        """What is on which tier as one signed 64-bit number; the same on every rank."""
        ...

    def close(self) -> None:
        """Let go of threads and sockets; safe to call twice."""
        ...


class _NoTiers:
    """The device is all there is."""

    num_operations = 0
    state_digest = 0

    def step(self) -> None:
        pass

    def expect(self, rid: str, token_ids: Sequence[int]) -> None:
        pass

    def is_ready(self, rid: str, token_ids: Sequence[int], *, is_next: bool) -> bool:  # noqa: ARG002
        return True

    def admitted(self, rid: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        pass

    def forget(self, rid: str) -> None:
        pass

    def wait(self) -> None:
        pass

    def stats(self) -> TierStats | None:
        return None

    def close(self) -> None:
        pass


NO_TIERS: CacheTiers = _NoTiers()


@dataclass(slots=True, kw_only=True)
class HostTiers:
    """``CacheTiers`` of a ``HiRadixCache``.

    Attributes:
        stepper: steps the cache.
        mover: the stepper's, which this one waits for.
    """

    stepper: TierStepper
    mover: ThreadPageMover

    @property
    def num_operations(self) -> int:
        return self.stepper.cache.num_operations

    @property
    def state_digest(self) -> int:
        return self.stepper.cache.state_digest - 2**63

    def step(self) -> None:
        self.stepper.step()

    def expect(self, rid: str, token_ids: Sequence[int]) -> None:
        self.stepper.cache.preparations.expect(rid, token_ids)

    def is_ready(self, rid: str, token_ids: Sequence[int], *, is_next: bool) -> bool:
        return self.stepper.cache.preparations.is_ready(rid, token_ids, is_next=is_next)

    def admitted(self, rid: str, *, prompt_tokens: int, cached_tokens: int) -> None:
        self.stepper.cache.preparations.book_admission(rid, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)

    def forget(self, rid: str) -> None:
        self.stepper.cache.preparations.forget(rid)

    def wait(self) -> None:
        self.mover.wait(_WAIT_S)

    def stats(self) -> TierStats:
        return self.stepper.cache.stats()

    def close(self) -> None:
        self.stepper.close()
