"""The hooks that compare SGLang's decisions, without SGLang: settings, what is noted, the report of two ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace

import msgspec
import pytest
from kit.rank_grid import grid, on_threads

from scheduler_components.agreement import ParallelGroups
from scheduler_components.engines.sglang_decision_log import (
    DECISION_LOG_DIRECTORY_VARIABLE,
    DECISION_LOG_VARIABLE,
    SGLANG_DECISION_KINDS,
    SglangDecisionLog,
)
from scheduler_components.errors import ConfigError, DecisionDivergenceError
from scheduler_components.values import Decision, DivergencePolicy

TWO = grid(1, 2)


@dataclass(eq=False)
class Request:
    """The members of SGLang's ``Req`` that are read."""

    rid: str
    prefix_len: int = 0
    extend_len: int = 16
    output_ids: list[int] = field(default_factory=list)
    finished_reason: str | None = None

    def finished(self) -> bool:
        return self.finished_reason is not None


class Batch(SimpleNamespace):
    def __init__(self, mode: str, *requests: Request) -> None:
        super().__init__(forward_mode=SimpleNamespace(name=mode, is_decode=lambda: mode == "DECODE"), reqs=requests)


class SglangScheduler:
    """The members of SGLang's scheduler (0.5.23) that are wrapped. Each call does what ``decide`` says in this step.

    ``step`` is one pass of its loop; ``decide(step, scheduler)`` calls other members, as SGLang's own methods do.
    """

    def __init__(self, decide: Callable[[int, SglangScheduler], Batch | None]) -> None:
        self._decide, self._step = decide, 0
        self.tree_cache = SimpleNamespace(
            match_prefix=lambda params: SimpleNamespace(device_prefix_len=params.length),
            _evict_device_next_node=lambda component, tracker: (tracker["next"], True),
        )
        self.grammar_manager = SimpleNamespace(get_ready_grammar_requests=list)
        self.session_controller = SimpleNamespace(_close=lambda session_id: None)
        self.flush_wrapper = SimpleNamespace(_flush_cache=lambda: True, _send_output=lambda output, asked: None)

    def process_input_requests(self, messages: list[object]) -> None: ...

    def _add_request_to_queue(self, req: Request, is_retracted: bool = False) -> None: ...

    def send_abort_output(self, abort: object, req: Request) -> None: ...

    def can_schedule_lora_req(self, req: Request, running: set[str]) -> bool:
        return req.rid not in running

    def process_batch_result(self, batch: Batch, result: object) -> None:
        for request in batch.reqs:
            request.output_ids.append(result)

    def get_next_batch_to_run(self, running_batch: object, last_batch: object) -> SimpleNamespace:
        self._step += 1
        return SimpleNamespace(batch_to_run=self._decide(self._step, self), running_batch=running_batch)

    def step(self) -> Batch | None:
        self.process_input_requests([])
        batch: Batch | None = self.get_next_batch_to_run(running_batch=None, last_batch=None).batch_to_run
        if batch is not None:
            self.process_batch_result(batch, 7)
        return batch


Decide = Callable[[int, SglangScheduler], Batch | None]


def run_two(
    of_rank: Callable[[int], Decide], *, steps: int = 6, policy: DivergencePolicy = "log", directory: Path = Path()
) -> list[SglangDecisionLog]:
    """Run two ranks for some steps; return their logs."""
    hooks = [SglangDecisionLog(policy=policy, directory=directory) for _ in TWO]

    def work(groups: ParallelGroups) -> object:
        scheduler = SglangScheduler(of_rank(groups.rank))
        hooks[groups.rank].attach(scheduler, groups)
        try:
            for _ in range(steps):
                scheduler.step()
        except DecisionDivergenceError as error:
            return error
        return None

    results = on_threads(TWO, work)
    assert all(result is None or isinstance(result, DecisionDivergenceError) for result in results), results
    if policy == "stop":
        assert all(isinstance(result, DecisionDivergenceError) for result in results)
    return hooks


def common(step: int, _scheduler: SglangScheduler) -> Batch | None:
    return Batch("DECODE", Request("a"), Request("b")) if step % 2 else None


def test_ranks_that_decide_alike_are_never_reported() -> None:
    for hook in run_two(lambda _rank: common, steps=20):
        assert hook.log is not None
        assert hook.log.stats().num_divergences == 0
        assert hook.log.stats().num_unregistered == 0
        assert hook.log.stats().num_decisions == 20


def test_a_walk_without_a_node_is_no_decision_and_a_match_needs_no_request() -> None:
    def decide(step: int, scheduler: SglangScheduler) -> None:
        scheduler.tree_cache._evict_device_next_node(0, {"next": None})
        if step == 2:
            scheduler.tree_cache.match_prefix(SimpleNamespace(req=None, length=16))

    for hook in run_two(lambda _rank: decide, steps=3):
        assert hook.log is not None
        noted = [decisions for _, decisions in hook.log.recent()]
        assert noted == [(), (Decision("match", ("", 16)),), ()]


def test_a_call_whose_values_cannot_be_read_is_counted_and_ends_no_step() -> None:
    def decide(step: int, scheduler: SglangScheduler) -> None:
        scheduler.tree_cache.match_prefix(SimpleNamespace(length=16))

    for hook in run_two(lambda _rank: decide, steps=3):
        answer = SimpleNamespace(internal_state={})
        hook.add_to_internal_state(answer)
        assert answer.internal_state["decision_log"]["num_failures"] == 3
        assert answer.internal_state["decision_log"]["num_divergences"] == 0


def expire(step: int, scheduler: SglangScheduler) -> None:
    scheduler.send_abort_output(SimpleNamespace(finished_reason={"message": "waiting timeout"}), Request("late"))


def evict(node: int) -> Decide:
    def act(step: int, scheduler: SglangScheduler) -> None:
        scheduler.tree_cache._evict_device_next_node(0, {"next": node})

    return act


def match(length: int) -> Decide:
    def act(step: int, scheduler: SglangScheduler) -> None:
        scheduler.tree_cache.match_prefix(SimpleNamespace(req=Request("m"), length=length))

    return act


def queue(rid: str) -> Decide:
    def act(step: int, scheduler: SglangScheduler) -> None:
        scheduler._add_request_to_queue(Request(rid, output_ids=[1, 2]), is_retracted=True)

    return act


def close_session(step: int, scheduler: SglangScheduler) -> None:
    scheduler.session_controller._close("chat")


def answer_flush(is_done: bool) -> Decide:
    def act(step: int, scheduler: SglangScheduler) -> None:
        scheduler.flush_wrapper._send_output(SimpleNamespace(success=is_done), None)

    return act


def flush(step: int, scheduler: SglangScheduler) -> None:
    scheduler.flush_wrapper._flush_cache()


def grammar(*rids: str) -> Decide:
    def act(step: int, scheduler: SglangScheduler) -> None:
        scheduler.grammar_manager.get_ready_grammar_requests.ready = rids

    return act


def lora(*running: str) -> Decide:
    def act(step: int, scheduler: SglangScheduler) -> None:
        scheduler.can_schedule_lora_req(Request("a"), set(running))

    return act


def receive(step: int, scheduler: SglangScheduler) -> None:
    scheduler.process_input_requests([Request("new"), SimpleNamespace()])


def nothing(step: int, scheduler: SglangScheduler) -> None: ...


DIFFERENT: dict[str, tuple[Decide, Decide, Decision | None, Decision | None]] = {
    "a request expired on one rank": (nothing, expire, None, Decision("abort", ("late", "waiting timeout"))),
    "other node evicted": (evict(4), evict(9), Decision("evict", (0, 4)), Decision("evict", (0, 9))),
    "other match": (match(32), match(48), Decision("match", ("m", 32)), Decision("match", ("m", 48))),
    "other request retracted": (queue("a"), queue("b"), Decision("queue", ("a", 2)), Decision("queue", ("b", 2))),
    "session closed": (nothing, close_session, None, Decision("session", ("chat",))),
    "flush timed out": (answer_flush(True), answer_flush(False), Decision("flush", ("answered", 1)),
                        Decision("flush", ("answered", 0))),
    "flushed": (nothing, flush, None, Decision("flush", ("flushed", 1))),
    "adapter drains": (lora(), lora("a"), Decision("lora", ("a", 1)), Decision("lora", ("a", 0))),
    "received": (nothing, receive, None, Decision("receive", ("Request", "new", "SimpleNamespace", ""))),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_the_first_decision_that_differs_is_named_on_both_ranks(case: str) -> None:
    of_first, of_second, first, second = DIFFERENT[case]

    def decide_of(rank: int) -> Decide:
        def decide(step: int, scheduler: SglangScheduler) -> Batch | None:
            if step == 3:
                (of_second if rank else of_first)(step, scheduler)
            return common(step, scheduler)

        return decide

    # In step 3 all ranks note the batch of step 3 after the difference.
    batch = Decision("batch", ("decode", "a", "b"))
    for hook in run_two(decide_of):
        assert hook.log is not None
        report = hook.log.first_divergence
        assert report is not None
        assert report.found_at_step == 3
        assert report.decisions == {0: first or batch, 1: second or batch}
        assert hook.log.num_divergences == 1


def test_another_batch_and_another_token_are_named_before_and_after_the_forward_pass() -> None:
    def batches(rank: int) -> Decide:
        def decide(step: int, _scheduler: SglangScheduler) -> Batch | None:
            return Batch("EXTEND", Request("a", prefix_len=16 * rank if step == 4 else 0))

        return decide

    def tokens(rank: int) -> Decide:
        def decide(step: int, scheduler: SglangScheduler) -> Batch | None:
            return Batch("DECODE", Request("a", finished_reason="stop" if rank and step == 4 else None))

        return decide

    for hook in run_two(batches):
        assert hook.log is not None
        assert hook.log.first_divergence is not None
        assert hook.log.first_divergence.found_at_step == 4
        assert hook.log.first_divergence.decisions == {
            0: Decision("batch", ("extend", "a", 0, 16)),
            1: Decision("batch", ("extend", "a", 16, 16)),
        }
    for hook in run_two(tokens):
        assert hook.log is not None
        assert hook.log.first_divergence is not None
        assert hook.log.first_divergence.found_at_step == 5
        assert hook.log.first_divergence.decisions == {
            0: Decision("token", ("a", 7, 0)),
            1: Decision("token", ("a", 7, 1)),
        }


def test_ready_grammars_are_noted_if_there_are_any() -> None:
    def decide_of(rank: int) -> Decide:
        def decide(step: int, scheduler: SglangScheduler) -> Batch | None:
            scheduler.grammar_manager.get_ready_grammar_requests()
            return None

        return decide

    hooks = [SglangDecisionLog(policy="log") for _ in TWO]

    def work(groups: ParallelGroups) -> object:
        scheduler = SglangScheduler(decide_of(groups.rank))
        ready = [[], [Request("json")] if groups.rank else [], []]
        scheduler.grammar_manager.get_ready_grammar_requests = lambda: ready.pop(0)
        hooks[groups.rank].attach(scheduler, groups)
        for _ in range(3):
            scheduler.step()
        return None

    on_threads(TWO, work)
    for hook in hooks:
        assert hook.log is not None
        assert hook.log.first_divergence is not None
        assert hook.log.first_divergence.found_at_step == 2
        assert hook.log.first_divergence.decisions == {0: None, 1: Decision("grammar", ("json", 0))}


def differ_in_step_two(rank: int) -> Decide:
    return lambda step, _scheduler: Batch("DECODE", Request("b" if rank and step == 2 else "a"))


def test_the_policy_stop_raises_on_every_rank_and_writes_the_recent_decisions(tmp_path: Path) -> None:
    run_two(differ_in_step_two, policy="stop", directory=tmp_path)
    written = sorted(tmp_path.iterdir())
    assert len(written) == 2
    for rank, path in enumerate(written):
        dump = msgspec.json.decode(path.read_bytes())
        assert dump["rank"] == rank
        assert dump["report"]["found_at_step"] == 2


def test_the_policy_count_logs_nothing_and_shows_the_report_in_the_internal_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        hooks = run_two(differ_in_step_two, policy="count")
    assert caplog.records == []
    for hook in hooks:
        answer = SimpleNamespace(internal_state={})
        hook.add_to_internal_state(answer)
        found = msgspec.msgpack.decode(msgspec.msgpack.encode(answer.internal_state))["decision_log"]
        assert found["num_steps"] == 6
        assert found["num_divergences"] == 2  # the batch, and then its tokens
        assert found["first_divergence"]["decisions"]["1"] == ["batch", ["decode", "b"]]


def test_without_the_variable_nothing_is_registered() -> None:
    assert registered({}) == []
    assert registered({DECISION_LOG_VARIABLE: " "}) == []
    assert registered({DECISION_LOG_VARIABLE: "log"}) == ["__init__", "get_internal_state"]


def test_the_directory_of_dumps_can_be_chosen() -> None:
    environ = {DECISION_LOG_VARIABLE: "dump", DECISION_LOG_DIRECTORY_VARIABLE: "/var/dumps"}
    assert SglangDecisionLog.from_environment(environ).directory == Path("/var/dumps")
    assert SglangDecisionLog.from_environment({DECISION_LOG_VARIABLE: "dump"}).directory == Path(gettempdir())


def test_a_scheduler_of_another_release_runs_as_before() -> None:
    scheduler = SglangScheduler(common)
    del scheduler.session_controller
    methods = dict(vars(scheduler))
    hook = SglangDecisionLog(policy="stop")
    with pytest.raises(ConfigError, match="'_close'"):
        hook.attach(scheduler, ParallelGroups())
    assert hook.log is None
    assert vars(scheduler) == methods


def registered(environ: dict[str, str]) -> list[str]:
    targets: list[str] = []
    hooks = SimpleNamespace(
        HookType=SimpleNamespace(AFTER="after"),
        HookRegistry=SimpleNamespace(register=lambda target, _hook, _type: targets.append(target.rsplit(".", 1)[1])),
    )
    SglangDecisionLog.from_environment(environ).register(hooks)
    return targets


def test_a_wrong_policy_is_one_sentence_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert registered({DECISION_LOG_VARIABLE: "panic"}) == []
    (record,) = caplog.records
    assert f"no decisions are noted: {DECISION_LOG_VARIABLE}='panic': is not a policy" in record.getMessage()


@pytest.mark.parametrize(
    ("sizes", "members", "sentence"),
    [
        ({"tp_size": 1}, {}, "tp_size=1: leaves nothing to compare"),
        ({"pp_size": 2}, {}, "pp_size=2: is more than this kit compares"),
        ({}, {"attn_dp_enabled": True}, "enable_dp_attention=True: is not supported"),
        (
            {},
            {"disaggregation_mode": SimpleNamespace(value="decode")},
            "disaggregation_mode='decode': is not supported",
        ),
        ({}, {"enable_pdmux": True}, "enable_pdmux=True: is not supported"),
    ],
)
def test_an_engine_that_is_not_supported_is_one_sentence_and_runs_as_before(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sizes: dict[str, int],
    members: dict[str, object],
    sentence: str,
) -> None:
    parallel = SimpleNamespace(**{"tp_size": 2, "pp_size": 1} | sizes)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", SimpleNamespace(get_parallel=lambda: parallel))
    plain = {"attn_dp_enabled": False, "disaggregation_mode": SimpleNamespace(value="null"), "enable_pdmux": False}
    hook = SglangDecisionLog(policy="stop")
    with caplog.at_level(logging.ERROR):
        hook.on_scheduler_made(None, SimpleNamespace(**plain | members))
    (record,) = caplog.records
    assert sentence in record.getMessage()
    assert hook.log is None
    answer = SimpleNamespace(internal_state={})
    hook.add_to_internal_state(answer)
    assert answer.internal_state == {}


def test_every_noted_kind_is_registered() -> None:
    from scheduler_components.engines.sglang_decision_log import _NOTED_CALLS

    assert {kind for _, _, kind, _ in _NOTED_CALLS} == set(SGLANG_DECISION_KINDS)
