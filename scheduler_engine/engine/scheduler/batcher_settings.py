"""BatcherSettings: the sizes of a batcher, which can change while requests run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import attrs

from scheduler_components import ConfigError
from scheduler_components.batcher import Batcher
from scheduler_components.internal_state import StateValue
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest

_SETTABLE = (
    "max_running_requests",
    "max_prefill_tokens",
    "chunk_tokens",
    "new_token_ratio",
    "min_new_token_ratio",
    "kv_metrics_every_steps",
)


def make_ratio_tracker(config: SchedulerConfig) -> NewTokenRatioTracker:
    """Return the tracker of the new-token ratio for these sizes."""
    return NewTokenRatioTracker(initial=config.new_token_ratio, minimum=config.min_new_token_ratio)


@dataclass(slots=True, kw_only=True)
class BatcherSettings:
    """The ``StateProvider`` of a scheduler's sizes.

    Sizes that other components depend on, such as pages and pool, can be read but not set. If ``max_running_requests``
    becomes less than the number of running requests, the batcher admits none until enough have finished.

    Attributes:
        config: the present sizes.
        batcher: uses them.
    """

    config: SchedulerConfig
    batcher: Batcher[EngineRequest]

    @property
    def settable(self) -> Collection[str]:
        return _SETTABLE

    def state(self) -> Mapping[str, StateValue]:
        queues, conditions = self.batcher.queues, self.batcher.conditions
        return {
            **attrs.asdict(self.config),
            "max_running_requests": queues.max_running_requests,
            "new_token_ratio_now": conditions.new_token_ratio.current,
            "num_running_reqs": len(queues.running),
            "num_waiting_reqs": len(queues.waiting),
        }

    def check_state(self, changes: Mapping[str, StateValue]) -> None:
        self._check_sizes(self._evolve(changes))

    def set_state(self, changes: Mapping[str, StateValue]) -> None:
        """Use other sizes from the next batch on.

        Raises:
            ConfigError: a size is invalid, or the pool cannot hold as many requests as may run; nothing has changed.
        """
        config = self._evolve(changes)
        self._check_sizes(config)
        ratios = (config.new_token_ratio, config.min_new_token_ratio)
        if ratios != (self.config.new_token_ratio, self.config.min_new_token_ratio):
            self.batcher.conditions.new_token_ratio = make_ratio_tracker(config)
        self.config = config
        self.batcher.limits = config.batch_limits
        self.batcher.queues.max_running_requests = config.num_request_slots

    @staticmethod
    def _check_sizes(config: SchedulerConfig) -> None:
        """Check that at most as many requests may run as the pool has pages."""
        if config.max_running_requests > config.num_request_slots:
            problem = f"is more than the {config.kv_pages} pages of the pool, and each running request needs one"
            hint = f"give at most {config.kv_pages}"
            raise ConfigError("max_running_requests", config.max_running_requests, problem, hint)

    def _evolve(self, changes: Mapping[str, Any]) -> SchedulerConfig:
        """Return the sizes with the changes. Every value is validated together with the others."""
        in_use = {"max_running_requests": self.batcher.queues.max_running_requests}
        return attrs.evolve(self.config, **(in_use | dict(changes)))
