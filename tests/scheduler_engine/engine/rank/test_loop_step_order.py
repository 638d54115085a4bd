"""A step receives, carries out commands and control requests, agrees on tiers, and only then makes a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.internal_state import InternalState
from scheduler_components.profiler_manager import ProfilerManager
from scheduler_components.quiesce import QuiesceState
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.testing.fakes import ListInputSource
from scheduler_components.values import (
    BeginWeightUpdate,
    ContinueGeneration,
    ForwardMode,
    InputKind,
    InputMessage,
    LoadWeights,
)
from scheduler_components.watchdog import IDLE_PHASE, StallDetector, StepProgress
from scheduler_components.weight_updater import NullWeightStore
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.messages import (
    RankCommand,
    RankReport,
    RpcRequest,
    SubmitControl,
    SubmitRequest,
    pack_tokens,
)
from scheduler_engine.engine.rank.loop import RankWorker
from scheduler_engine.engine.rank.quiescable_scheduler import make_quiesce_stepper
from scheduler_engine.engine.rank.rpc_handler import RpcHandler
from scheduler_engine.engine.scheduler.scheduler import Scheduler

PAGE = Path(__file__).parents[4] / "docs" / "explanation" / "step.md"


@dataclass(slots=True, kw_only=True)
class ListedProgress(StepProgress):
    """Lists every phase that is entered, without the idle ones."""

    phases: list[str] = field(default_factory=list)

    def enter_phase(self, phase: str, request: str = "") -> None:
        super(ListedProgress, self).enter_phase(phase, request)
        if phase != IDLE_PHASE:
            self.phases.append(phase)


class ListedReports:
    """The socket to the frontend."""

    def __init__(self) -> None:
        self.sent: list[RankReport] = []

    def send(self, report: RankReport) -> None:
        self.sent.append(report)


class CommandReader:
    """Reads the number of a command; the command itself needs no bytes here."""

    def __init__(self, commands: list[RankCommand]) -> None:
        self.commands = commands

    def read(self, frame: bytes) -> InputMessage[RankCommand]:
        return InputMessage(InputKind.COMMAND, self.commands[int(frame)])


class HangingWeights(NullWeightStore):
    """Loading takes 100 s, during which the watchdog looks once per second."""

    def __init__(self, detector: StallDetector) -> None:
        self.detector = detector
        self.reports: list[str] = []

    def begin(self, weight_version: str) -> None:
        pass

    def load(self, name: str, content: bytes) -> None:
        for second in range(100):
            report = self.detector.poll(float(second))
            if report is not None:
                self.reports.append(str(report))


class OneRank:
    """A rank of one, from the receiver to the checks."""

    def __init__(self, commands: list[RankCommand]) -> None:
        state = QuiesceState()
        device = SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None)
        self.scheduler = Scheduler.compose(
            SchedulerConfig(page_size=4, kv_tokens=1024), ParallelState.trivial(), device, quiesce=state
        )
        self.progress = self.scheduler.integrity.progress = ListedProgress()
        self.scheduler.integrity.checker.progress = self.progress
        self.detector = StallDetector(progress=self.progress, rank="rank 0", after_s=8.0)
        self.weights = HangingWeights(self.detector)
        quiesce = make_quiesce_stepper(self.scheduler, state, groups=ParallelGroups(), weights=self.weights)
        profiles = ProfilerManager()
        rpc = RpcHandler(
            state=InternalState(providers=(profiles,)), profiles=profiles, sessions=self.scheduler.sessions
        )
        self.reports = ListedReports()
        self.worker = RankWorker(
            parallel=ParallelState.trivial(),
            scheduler=self.scheduler,
            reports=self.reports,  # type: ignore[arg-type]
            rpc=rpc,
            quiesce=quiesce,
        )
        self.source = ListInputSource()
        self.receiver = RequestReceiver(
            rank="rank 0", reader=CommandReader(commands), source=self.source, progress=self.progress
        )
        self.num_steps = 0

    def step(self, *numbers: int, mode: ForwardMode | None = None) -> list[str]:
        self.progress.phases.clear()
        self.num_steps += 1
        self.source.frames += [b"%d" % number for number in numbers]
        commands = self.receiver.receive(self.num_steps, 0, self.worker.mode if mode is None else mode)
        self.worker.execute(self.num_steps, commands)
        assert self.progress.phase == IDLE_PHASE
        return list(self.progress.phases)


SUBMIT = SubmitRequest("r1", pack_tokens(range(8)), SamplingLimits(max_new_tokens=4), 1, 1)


def test_a_step_takes_the_documented_order() -> None:
    control = [SubmitControl(1, ContinueGeneration()), RpcRequest(1, "get_internal_state", b"")]
    rank = OneRank([SUBMIT, *control])
    phases = rank.step(0, 1, 2, mode=ForwardMode.DECODE)
    assert phases == ["receive", "submit", "control", "control", "agreement", "batch", "device", "results", "report"]
    assert rank.step() == ["receive", "agreement", "batch", "device", "results", "report"]
    rows = [line.split("|")[2] for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]
    documented = [phase.strip(" `") for row in rows for phase in row.split(",")]
    assert [phase for phase in documented if phase in phases] == phases


def test_an_idle_rank_waits_for_input_without_a_phase() -> None:
    rank = OneRank([])
    assert rank.step()[:1] == ["agreement"]


def test_a_weight_load_that_hangs_is_reported() -> None:
    rank = OneRank([SubmitControl(1, BeginWeightUpdate("v2")), SubmitControl(2, LoadWeights("a", b"a"))])
    for number in ((0,), (), (1,)):
        rank.step(*number)
    [report] = rank.weights.reports
    assert "phase control, request load weights" in report
    resumed = rank.detector.poll(200.0)
    assert resumed is not None and resumed.is_resolved


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.IDLE])
def test_waiting_for_input_is_a_stall_only_while_there_is_work(mode: ForwardMode) -> None:
    progress = StepProgress()
    detector, reports = StallDetector(progress=progress, rank="rank 1", after_s=8.0), []

    class SlowRelay:
        def broadcast(self, own: object) -> object:
            reports.extend(report for second in range(100) if (report := detector.poll(float(second))))
            return own

        def close(self) -> None:
            pass

    receiver = RequestReceiver(rank="rank 1", reader=CommandReader([]), relay=SlowRelay(), progress=progress)  # type: ignore[arg-type]
    receiver.receive(1, 0, mode)
    assert [report.phase for report in reports] == (["receive"] if mode is ForwardMode.DECODE else [])
