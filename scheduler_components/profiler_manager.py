"""ProfilerManager: from which step to which a profiler records, and under which names its traces are written."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from scheduler_components.errors import ConfigError
from scheduler_components.failure_log import FailureLog
from scheduler_components.ports import NullProfiler, Profiler, StateValue
from scheduler_components.validators import check_integer

__all__ = ["ProfileRequest", "ProfilerManager", "ProfileStage"]

logger = logging.getLogger(__name__)

ProfileStage: TypeAlias = Literal["prefill", "decode"]
"""What a step computes: prefill where it has any prompt's tokens."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_WORKING = "profiling"


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to record. Names are those of SGLang's ``/start_profile``.

    Attributes:
        profile_id: traces are named after it: up to 64 letters, digits, ``_`` and ``-``.
        start_step: steps to let go by first.
        num_steps: steps to record; None records until ``stop``.
        profile_by_stage: one trace of steps with prefill and one of steps without, ``num_steps`` of each. A trace ends
            early where a step of the other stage comes: none has steps of both.
    """

    profile_id: str = "profile"
    start_step: int = 0
    num_steps: int | None = None
    profile_by_stage: bool = False

    def check(self) -> None:
        """Refuse what cannot be recorded.

        Raises:
            ConfigError: naming the field.
        """
        if not _NAME.fullmatch(self.profile_id):
            hint = "give up to 64 letters, digits, _ and -"
            raise ConfigError("profile_id", self.profile_id, "does not name a file", hint)
        check_integer("start_step", self.start_step, "is not a number of steps", at_least=0)
        if self.num_steps is not None:
            check_integer("num_steps", self.num_steps, "is not a number of steps")
        if self.profile_by_stage and self.num_steps is None:
            raise ConfigError("num_steps", None, "is missing", "say how many steps of each stage to record")


class _Progress(msgspec.Struct):
    """A session under way.

    Attributes:
        plan: what to record.
        steps_to_wait: before the first trace.
        done: steps recorded, by stage; all of them under ``prefill`` where the plan does not tell stages apart.
        stage: what is being recorded; None while nothing is.
    """

    plan: ProfileRequest
    steps_to_wait: int
    done: dict[ProfileStage, int]
    stage: ProfileStage | None = None

    @property
    def is_done(self) -> bool:
        num_steps = self.plan.num_steps
        stages: tuple[ProfileStage, ...] = ("prefill", "decode") if self.plan.profile_by_stage else ("prefill",)
        return num_steps is not None and all(self.done[stage] >= num_steps for stage in stages)


@dataclass(slots=True, kw_only=True)
class ProfilerManager:
    """Told of each step before it is launched; starts and stops the profiler by the plan. A ``StateProvider``.

    Nothing that the profiler raises in a step reaches the scheduler: it is counted and logged, and ends the session.

    Attributes:
        profiler: records; ``TorchProfiler``, ``StackSampler``, or none.
        rank: the rank's name, which is the end of each trace's name.
        traces: where those of the last session were written.
        num_traces: written since the start.
        failures: what went wrong.
    """

    profiler: Profiler = field(default_factory=NullProfiler)
    rank: str = "0"
    traces: list[str] = field(default_factory=list, init=False)
    num_traces: int = field(default=0, init=False)
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _progress: _Progress | None = field(default=None, init=False)

    @property
    def is_recording(self) -> bool:
        """A trace is being recorded now."""
        return self._progress is not None and self._progress.stage is not None

    def start(self, plan: ProfileRequest) -> None:
        """Begin a session: with the next step, or with one that is to come.

        Raises:
            ConfigError: the plan cannot be carried out, or a session is under way.
        """
        plan.check()
        if self._progress is not None:
            raise ConfigError("profile_id", plan.profile_id, "cannot begin yet", "stop the session that is under way")
        self.traces.clear()
        self._progress = _Progress(plan, plan.start_step, {"prefill": 0, "decode": 0})

    def stop(self) -> tuple[str, ...]:
        """End the session, and return where its traces are; nothing happens where none is under way."""
        self._end_trace()
        self._progress = None
        return tuple(self.traces)

    def on_step_start(self, stage: ProfileStage) -> None:
        """A step is about to be launched. Call it in every step that computes; costs a comparison while idle."""
        progress = self._progress
        if progress is None:
            return
        if progress.steps_to_wait:
            progress.steps_to_wait -= 1
            return
        if not progress.plan.profile_by_stage:
            stage = "prefill"
        num_steps = progress.plan.num_steps
        is_enough = num_steps is not None and progress.done[stage] >= num_steps
        if progress.stage is not None and (progress.stage != stage or is_enough):
            self._end_trace()
        if progress.is_done:
            self._progress = None
            return
        if not is_enough:
            if progress.stage is None:
                self._begin_trace(progress, stage)
            progress.done[stage] += 1

    def _begin_trace(self, progress: _Progress, stage: ProfileStage) -> None:
        try:
            self.profiler.start()
        except Exception as error:  # noqa: BLE001 - a profiler that fails must not take the step with it
            self.failures.failed(_WORKING, error)
            self._progress = None
        else:
            progress.stage = stage

    def _end_trace(self) -> None:
        progress = self._progress
        if progress is None or progress.stage is None:
            return
        stage, progress.stage = progress.stage, None
        parts = [progress.plan.profile_id, self.rank, *([stage] if progress.plan.profile_by_stage else [])]
        if progress.plan.profile_by_stage:
            parts.append(str(len(self.traces)))  # a stage that was interrupted goes on in another trace
        try:
            self.traces.append(self.profiler.stop("-".join(parts)))
        except Exception as error:  # noqa: BLE001 - a profiler that fails must not take the step with it
            self.failures.failed(_WORKING, error)
            self._progress = None
        else:
            self.failures.succeeded(_WORKING)
            self.num_traces += 1

    @property
    def settable(self) -> Collection[str]:
        return ()

    def state(self) -> Mapping[str, StateValue]:
        """Whether a trace is being recorded, and how many were written."""
        return {"profiler_is_recording": self.is_recording, "profiler_traces": self.num_traces}

    def check_state(self, changes: Mapping[str, StateValue]) -> None:
        """Nothing can be set."""

    def set_state(self, changes: Mapping[str, StateValue]) -> None:
        """Nothing can be set."""
