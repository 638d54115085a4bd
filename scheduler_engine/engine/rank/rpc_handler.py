"""RpcHandler: read and change the internal state of a running rank, open and close sessions, and record profiles.

Each call reaches every rank with the commands of one step, and every rank replies. A change therefore takes effect on
all ranks of a replica from the same step on, and a profile has one trace per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from scheduler_components import ConfigError
from scheduler_components.cache import RadixNode
from scheduler_components.internal_state import InternalState, StateValue
from scheduler_components.profiler_manager import ProfileRequest, ProfilerManager
from scheduler_components.values import ScheduledBatch
from scheduler_components.waiting.sessions import SessionTable
from scheduler_engine.device.device import Device, DeviceOutput, DeviceRequest
from scheduler_engine.engine.messages import CloseSession, OpenSession, RpcMethod

__all__ = [
    "RpcHandler",
    "ProfiledDevice",
    "StateChanges",
    "parse_state_changes",
    "parse_profile_plan",
]


StateChanges: TypeAlias = dict[str, StateValue]

_decode_changes = msgspec.json.Decoder(StateChanges).decode
_decode_open = msgspec.json.Decoder(OpenSession).decode
_decode_close = msgspec.json.Decoder(CloseSession).decode
_decode_plan = msgspec.json.Decoder(ProfileRequest).decode


def parse_state_changes(body: bytes) -> StateChanges:
    """Decode new values by name. Raises ConfigError for any other body."""
    changes: StateChanges = _decode(_decode_changes, body)
    return changes


def parse_profile_plan(body: bytes) -> ProfileRequest:
    """Decode what to record. An empty body means the defaults. Raises ConfigError for any other body."""
    plan: ProfileRequest = _decode(_decode_plan, body or b"{}")
    plan.check()
    return plan


def _decode(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("body", body[:64], f"cannot be decoded: {error}", "give one JSON object") from None


@dataclass(slots=True, kw_only=True)
class ProfiledDevice:
    """A device that reports the kind of each step to a ``ProfilerManager`` before it launches the batch."""

    device: Device
    profiles: ProfilerManager

    def launch(self, batch: ScheduledBatch[DeviceRequest]) -> None:
        self.profiles.on_step_start("prefill" if batch.num_prefill_tokens else "decode")
        self.device.launch(batch)

    def wait(self) -> DeviceOutput:
        return self.device.wait()


@dataclass(slots=True, kw_only=True)
class RpcHandler:
    """Executes RPC methods on one rank.

    Attributes:
        state: the state that can be read and set.
        profiles: records steps.
        sessions: the sessions of the replica.
    """

    state: InternalState
    profiles: ProfilerManager
    sessions: SessionTable[RadixNode]

    def answer(self, method: RpcMethod, body: bytes) -> object:
        """Execute a method and return a result that JSON can represent.

        Raises:
            ConfigError: the method failed and changed nothing.
        """
        if method == "get_internal_state":
            return self.state.get()
        if method == "set_internal_state":
            return self.state.set(parse_state_changes(body))
        if method == "open_session":
            session: OpenSession = _decode(_decode_open, body)
            self.sessions.open(
                session.session_id,
                capacity_tokens=session.capacity_tokens,
                timeout_s=session.timeout_s,
                is_streaming=session.is_streaming,
            )
            return session.session_id
        if method == "close_session":
            closing: CloseSession = _decode(_decode_close, body)
            self.sessions.close(closing.session_id)
            return True
        if method == "start_profile":
            self.profiles.start(parse_profile_plan(body))
            return True
        return self.profiles.stop()
