"""What an engine may do now, as far as it was ordered: paused or not, which memory it has, which weights."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from zlib import crc32

from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace
from scheduler_components.control_requests import (
    DEFAULT_WEIGHT_VERSION,
    BeginWeightUpdate,
    CheckWeights,
    ControlRequest,
    EndWeightUpdate,
    IdleControlRequest,
    LoadWeights,
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
    RollBackWeights,
)
from scheduler_components.values import QuiesceStats

__all__ = ["PauseState", "QuiesceState", "weight_namespace"]


def weight_namespace(weight_version: str) -> PrefixNamespace:
    """Return the namespace of what these weights compute: part of each block's hash, and told as its extra key.

    So a block of other weights matches nothing, wherever it is kept, also for who missed that the cache was cleared.
    """
    if weight_version == DEFAULT_WEIGHT_VERSION:
        return DEFAULT_NAMESPACE
    return PrefixNamespace(extra_key=f"weight_version={weight_version}")


class PauseState(enum.Enum):
    """Whether an engine computes: all it can, what runs already, nothing, or nothing with requests left in place."""

    RUNNING = "running"
    FINISHING = "finishing"
    PAUSED = "paused"
    FROZEN = "paused in place"


@dataclass(slots=True, kw_only=True)
class QuiesceState:
    """A ``ComputeGate`` and a ``QuiesceStatsSource``. Changed by ``QuiesceController`` alone, and equal on all ranks.

    Attributes:
        phase: what pauses have made of the engine.
        released: memory that it has given back.
        has_weights: False from a release that kept none until the end of a weight update.
        weight_version: of the weights that it computes with.
        updating_to: version of the session that is open; None without one.
        num_parts: loaded in that session.
        counts: orders by their name in ``QuiesceStats``.
    """

    phase: PauseState = PauseState.RUNNING
    released: frozenset[MemoryTag] = frozenset()
    has_weights: bool = True
    weight_version: str = DEFAULT_WEIGHT_VERSION
    updating_to: str | None = None
    num_parts: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def can_admit(self) -> bool:
        """Requests that wait may begin to run."""
        return self.phase is PauseState.RUNNING and self._is_whole

    @property
    def can_compute(self) -> bool:
        """Requests that run may go on."""
        return self.phase in (PauseState.RUNNING, PauseState.FINISHING) and self._is_whole

    @property
    def _is_whole(self) -> bool:
        return not self.released and self.has_weights and self.updating_to is None

    def digest(self, *facts: object) -> int:
        """Return 32 bits over the state and ``facts``."""
        parts = (self.phase, sorted(self.released), self.has_weights, self.weight_version, self.updating_to)
        return crc32(repr((*parts, self.num_parts, facts)).encode())

    def refusal(self, order: ControlRequest, num_running: int) -> str:
        """Say why an order cannot be carried out in this state; empty where it can, now or later."""
        wants_rest = isinstance(order, IdleControlRequest)
        if wants_rest and self.phase is PauseState.FROZEN and num_running:
            return f"{num_running} requests are paused in place; continue, or pause with retract or abort"
        if isinstance(order, LoadWeights | CheckWeights | EndWeightUpdate | RollBackWeights):
            return "" if self.updating_to is not None else "no weight update is open; begin one"
        if isinstance(order, BeginWeightUpdate):
            return self._refusal_of_update()
        if isinstance(order, ReleaseMemory | ResumeMemory):
            return self._refusal_of_memory(order)
        return ""

    def _refusal_of_update(self) -> str:
        if self.updating_to is not None:
            return f"an update to {self.updating_to!r} is open; end it or roll it back"
        if MemoryTag.WEIGHTS in self.released:
            return "the memory of the weights is released; resume it"
        return ""

    def _refusal_of_memory(self, order: ReleaseMemory | ResumeMemory) -> str:
        asked = frozenset(order.tags)
        if not asked:
            return f"no memory is named; give tags, of {', '.join(MemoryTag)}"
        if isinstance(order, ResumeMemory):
            missing = sorted(asked - self.released)
            return f"{', '.join(missing)}: not released" if missing else ""
        if self.updating_to is not None:
            return f"an update to {self.updating_to!r} is open; end it or roll it back"
        twice = sorted(asked & self.released)
        return f"{', '.join(twice)}: released already" if twice else ""

    def stats(self) -> QuiesceStats:
        """Return what metrics tell of the engine's state, and what was ordered so far."""
        is_resident = MemoryTag.WEIGHTS not in self.released
        return QuiesceStats(
            is_paused=int(self.phase in (PauseState.PAUSED, PauseState.FROZEN)),
            is_awake=int(not self.released and self.has_weights),
            has_weights_offloaded=int(self.has_weights and not is_resident),
            has_discarded_all=int(not self.has_weights),
            **self.counts,
        )
