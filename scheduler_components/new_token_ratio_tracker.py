"""NewTokenRatioTracker: which share of the output that requests may still produce an admission reserves room for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_components.errors import ConfigError
from scheduler_components.validators import check_integer

__all__ = ["RunningRequest", "NewTokenRatioTracker"]


class RunningRequest(Protocol):
    """A running request, as the estimate after a retraction sees it: the scheduler's own class."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        ...

    @property
    def num_output_tokens_left(self) -> int:
        """Tokens that may still be generated."""
        ...


@dataclass(slots=True, kw_only=True)
class NewTokenRatioTracker:
    """The share falls step by step while nobody is retracted. A retraction sets it to what the requests that still run
    have used of their possible output, and some steps more; an idle scheduler begins anew.

    The rules are those of SGLang (0.5.23, ``NewTokenRatioTracker``), with one difference: an estimate below
    ``minimum`` counts as ``minimum``. Steps and tokens are counted, and no time, so all ranks of a replica have the
    same share.

    Attributes:
        initial: the share to begin with. 0.7 as in SGLang: few requests use all of ``max_new_tokens``.
        minimum: what it falls to.
        decay_steps: steps from ``initial`` to ``minimum``.
        retract_decode_steps: tokens per request that an estimate leaves room for.
        current: the share now.

    Raises:
        ConfigError: a share is not one, ``minimum`` is above ``initial``, or a number of steps is below 1.
    """

    initial: float = 0.7
    minimum: float = 0.1
    decay_steps: int = 600
    retract_decode_steps: int = 20
    current: float = field(init=False)

    def __post_init__(self) -> None:
        for name, share in (("initial", self.initial), ("minimum", self.minimum)):
            if not (math.isfinite(share) and 0.0 <= share <= 1.0):
                raise ConfigError(name, share, "is not a share", "give a number from 0 to 1")
        if self.minimum > self.initial:
            raise ConfigError("minimum", self.minimum, f"is above initial={self.initial}", "give a smaller one")
        check_integer("decay_steps", self.decay_steps, "is not a number of steps")
        check_integer("retract_decode_steps", self.retract_decode_steps, "is not a number of steps")
        self.current = self.initial

    def decay_step(self) -> None:
        """A step went by without a retraction."""
        self.current = max(self.minimum, self.current - (self.initial - self.minimum) / self.decay_steps)

    def on_retract(self, still_running: Iterable[RunningRequest]) -> None:
        """A step retracted requests; these still run.

        An estimate may be above ``initial``: requests that use all of their possible output have shown it. With nobody
        left there is nothing to estimate from, and the share begins anew.
        """
        num_requests = num_decoded = num_possible = 0
        for request in still_running:
            num_requests += 1
            num_decoded += request.num_output_tokens
            num_possible += request.num_output_tokens + request.num_output_tokens_left
        if not num_requests:
            self.reset()
            return
        estimate = (num_decoded + self.retract_decode_steps * num_requests) / (num_possible + 1)
        self.current = min(1.0, max(self.minimum, estimate))

    def reset(self) -> None:
        """Begin anew: the scheduler has become idle."""
        self.current = self.initial
