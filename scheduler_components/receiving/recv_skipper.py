"""RecvSkipper: choose the steps before which a scheduler receives input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ConfigError
from scheduler_components.values import ForwardMode

__all__ = ["DEFAULT_RECV_WEIGHTS", "RecvSkipper"]

DEFAULT_RECV_WEIGHTS: Mapping[ForwardMode, int] = {
    ForwardMode.EXTEND: 1000,
    ForwardMode.MIXED: 1000,
    ForwardMode.DECODE: 1,
    ForwardMode.TARGET_VERIFY: 1,
}
"""SGLang's defaults (``SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_*``, 0.5.23). A prefill step is long, so input is received
after each one. Decode steps are short, so many of them share one receive."""


@dataclass(slots=True, kw_only=True)
class RecvSkipper:
    """Sums the weights of the steps' forward modes and receives when the sum reaches `recv_interval`.

    A receive is a collective call of all ranks, which a short decode step notices. All ranks of a replica must skip the
    same steps: give each the same weights, and the mode of the last step, which is equal on them. After an idle step
    input is always received, because the call delays no work.

    Attributes:
        recv_interval: the sum to reach; 1 receives before every step. SGLang's ``--scheduler-recv-interval``.
        weights: weight of each forward mode; a missing mode counts as `recv_interval`.

    Raises:
        ConfigError: the interval is below 1 or a weight below 0.
    """

    recv_interval: int = 1
    weights: Mapping[ForwardMode, int] = field(default_factory=lambda: DEFAULT_RECV_WEIGHTS)
    _sum: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_integer("recv_interval", self.recv_interval, "is not an interval")
        for mode, weight in self.weights.items():
            if weight < 0:
                raise ConfigError(f"weights[{mode}]", weight, "is below 0", "give 0 to never receive after this mode")

    def should_receive(self, mode: ForwardMode) -> bool:
        """Return whether to receive before the next step, after one of `mode`. Call it once per step."""
        if mode is ForwardMode.IDLE:
            self._sum = 0
            return True
        self._sum += self.weights.get(mode, self.recv_interval)
        if self._sum < self.recv_interval:
            return False
        self._sum = 0
        return True
