"""RpcHandler: read and change the internal state of a running rank, open and close sessions, and record profiles.

Each call reaches every rank with the commands of one step, and every rank replies. A change therefore takes effect on
all ranks of a replica from the same step on, and a profile has one trace per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from scheduler_components import ConfigError
from scheduler_components.cache import RadixNode
from scheduler_components.internal_state import InternalState, StateValue
from scheduler_components.profiler_manager import ProfileRequest, ProfilerManager
from scheduler_components.values import ScheduledBatch
from scheduler_components.waiting.sessions import SessionTable
from scheduler_engine.device.device import Device, DeviceOutput, DeviceRequest
from scheduler_engine.engine.messages import CloseSession, OpenSession, RpcMethod

T = TypeVar("T")


def _decode(kind: type[T], body: bytes) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
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
            return self.state.set(_decode(dict[str, StateValue], body))
        if method == "open_session":
            session = _decode(OpenSession, body)
            self.sessions.open(
                session.session_id,
                capacity_tokens=session.capacity_tokens,
                timeout_s=session.timeout_s,
                is_streaming=session.is_streaming,
            )
            return session.session_id
        if method == "close_session":
            self.sessions.close(_decode(CloseSession, body).session_id)
            return True
        if method == "start_profile":
            plan = _decode(ProfileRequest, body or b"{}")  # by default everything
            plan.check()
            self.profiles.start(plan)
            return True
        return self.profiles.stop()
