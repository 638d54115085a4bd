"""Every stage of the refactor has exactly the output of the mixins: events, loads, metrics and outputs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zmq
from hypothesis import event, example, given, settings
from kit.searches import num_examples
from prometheus_client import CollectorRegistry
from run import main as run
from serving_parts.batching import Settings
from serving_parts.harness import (
    Abort,
    Action,
    AnyScheduler,
    Steps,
    Submit,
    Workload,
    act,
    harness,
    stage_tree,
)
from serving_parts.request import Outbox, Output, Request
from serving_parts.surroundings import Surroundings
from stages import GUIDE, STAGES

from scheduler_components import LoadInquirer, ParallelState, RadixCache
from scheduler_components.ports import PreemptionPolicy
from scheduler_components.scheduling.preemption_policy import PREEMPTION_POLICY_NAMES, make_preemption_policy
from scheduler_components.scheduling.scheduling_policy import POLICY_NAMES, make_policy
from scheduler_components.values import RequestHints
from scheduler_refactor import Coverage, ModuleTree, Shadow, first_difference, play
from scheduler_refactor.component_lint import RULES, ComponentChecker
from scheduler_refactor.module_tree import START_S
from scheduler_refactor.recording import RAISED

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("written")]
MAX_LINES = 325

PROBLEMS = {
    "stage_0_mixins": {"ambient-context", "enabled-gate", "mixin", "untyped-callable"},
    "stage_1_explicit": {"enabled-gate", "mixin", "untyped-callable"},
    "stage_2_prepared": {"enabled-gate", "mixin", "untyped-callable"},
    "stage_3_moved": {"enabled-gate", "untyped-callable"},
    "stage_4_ports": set(),
    "stage_5_composed": set(),
    "stage_6_policies": set(),
}


CROWD: tuple[Action, ...] = tuple(Submit(0, 20, own, 24) for own in range(5))


@pytest.fixture(scope="module")
def trees(written: Path) -> dict[str, ModuleTree]:
    return {stage: stage_tree(written / stage) for stage in STAGES}


@pytest.mark.soak
@given(workload=harness.workloads())
@example(workload=Workload((*CROWD, Steps(9, 0.1), Abort(0), Abort(4)), serve_rest=False))
@settings(deadline=None, max_examples=num_examples(1))
def test_all_stages_have_the_same_output(workload: Workload, trees: dict[str, ModuleTree]) -> None:
    first, *others = (play(harness, trees[stage], workload, fresh=False) for stage in STAGES)
    event(f"payloads: {len(first.emissions) > 20}")
    for stage, recording in zip(STAGES[1:], others, strict=True):
        difference = first_difference(first, recording, harness.exits)
        assert difference is None, f"{stage}: {difference}"


def test_the_workloads_reach_their_targets(trees: dict[str, ModuleTree]) -> None:
    coverage = Coverage()
    coverage.add(play(harness, trees[STAGES[0]], Workload((*CROWD, Steps(9, 0.1), Abort(4)))))
    assert coverage.missing(list(harness.exits), harness.targets) == []
    assert RAISED not in coverage.payloads


def test_all_stages_put_the_same_frames_on_a_socket(trees: dict[str, ModuleTree], tmp_path: Path) -> None:
    frames = {stage: replayed(trees[stage], tmp_path / stage) for stage in STAGES}
    assert len(frames[STAGES[0]]) > 3
    for stage in STAGES:
        assert frames[stage] == frames[STAGES[0]], stage


def replayed(tree: ModuleTree, directory: Path) -> list[list[bytes]]:
    """Play on a real publisher, and ask it for everything before it closes."""
    directory.mkdir()
    events, replay = f"ipc://{directory}/events", f"ipc://{directory}/replay"
    config = {"publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
    around = Surroundings(
        settings=Settings(kv_events=json.dumps(config)),
        parallel=ParallelState.trivial(),
        registry=CollectorRegistry(),
        outbox=Outbox(lambda output: None),
        clock=tree.clock,
    )
    tree.forget()
    tree.clock.now_s = START_S
    with tree.active():
        scheduler: AnyScheduler = tree.load("scheduler_stage.scheduler").open_scheduler(around)
        try:
            for number, action in enumerate([*CROWD, Steps(40, 0.1)]):
                act(scheduler, number, action, tree.clock.advance, [])
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                dealer.rcvtimeo = 10_000
                dealer.connect(replay)
                dealer.send_multipart([b"", bytes(8)])
                answers = []
                while (answer := dealer.recv_multipart())[-1]:
                    answers.append(answer)
                return answers
        finally:
            scheduler.close()


def test_the_kits_load_inquirer_follows_that_of_the_fourth_stage(trees: dict[str, ModuleTree]) -> None:
    """The last step in production: both components report the same load, and a wrong one is counted."""
    tree, parallel = trees["stage_4_ports"], ParallelState.trivial()
    for uses_another_pool in (False, True):
        scheduler = tree.load("scheduler_stage.scheduler").open_scheduler(
            Surroundings(
                settings=Settings(),
                parallel=parallel,
                registry=CollectorRegistry(),
                outbox=Outbox(lambda output: None),
                clock=tree.clock,
            )
        )
        shadow = Shadow("load")
        old_clock, new_clock = shadow.tee("clock", tree.clock, exact=False)
        ports = {"parallel": parallel, "queues": scheduler, "rates": scheduler.rates}
        old = tree.load("scheduler_stage.load").Load(clock=old_clock, pool=scheduler.cache, **ports)
        pool = RadixCache(page_size=4, capacity_tokens=64) if uses_another_pool else scheduler.cache
        new = LoadInquirer(clock=new_clock, pool=pool, **ports)
        scheduler.load = scheduler.metrics.load = shadow.component(old, new, calls=("get_loads",))
        for number, action in enumerate([*CROWD, Steps(30, 0.1)]):
            act(scheduler, number, action, tree.clock.advance, [])
        stats = shadow.stats()
        assert (stats.calls, stats.failures) == (30, 0)
        assert bool(stats.differences) == uses_another_pool


class CheckedPreemption:
    """A policy of the kit that checks what it is offered: in order of arrival, and not the earliest running request."""

    def __init__(self, name: str, running: Callable[[], list[Request]]) -> None:
        self._policy: PreemptionPolicy[Request] = make_preemption_policy(name)
        self._running = running

    def select_victim(self, candidates: Sequence[Request]) -> Request:
        arrivals = [request.arrival for request in candidates]
        assert arrivals == sorted(arrivals)
        assert arrivals[0] > min(request.arrival for request in self._running())
        return self._policy.select_victim(candidates)


def served(tree: ModuleTree, scheduling: str, preemption: str) -> list[Output]:
    """Serve requests with hints by these policies of the last stage, one aborted while it waits; return the outputs."""
    outputs: list[Output] = []
    around = Surroundings(
        settings=Settings(),
        parallel=ParallelState.trivial(),
        registry=CollectorRegistry(),
        outbox=Outbox(outputs.append),
        clock=tree.clock,
    )
    scheduler = tree.load("scheduler_stage.scheduler").open_scheduler(around)
    policies = tree.load("scheduler_stage.policies").Policies
    checked = CheckedPreemption(preemption, lambda: scheduler.running)
    scheduler.policies = policies(scheduling=make_policy(scheduling), preemption=checked)
    hints = {"tenant": "a", "lora": "b"}
    for number, own in enumerate((9, 4, 12, 1, 6, 3)):
        scheduler.submit(
            Request(
                rid=f"r{number}",
                token_ids=[*range(16 if number % 2 else 3), *range(100 * number + 100, 100 * number + 100 + own)],
                max_new_tokens=24 - 2 * number,
                hints=RequestHints(priority=number, deadline_s=-number, **(hints if number > 3 else {})),
            )
        )
        scheduler.step()
    scheduler.submit(Request(rid="aborted", token_ids=[1, 2, 3], max_new_tokens=1))
    assert scheduler.abort("aborted")
    for _ in range(200):
        scheduler.step()
    assert (scheduler.running, len(scheduler.waiting)) == ([], 0)
    assert list(scheduler.policies.scheduling.order(scheduler.num_steps)) == []
    scheduler.close()
    return outputs


def tokens_by_request(outputs: list[Output]) -> dict[str, list[tuple[tuple[int, ...], str | None]]]:
    found: dict[str, list[tuple[tuple[int, ...], str | None]]] = {}
    for output in outputs:
        found.setdefault(output.rid, []).append((output.token_ids, output.finish_reason))
    return found


def test_other_policies_of_the_last_stage_change_the_order_and_no_token(trees: dict[str, ModuleTree]) -> None:
    tree = trees["stage_6_policies"]
    first = served(tree, "fcfs", "latest-arrival")
    orders = {"fcfs": first}
    for scheduling in POLICY_NAMES:
        for preemption in PREEMPTION_POLICY_NAMES:
            outputs = served(tree, scheduling, preemption)
            assert tokens_by_request(outputs) == tokens_by_request(first), (scheduling, preemption)
            orders[f"{scheduling}, {preemption}"] = outputs
    assert {name for name in POLICY_NAMES if orders[f"{name}, latest-arrival"] != first} >= {
        "priority",
        "earliest-deadline",
        "virtual-token-counter",
    }
    assert any(orders[f"fcfs, {name}"] != first for name in PREEMPTION_POLICY_NAMES)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_refuses_what_never_fits(stage: str, trees: dict[str, ModuleTree]) -> None:
    (raised,) = play(harness, trees[stage], Workload((Submit(0, 50, 50, 1),))).emissions
    assert raised.exit == RAISED
    assert b"ConfigError: max_new_tokens=1: makes 101 tokens" in raised.payload


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_has_fewer_problems_of_the_checker(stage: str, written: Path) -> None:
    trees = [ast.parse(path.read_text()) for path in (written / stage).glob("*.py")]
    found = {RULES[text.split(" ", 1)[0]].name for tree in trees for _, _, text, _ in ComponentChecker(tree).run()}
    assert found == PROBLEMS[stage]


def test_all_stages_pass_the_linter_and_the_formatter(written: Path) -> None:
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--no-cache", "--config", str(GUIDE / "ruff.toml"), *STAGES]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=written, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_fits_on_a_few_screens(stage: str, written: Path) -> None:
    lines = [line for path in (written / stage).glob("*.py") for line in path.read_text().splitlines()]
    assert len([line for line in lines if line.strip()]) < MAX_LINES


def test_the_stages_run_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(GUIDE / "run.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60)
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(STAGES)
    assert len({line.split("all it said: ")[1].split()[0] for line in lines}) == 1


def test_some_stages_run_and_an_unknown_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([STAGES[0], STAGES[-1]]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [STAGES[0], STAGES[-1]]
    assert run(["stage_9"]) == 2
    assert "stage_9" in capsys.readouterr().err
