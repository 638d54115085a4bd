"""Hooks that note the decisions of SGLang's scheduler, and compare them between the tensor-parallel ranks in each step.

With the variable ``SCHEDULER_COMPONENTS_DECISION_LOG`` each rank notes what its scheduler decides: what it received
and queued, what a prompt matched, which node was evicted, which batch runs, which token came out of it, what was
aborted, which grammar was ready, which session was closed. Written for SGLang 0.5.23.

**Where the ranks meet.** SGLang's loop begins each pass with a broadcast of new messages over the CPU group of the
tensor-parallel ranks, and then calls ``get_next_batch_to_run`` once, also when nothing waits. Only a pause, which
arrives by the broadcast, skips it, on all ranks. The digests of the decisions are reduced when this call returns, over
the same group and on the same thread, so no group and no thread is added. It is the last point before the forward pass:
there, ranks with different batches would call collectives of different shapes, and hang or abort. An idle rank waits
for messages in SGLang's broadcast, never in this reduction.

A wrong setting, and an engine that this file does not support, log one sentence, and nothing is noted. If a rank does
not come to the reduction, the others end with an error that names it, whatever the policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeAlias, cast

import msgspec

from scheduler_components._internal.validators import check_choice
from scheduler_components.agreement import ParallelGroups, Proposal
from scheduler_components.agreement.decision_log import DecisionLog, note_calls
from scheduler_components.agreement.file_divergence_sink import FileDivergenceSink
from scheduler_components.errors import ConfigError
from scheduler_components.values import DecisionKind, DivergencePolicy

__all__ = ["DECISION_LOG_DIRECTORY_VARIABLE", "DECISION_LOG_VARIABLE", "SGLANG_DECISION_KINDS", "SglangDecisionLog"]

_log = logging.getLogger("sglang.scheduler_components")

DECISION_LOG_VARIABLE = "SCHEDULER_COMPONENTS_DECISION_LOG"

DECISION_LOG_DIRECTORY_VARIABLE = "SCHEDULER_COMPONENTS_DECISION_LOG_DIRECTORY"
"""Where the policies ``dump`` and ``stop`` write. Without it: the directory for temporary files."""

_POLICIES: tuple[DivergencePolicy, ...] = ("count", "log", "dump", "stop")

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

_OPERATION = "decisions"

_TIMEOUT_S = 120.0
"""The ranks have just met in a broadcast, so what separates them is the work on the messages of one pass. Loading an
adapter takes seconds."""

_Values: TypeAlias = Sequence[int | str] | None

SGLANG_DECISION_KINDS: dict[str, DecisionKind] = {
    "receive": DecisionKind(each=("message", "rid")),
    "queue": DecisionKind(names=("rid", "output tokens")),
    "match": DecisionKind(names=("rid", "cached tokens")),
    "evict": DecisionKind(names=("component", "node")),
    "batch": DecisionKind(names=("mode",)),  # decode: its rids; else rid, cached tokens and computed tokens of each
    "token": DecisionKind(each=("rid", "token", "finished")),
    "abort": DecisionKind(names=("rid", "message")),
    "grammar": DecisionKind(each=("rid", "finished")),
    "lora": DecisionKind(names=("rid", "can run")),
    "session": DecisionKind(names=("closed",)),
    "flush": DecisionKind(names=("what", "done")),
}
"""What is noted. Each is decided by every rank for itself."""


@dataclass(slots=True, kw_only=True)
class SglangDecisionLog:
    """The hooks, and the decision log of one scheduler process.

    Attributes:
        policy: what a divergence leads to; None if the variable is not set.
        directory: where the policies ``dump`` and ``stop`` write recent decisions.
        log: the log after ``attach``; None before, and where nothing is noted.
    """

    policy: DivergencePolicy | None = None
    directory: Path = field(default_factory=lambda: Path(gettempdir()))
    log: DecisionLog | None = field(default=None, init=False)
    _groups: ParallelGroups = field(default_factory=ParallelGroups, init=False)
    _step: int = field(default=0, init=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> SglangDecisionLog:
        """Read the variables. A wrong value logs one sentence and counts as not given."""
        given = environ.get(DECISION_LOG_VARIABLE, "").strip()
        if not given:
            return cls()
        try:
            check_choice(DECISION_LOG_VARIABLE, given, _POLICIES, "is not a policy of the decision log")
        except ConfigError as error:
            _log.error("no decisions are noted: %s", error)
            return cls()
        directory = Path(environ.get(DECISION_LOG_DIRECTORY_VARIABLE) or gettempdir())
        return cls(policy=cast(DivergencePolicy, given), directory=directory)

    def register(self, hooks: Any) -> None:
        """Register the hooks with SGLang's module of hooks, if the variable is set."""
        if self.policy is None:
            return
        after = hooks.HookType.AFTER
        hooks.HookRegistry.register(f"{_SCHEDULER}.__init__", self.on_scheduler_made, after)
        hooks.HookRegistry.register(f"{_SCHEDULER}.get_internal_state", self.add_to_internal_state, after)

    def on_scheduler_made(self, _result: None, scheduler: Any, *_: Any, **__: Any) -> None:
        """Hook after the constructor of SGLang's scheduler: attach the log to it, where its ranks can be compared."""
        try:
            _check_supported(scheduler)
            self.attach(scheduler, _open_groups(scheduler.tp_group))
        except ConfigError as error:
            _log.error("no decisions are noted: %s", error)
            return
        _log.info(
            "scheduler-components compares the decisions of %d ranks, policy %s, dumps in %s",
            len(scheduler.tp_group.ranks),
            self.policy,
            self.directory,
        )

    def attach(self, scheduler: Any, groups: ParallelGroups) -> None:
        """Note the decisions of ``scheduler`` and compare them over ``groups`` in each step.

        Raises:
            ConfigError: the scheduler lacks a method, so it is of another release; nothing is noted.
        """
        assert self.policy is not None
        sink = FileDivergenceSink(directory=self.directory).write
        log = DecisionLog(groups=groups, policy=self.policy, kinds=SGLANG_DECISION_KINDS, sink=sink)
        with ExitStack() as undoing:
            for owner, method, kind, values in _NOTED_CALLS:
                target = getattr(scheduler, owner, None) if owner else scheduler
                undoing.callback(note_calls(target, method, log, kind=kind, values=values))
            undoing.pop_all()
        self.log, self._groups = log, groups
        scheduler.get_next_batch_to_run = partial(self._schedule_and_agree, scheduler.get_next_batch_to_run)

    def add_to_internal_state(self, result: Any, *_: Any, **__: Any) -> None:
        """Hook after the readback for ``/server_info``: add the counters and the first report."""
        if self.log is not None:
            result.internal_state["decision_log"] = {
                "num_steps": self._step,
                **msgspec.to_builtins(self.log.stats()),
                "num_failures": self.log.failures.total,
                "first_divergence": msgspec.to_builtins(self.log.first_divergence, str_keys=True),
            }

    def _schedule_and_agree(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let SGLang schedule, then compare the decisions of all ranks since the last time."""
        plan = schedule(*args, **kwargs)
        assert self.log is not None
        self._step += 1
        proposal = Proposal(_OPERATION, step=self._step)
        self.log.fill(proposal)
        self.log.apply(self._step, self._groups.reduce(proposal))
        return plan


def _check_supported(scheduler: Any) -> None:
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    mode = scheduler.disaggregation_mode.value
    for field_name, value, is_supported, problem in (
        ("tp_size", parallel.tp_size, parallel.tp_size > 1, "leaves nothing to compare"),
        ("pp_size", parallel.pp_size, parallel.pp_size == 1, "is more than this kit compares"),
        ("enable_dp_attention", scheduler.attn_dp_enabled, not scheduler.attn_dp_enabled, "is not supported"),
        ("disaggregation_mode", mode, mode == "null", "is not supported"),
        ("enable_pdmux", scheduler.enable_pdmux, not scheduler.enable_pdmux, "is not supported"),
    ):
        if not is_supported:
            raise ConfigError(field_name, value, problem, f"leave {DECISION_LOG_VARIABLE} away")


def _open_groups(tp_group: Any) -> ParallelGroups:
    """Return the groups over SGLang's own CPU group. SGLang closes it."""
    sync = import_module("scheduler_components.agreement.torch_sync")
    ranks = tuple(tp_group.ranks)
    roll_call = sync.RollCall(rank=tp_group.rank, ranks=ranks, group=tp_group.cpu_group, timeout_s=_TIMEOUT_S)
    group = sync.TorchSyncGroup(ranks=ranks, group=tp_group.cpu_group, roll_call=roll_call, timeout_s=_TIMEOUT_S)
    return ParallelGroups(rank=tp_group.rank, groups=(group,))


# What the noted calls decided. None: nothing to note.


def _received(_result: object, args: tuple[Any, ...]) -> _Values:
    found: list[int | str] = []
    for message in args[0]:
        rid = getattr(message, "rid", None)
        found += (type(message).__name__, rid if isinstance(rid, str) else "")
    return found or None


def _queued(_result: object, args: tuple[Any, ...]) -> _Values:
    return args[0].rid, len(args[0].output_ids)


def _matched(result: Any, args: tuple[Any, ...]) -> _Values:
    request = args[0].req
    return "" if request is None else request.rid, result.device_prefix_len


def _evicted(result: Any, args: tuple[Any, ...]) -> _Values:
    node, _made_progress = result
    return None if node is None else (int(args[0]), node)


def _batched(result: Any, _args: tuple[Any, ...]) -> _Values:
    batch = result.batch_to_run
    if batch is None:
        return None
    if batch.forward_mode.is_decode():
        return ("decode", *[request.rid for request in batch.reqs])
    found: list[int | str] = [batch.forward_mode.name.lower()]
    for request in batch.reqs:
        found += (request.rid, request.prefix_len, request.extend_len)
    return found


def _computed(_result: object, args: tuple[Any, ...]) -> _Values:
    return [
        value
        for request in args[0].reqs
        for value in (
            request.rid,
            request.output_ids[-1] if request.output_ids else -1,
            0 if request.finished_reason is None else 1,
        )
    ]


def _aborted(_result: object, args: tuple[Any, ...]) -> _Values:
    abort, request = args
    return request.rid, str((abort.finished_reason or {}).get("message", ""))


def _ready(result: Any, _args: tuple[Any, ...]) -> _Values:
    found: list[int | str] = []
    for request in result:
        found += (request.rid, int(request.finished()))
    return found or None


def _schedulable(result: Any, args: tuple[Any, ...]) -> _Values:
    return args[0].rid, int(result)


def _closed(_result: object, args: tuple[Any, ...]) -> _Values:
    return (args[0],)


def _flushed(result: Any, _args: tuple[Any, ...]) -> _Values:
    return "flushed", int(result)


def _flush_answered(_result: object, args: tuple[Any, ...]) -> _Values:
    return "answered", int(args[0].success)


_NOTED_CALLS: tuple[tuple[str, str, str, Callable[[Any, tuple[Any, ...]], _Values]], ...] = (
    ("", "process_input_requests", "receive", _received),
    ("", "_add_request_to_queue", "queue", _queued),
    ("tree_cache", "match_prefix", "match", _matched),
    ("tree_cache", "_evict_device_next_node", "evict", _evicted),
    ("", "get_next_batch_to_run", "batch", _batched),
    ("", "process_batch_result", "token", _computed),
    ("", "send_abort_output", "abort", _aborted),
    ("grammar_manager", "get_ready_grammar_requests", "grammar", _ready),
    ("", "can_schedule_lora_req", "lora", _schedulable),
    ("session_controller", "_close", "session", _closed),
    ("flush_wrapper", "_flush_cache", "flush", _flushed),
    ("flush_wrapper", "_send_output", "flush", _flush_answered),
)
"""(owner in the scheduler, its method, kind, values). Only methods that SGLang looks up at each call."""
