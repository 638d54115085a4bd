"""The newest load sample of each rank, as a dispatcher holds them. Pure: time comes in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from scheduler_components.load.load_stat import LoadStat

__all__ = ["LoadSample", "LoadView"]

_REMEMBERED_LIVES = 8
"""Earlier lives of a rank's publisher, whose last samples may still be under way."""


class LoadSample(msgspec.Struct, frozen=True, gc=False):
    """One rank's newest sample.

    Attributes:
        stat: what it says.
        received_s: when it was read, by the reader's own clock.
        missed: samples between it and the one read before it.
    """

    stat: LoadStat
    received_s: float
    missed: int = 0

    def age_s(self, now: float) -> float:
        """Seconds since it was read, by the reader's clock, which need not agree with the publisher's."""
        return max(0.0, now - self.received_s)


@dataclass(slots=True, kw_only=True)
class LoadView:
    """Takes samples in any order and keeps the newest of each rank.

    Newest is the highest sequence of the publisher's present life. A life that was not seen before is a restart and
    begins anew; one that was left does not come back.

    Attributes:
        max_ranks: ranks that are kept; samples of further ones are refused.
        samples: rank -> newest sample.
        outdated: samples dropped because a newer one was there.
        refused: samples of ranks beyond ``max_ranks``.
    """

    max_ranks: int = 1024
    samples: dict[int, LoadSample] = field(default_factory=dict, init=False)
    outdated: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)
    _left_lives: dict[int, deque[int]] = field(default_factory=dict, init=False, repr=False)

    def take(self, stat: LoadStat, now: float) -> bool:
        """Take in one sample; True when it is its rank's newest."""
        rank = stat.attn_dp_rank or 0
        if rank >= self.max_ranks:
            self.refused += 1
            return False
        known = self.samples.get(rank)
        missed = 0
        if known is not None:
            if not self._is_newer(stat, known.stat, rank):
                self.outdated += 1
                return False
            missed = stat.sequence - known.stat.sequence - 1 if stat.life == known.stat.life else stat.sequence
        self.samples[rank] = LoadSample(stat, now, missed)
        return True

    def _is_newer(self, stat: LoadStat, known: LoadStat, rank: int) -> bool:
        if stat.life == known.life:
            return stat.sequence > known.sequence
        left = self._left_lives.setdefault(rank, deque(maxlen=_REMEMBERED_LIVES))
        if stat.life in left:
            return False
        left.append(known.life)
        return True

    def stale_ranks(self, expected: Iterable[int], *, now: float, max_age_s: float) -> list[int]:
        """Return the ranks of ``expected`` that have said nothing for longer than ``max_age_s``, or never anything."""
        samples = self.samples
        return [rank for rank in expected if rank not in samples or samples[rank].age_s(now) > max_age_s]
