"""NewTokenRatioTracker: the share of the possible remaining output for which an admission reserves pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_components._internal.validators import check_integer, check_share
from scheduler_components.errors import ConfigError
from scheduler_components.ports import BatchedRequest

__all__ = ["NewTokenRatioTracker"]


@dataclass(slots=True, kw_only=True)
class NewTokenRatioTracker:
    """Adapts the share to retractions: it decreases with each step without one, and each retraction raises it.

    After a retraction the share is the part of their possible output that the remaining requests have used, plus some
    steps. When the scheduler is idle, the share returns to `initial`. The batcher calls `decay_step` or `on_retract`
    in each step.

    The rules are those of SGLang (0.5.23, `NewTokenRatioTracker`), with one difference: an estimate below `minimum`
    counts as `minimum`. The tracker counts steps and tokens and reads no clock, so all ranks of a replica have the same
    share.

    Attributes:
        initial: the first share. 0.7 as in SGLang, because few requests use all of ``max_new_tokens``.
        minimum: the lowest share.
        decay_steps: steps from `initial` to `minimum`.
        retract_decode_steps: tokens per request that an estimate adds.
        current: the current share.

    Raises:
        ConfigError: a share is not from 0 to 1, `minimum` is above `initial`, or a number of steps is below 1.
    """

    initial: float = 0.7
    minimum: float = 0.1
    decay_steps: int = 600
    retract_decode_steps: int = 20
    current: float = field(init=False)

    def __post_init__(self) -> None:
        for name, share in (("initial", self.initial), ("minimum", self.minimum)):
            check_share(name, share)
        if self.minimum > self.initial:
            raise ConfigError("minimum", self.minimum, f"is above initial={self.initial}", "give a smaller one")
        check_integer("decay_steps", self.decay_steps, "is not a number of steps")
        check_integer("retract_decode_steps", self.retract_decode_steps, "is not a number of steps")
        self.current = self.initial

    def decay_step(self) -> None:
        """Decrease the share after a step without a retraction."""
        self.current = max(self.minimum, self.current - (self.initial - self.minimum) / self.decay_steps)

    def on_retract(self, still_running: Iterable[BatchedRequest]) -> None:
        """Estimate the share after a step that retracted requests.

        An estimate may exceed `initial`, if requests use all of their possible output. Without remaining requests the
        share returns to `initial`.

        Args:
            still_running: the requests that were not retracted.
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
        """Return to the initial share because the scheduler has become idle."""
        self.current = self.initial
