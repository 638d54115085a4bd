"""Every stage of the refactor has exactly the output of the mixins: events, loads, metrics and outputs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import zmq
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from serving_parts.batching import Settings
from serving_parts.play import Abort, Action, Clock, OpenScheduler, Steps, Submit, act, play
from serving_parts.request import Outbox
from serving_parts.surroundings import Surroundings
from stages import GUIDE, STAGES

from scheduler_components import ConfigError, ParallelState
from scheduler_components.component_lint import RULES, ComponentChecker

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("written")]
MAX_LINES = 300
KV_TOKENS = 64

PROBLEMS = {
    "stage_0_mixins": {"ambient-context", "enabled-gate", "mixin", "untyped-callable"},
    "stage_1_explicit": {"enabled-gate", "mixin", "untyped-callable"},
    "stage_2_prepared": {"enabled-gate", "many-callables", "mixin", "too-many-fields", "untyped-callable"},
    "stage_3_moved": {"enabled-gate", "many-callables", "too-many-fields", "untyped-callable"},
    "stage_4_ports": set(),
    "stage_5_composed": set(),
}


def opener(stage: str) -> OpenScheduler:
    return import_module(f"{stage}.scheduler").open_scheduler  # type: ignore[no-any-return]


submits = st.builds(
    Submit,
    topic=st.integers(0, 2),
    num_shared=st.integers(1, 24),
    num_own=st.integers(0, 16),
    max_new_tokens=st.integers(1, KV_TOKENS - 40),
)
steps = st.builds(Steps, count=st.integers(0, 6), seconds=st.sampled_from([0.0, 0.05, 0.7, 11.0]))
workloads = st.lists(st.one_of(submits, submits, steps, st.builds(Abort, place=st.integers(0, 12))), max_size=16)
ranks = st.builds(
    lambda rank, dp: ParallelState.from_tp_rank(rank, tp_size=4, attn_dp_size=dp, attn_cp_size=2 // dp),
    rank=st.integers(0, 3),
    dp=st.sampled_from([1, 2]),
)
sizes = st.builds(
    Settings,
    page_size=st.sampled_from([1, 4, 8]),
    kv_tokens=st.just(KV_TOKENS),
    max_running_requests=st.integers(1, 4),
    chunk_tokens=st.sampled_from([3, 8, 64]),
)
CROWD: list[Action] = [Submit(0, 20, own, 24) for own in range(5)]


@given(actions=workloads, parallel=ranks, chosen=sizes, serve_rest=st.booleans())
@example(
    actions=[*CROWD, Steps(9, 0.1), Abort(0), Abort(4)],
    parallel=ParallelState.trivial(),
    chosen=Settings(),
    serve_rest=False,
)
@settings(deadline=None, max_examples=60)
def test_all_stages_have_the_same_output(
    actions: list[Action], parallel: ParallelState, chosen: Settings, serve_rest: bool
) -> None:
    first, *others = (
        play(opener(stage), actions, parallel=parallel, settings=chosen, serve_rest=serve_rest) for stage in STAGES
    )
    event(f"events: {bool(first.tape)}")
    event(f"outputs: {len(first.outputs) > 20}")
    for stage, record in zip(STAGES[1:], others, strict=True):
        assert record == first, stage


def test_the_workloads_reach_their_targets() -> None:
    record = play(
        opener(STAGES[0]), [*CROWD, Steps(9, 0.1), Abort(4)], parallel=ParallelState.trivial(), settings=Settings()
    )
    page = record.metrics[-1].decode()
    counts = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    totals = {name.partition("{")[0].removeprefix("sglang:"): float(value) for name, value in counts.items()}
    assert totals["num_retracted_requests_total"] > 0
    assert totals["num_aborted_requests_total"] == 1
    assert totals["cached_tokens_total"] > 0
    assert b"BlockRemoved" in record.tape
    assert {output.finish_reason for output in record.outputs} == {None, "stop", "length", "abort"}


def test_all_stages_put_the_same_frames_on_a_socket(tmp_path: Path) -> None:
    frames = {stage: replayed(stage, tmp_path / stage) for stage in STAGES}
    assert len(frames[STAGES[0]]) > 3
    for stage in STAGES:
        assert frames[stage] == frames[STAGES[0]], stage


def replayed(stage: str, directory: Path) -> list[list[bytes]]:
    """Play on a real publisher, and ask it for everything before it closes."""
    directory.mkdir()
    events, replay = f"ipc://{directory}/events", f"ipc://{directory}/replay"
    config = {"publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
    around = Surroundings(
        settings=Settings(kv_events=json.dumps(config)),
        parallel=ParallelState.trivial(),
        registry=CollectorRegistry(),
        outbox=Outbox(),
        clock=Clock(),
    )
    scheduler = opener(stage)(around)
    try:
        for number, action in enumerate([*CROWD, Steps(40, 0.1)]):
            act(scheduler, around, number, action)
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


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_refuses_what_never_fits(stage: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        play(opener(stage), [Submit(0, 50, 50, 1)], parallel=ParallelState.trivial(), settings=Settings())


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


@pytest.mark.parametrize("arguments", [[], ["stage_0_mixins", "stage_5_composed"]])
def test_the_stages_run_as_a_program(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(GUIDE / "run.py"), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60)
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == (arguments or list(STAGES))
    assert len({line.split("all it said: ")[1].split()[0] for line in lines}) == 1


def test_an_unknown_stage_is_named() -> None:
    ran = subprocess.run(
        [sys.executable, str(GUIDE / "run.py"), "stage_9"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "stage_9" in ran.stderr
