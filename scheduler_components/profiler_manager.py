"""ProfilerManager: start and stop a profiler at given steps, and name its traces."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import msgspec

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ConfigError
from scheduler_components.internal_state import StateValue

__all__ = ["NullProfiler", "ProfileRequest", "ProfileStage", "Profiler", "ProfilerManager"]

logger = logging.getLogger(__name__)

ProfileStage: TypeAlias = Literal["prefill", "decode"]
"""What a step computes: prefill if it computes any prompt token."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PROFILING = "profiling"


class Profiler(Protocol):
    """Record the activity of this process: `TorchProfiler`, `StackSampler`.

    `ProfilerManager` calls it on the scheduler's thread.
    """

    def start(self) -> None:
        """Start recording. An exception ends the session."""
        ...

    def stop(self, name: str) -> str:
        """Stop recording and write the trace to a file of this name plus the profiler's own suffix; return its path."""
        ...


class NullProfiler:
    """The profiler of a scheduler that has none."""

    def start(self) -> None:
        pass

    def stop(self, name: str) -> str:
        return ""


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which steps to record. Field names are those of SGLang's `/start_profile`.

    Attributes:
        profile_id: prefix of the trace names: up to 64 letters, digits, ``_`` and ``-``.
        start_step: number of steps to skip first.
        num_steps: number of steps to record; None records until `stop`.
        profile_by_stage: write separate traces of steps with prefill and of steps without, `num_steps` of each. A trace
            ends early at a step of the other stage, so no trace has steps of both.
    """

    profile_id: str = "profile"
    start_step: int = 0
    num_steps: int | None = None
    profile_by_stage: bool = False

    def check(self) -> None:
        """Validate the request.

        Raises:
            ConfigError: naming the invalid field.
        """
        if not _NAME.fullmatch(self.profile_id):
            hint = "give up to 64 letters, digits, _ and -"
            raise ConfigError("profile_id", self.profile_id, "does not name a file", hint)
        check_integer("start_step", self.start_step, "is not a number of steps", at_least=0)
        if self.num_steps is not None:
            check_integer("num_steps", self.num_steps, "is not a number of steps")
        if self.profile_by_stage and self.num_steps is None:
            raise ConfigError("num_steps", None, "is missing", "give the number of steps of each stage")


class _Session(msgspec.Struct):
    """A profiling session.

    Attributes:
        request: what to record.
        steps_to_skip: steps left before the first trace.
        num_recorded: steps recorded, by stage; all under ``prefill`` unless the request records by stage.
        stage: the stage being recorded; None while nothing is recorded.
    """

    request: ProfileRequest
    steps_to_skip: int
    num_recorded: dict[ProfileStage, int]
    stage: ProfileStage | None = None

    @property
    def is_done(self) -> bool:
        num_steps = self.request.num_steps
        stages: tuple[ProfileStage, ...] = ("prefill", "decode") if self.request.profile_by_stage else ("prefill",)
        return num_steps is not None and all(self.num_recorded[stage] >= num_steps for stage in stages)


@dataclass(slots=True, kw_only=True)
class ProfilerManager:
    """Starts and stops the profiler as a `ProfileRequest` says. A `StateProvider`.

    The scheduler calls `on_step_start` before it launches a step; `start` and `stop` serve the control requests. An
    exception of the profiler never reaches a step: it is counted, logged, and ends the session.

    Attributes:
        profiler: `TorchProfiler`, `StackSampler`, or none.
        rank: name of this rank, the suffix of every trace name.
        traces: paths of the traces of the current or last session.
        num_traces: traces written since the start.
        failures: exceptions of the profiler.

    A name that an earlier trace of this process has gets a number, so that no trace overwrites another one.
    """

    profiler: Profiler = field(default_factory=NullProfiler)
    rank: str = "0"
    traces: list[str] = field(default_factory=list, init=False)
    num_traces: int = field(default=0, init=False)
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _session: _Session | None = field(default=None, init=False)
    _names: Counter[str] = field(default_factory=Counter, init=False, repr=False)

    @property
    def is_recording(self) -> bool:
        """Whether a trace is being recorded."""
        return self._session is not None and self._session.stage is not None

    def start(self, request: ProfileRequest) -> None:
        """Start a session with the next step, or after `start_step` steps.

        Raises:
            ConfigError: the request is invalid, or another session is open.
        """
        request.check()
        if self._session is not None:
            raise ConfigError("profile_id", request.profile_id, "cannot start yet", "stop the open session first")
        self.traces.clear()
        self._session = _Session(request, request.start_step, {"prefill": 0, "decode": 0})

    def stop(self) -> tuple[str, ...]:
        """End the session, if one is open, and return the paths of its traces."""
        self._end_trace()
        self._session = None
        return tuple(self.traces)

    def on_step_start(self, stage: ProfileStage) -> None:
        """Start or stop a trace before a step is launched. Call it in every step; without a session it returns."""
        session = self._session
        if session is None:
            return
        if session.steps_to_skip:
            session.steps_to_skip -= 1
            return
        if not session.request.profile_by_stage:
            stage = "prefill"
        num_steps = session.request.num_steps
        is_enough = num_steps is not None and session.num_recorded[stage] >= num_steps
        if session.stage is not None and (session.stage != stage or is_enough):
            self._end_trace()
        if session.is_done:
            self._session = None
            return
        if not is_enough:
            if session.stage is None:
                self._start_trace(session, stage)
            session.num_recorded[stage] += 1

    def _start_trace(self, session: _Session, stage: ProfileStage) -> None:
        try:
            self.profiler.start()
        except Exception as error:  # noqa: BLE001 - counted and logged; it ends the session and not the step
            self.failures.failed(_PROFILING, error)
            self._session = None
        else:
            session.stage = stage

    def _end_trace(self) -> None:
        session = self._session
        if session is None or session.stage is None:
            return
        stage, session.stage = session.stage, None
        parts = [session.request.profile_id, self.rank]
        if session.request.profile_by_stage:
            parts += [stage, str(len(self.traces))]  # a stage that is interrupted continues in another trace
        name = "-".join(parts)
        self._names[name] += 1
        if self._names[name] > 1:
            name += f"-{self._names[name]}"
        self._session = None
        with self.failures.guard(_PROFILING):
            self.traces.append(self.profiler.stop(name))
            self.num_traces += 1
            self._session = session

    @property
    def settable(self) -> Collection[str]:
        return ()

    def state(self) -> Mapping[str, StateValue]:
        """Return whether a trace is being recorded, and the number of traces written."""
        return {"profiler_is_recording": self.is_recording, "profiler_traces": self.num_traces}

    def check_state(self, changes: Mapping[str, StateValue]) -> None:
        pass

    def set_state(self, changes: Mapping[str, StateValue]) -> None:
        pass
