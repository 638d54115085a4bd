"""What a person asks of a running engine: its internal state, changes of it, profiles. The same on every rank.

Each question goes to every rank with the commands of one step, and every rank answers. So a change is in force on all
ranks of a replica from the same step on, and a profile has a trace per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import attrs
import msgspec

from scheduler_components import ConfigError
from scheduler_components.internal_state import InternalState
from scheduler_components.ports import StateValue
from scheduler_components.profiler_manager import ProfileRequest, ProfilerManager
from scheduler_components.reference.device.device import Device, DeviceOutput, DeviceRequest, ScheduledBatch
from scheduler_components.reference.engine.config import SchedulerConfig
from scheduler_components.reference.engine.messages import RpcMethod
from scheduler_components.reference.engine.scheduler.batcher import Batcher

__all__ = [
    "RpcHandler",
    "BatcherSettings",
    "ProfiledDevice",
    "StateChanges",
    "parse_state_changes",
    "parse_profile_plan",
]


StateChanges: TypeAlias = dict[str, StateValue]

_decode_changes = msgspec.json.Decoder(StateChanges).decode
_decode_plan = msgspec.json.Decoder(ProfileRequest).decode


def parse_state_changes(body: bytes) -> StateChanges:
    """Read values by name. Raises ConfigError for anything else."""
    changes: StateChanges = _parsed(_decode_changes, body)
    return changes


def parse_profile_plan(body: bytes) -> ProfileRequest:
    """Read what to record; nothing at all stands for the defaults. Raises ConfigError for anything else."""
    plan: ProfileRequest = _parsed(_decode_plan, body or b"{}")
    plan.check()
    return plan


def _parsed(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("body", body[:64], f"cannot be read: {error}", "give one JSON object") from None


@dataclass(slots=True, kw_only=True)
class BatcherSettings:
    """The batcher's sizes as a ``StateProvider``: what a step may hold can be changed while requests run.

    What other parts were made with (pages, pool) is shown, and cannot be set. Fewer slots than requests that run let
    nobody in until enough have ended.
    """

    batcher: Batcher

    @property
    def settable(self) -> Collection[str]:
        return _SETTABLE

    def state(self) -> Mapping[str, StateValue]:
        batcher = self.batcher
        return {
            **attrs.asdict(batcher.config),
            "new_token_ratio_now": batcher.new_token_ratio.current,
            "num_running_reqs": len(batcher.queues.running),
            "num_waiting_reqs": len(batcher.queues.waiting),
        }

    def check_state(self, changes: Mapping[str, StateValue]) -> None:
        self._changed(changes)

    def set_state(self, changes: Mapping[str, StateValue]) -> None:
        self.batcher.reconfigure(self._changed(changes))

    def _changed(self, changes: Mapping[str, Any]) -> SchedulerConfig:
        return attrs.evolve(self.batcher.config, **changes)  # its validators know what works, with what stays


_SETTABLE = (
    "max_running_requests",
    "max_prefill_tokens",
    "chunk_tokens",
    "new_token_ratio",
    "min_new_token_ratio",
    "kv_metrics_every_steps",
)


@dataclass(slots=True, kw_only=True)
class ProfiledDevice:
    """A device that tells a session of profiles what each step is about to compute."""

    device: Device
    session: ProfilerManager

    def launch(self, batch: ScheduledBatch[DeviceRequest]) -> None:
        self.session.on_step_start("prefill" if batch.num_prefill_tokens else "decode")
        self.device.launch(batch)

    def wait(self) -> DeviceOutput:
        return self.device.wait()


@dataclass(slots=True, kw_only=True)
class RpcHandler:
    """One rank's answers.

    Attributes:
        state: what can be read and set.
        profiles: which steps are recorded.
    """

    state: InternalState
    profiles: ProfilerManager

    def answer(self, verb: RpcMethod, body: bytes) -> object:
        """Do what is asked, and return what JSON knows.

        Raises:
            ConfigError: it cannot be done; nothing was changed.
        """
        if verb == "get_internal_state":
            return self.state.get()
        if verb == "set_internal_state":
            return self.state.set(parse_state_changes(body))
        if verb == "start_profile":
            self.profiles.start(parse_profile_plan(body))
            return True
        return self.profiles.stop()
