"""DpBatchSync: exchange the batch shapes of all replicas of an engine with DP attention, once per step.

**Why.** With DP attention each replica has its own requests and its own KV cache, and all replicas share the other
layers: in each step the tokens of all replicas go through the experts together. So a step takes as long as its longest
batch. Every replica must take part in it, with an idle batch if it has no work, and all must run it the same way, with
or without a captured graph. A replica that prefills while the others decode makes them wait, and in the next step
another replica may do the same.

**One packed gather per step.** Each replica packs the shape of its batch, and what it intends to do in the next step,
into a few integers. They pass through `ParallelGroups` like every other agreement: a replica fills its own slots, all
other slots have the largest integer, and the minimum over all ranks is the gather. A rank exchanges with the ranks that
have its CP and TP coordinates in the other replicas. The ranks of a replica make equal calls, so they all get the same
result. No condition precedes the collective call: a replica without work makes it too.

**The vote.** Whether replicas may admit requests in step n + 1 depends on the intents of step n alone, by a pure rule
that all ranks apply (`PrefillDelayer`). If requests wait in some replicas while others have none, the replicas delay
their prefills, for a limited number of steps, so that they prefill together. They do not wait if that gains nothing:
a prefill is already running, or no request decodes, or a replica has so few tokens in use that its pool would run
empty. SGLang (0.5.23) votes in a separate collective call before it builds the batch. This vote is one step old and
costs no call. SGLang also delays each chunk of a long prompt; here a started prefill continues, and the others join it.

The invariant: all ranks of all replicas have the same `DpStep` after each step. ``tests/scheduling/test_dp_attn.py``
runs whole topologies, and removes parts of the exchange to see the ranks diverge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from scheduler_components._internal.validators import check_integer, check_share
from scheduler_components.agreement import MIN_NEUTRAL, ParallelGroups, Proposal, Slots
from scheduler_components.agreement.rank_groups import RankGroups
from scheduler_components.errors import ConfigError
from scheduler_components.parallel_state import ParallelState
from scheduler_components.values import BatchShape

__all__ = [
    "BatchShape",
    "DpBatchSync",
    "DpStats",
    "DpStep",
    "PrefillDelayer",
    "PrefillVote",
    "PrefillIntent",
    "dp_rank_groups",
]

_FIELDS = ("prefill", "decode", "context", "flags")
_OPERATION = "dp batch"
_USAGE_STEPS = 1_000_000
"""Token usage is sent in millionths."""

PrefillVote: TypeAlias = Literal[
    "free", "no_decode", "prefilling", "all", "low_usage", "timed_out", "no_request", "delayed"
]
"""Reason of the vote. Prefills may start: delays are disabled; no request runs; a prefill continues; all replicas have
one; a pool would run empty; the delay reached its limit. Prefills may not start: no replica had one when it voted; they
are delayed."""


class PrefillIntent(msgspec.Struct, frozen=True, gc=False):
    """What a replica intends to do in the next step, determined after it has built its batch.

    Attributes:
        has_work: whether requests run or wait.
        is_running: whether requests run.
        is_prefilling: whether a prefill continues in the next step, regardless of the vote.
        is_prefillable: whether requests wait and a slot is free.
        token_usage: KV tokens in use / capacity, 0 to 1.
    """

    has_work: bool = False
    is_running: bool = False
    is_prefilling: bool = False
    is_prefillable: bool = False
    token_usage: float = 0.0


class DpStep(msgspec.Struct, frozen=True, gc=False):
    """What all replicas do in one step, and whether they may start prefills in the next. Equal on all ranks.

    Attributes:
        shapes: shapes of this step's batches, by replica.
        any_work: whether some replica has requests left, so that all replicas take another step.
        may_prefill: whether requests may be admitted in the next step.
        vote: reason for `may_prefill`.
    """

    shapes: tuple[BatchShape, ...] = ()
    any_work: bool = False
    may_prefill: bool = True
    vote: PrefillVote = "free"

    @property
    def global_num_tokens(self) -> list[int]:
        """Computed positions, by replica (SGLang's name)."""
        return [shape.num_tokens for shape in self.shapes]

    @property
    def max_num_tokens(self) -> int:
        """Length of the longest batch, to which each batch is padded."""
        return max(self.global_num_tokens, default=0)

    @property
    def can_run_graph(self) -> bool:
        """Whether all replicas run the step as a captured graph; otherwise none does."""
        return all(shape.can_run_graph for shape in self.shapes)


class DpStats(msgspec.Struct, gc=False):
    """Counters of one replica since the start. They never decrease.

    Attributes:
        steps: steps in which at least one replica computed.
        idle_batches: of them, steps in which this replica had nothing to compute.
        eager_steps: of them, steps without a captured graph.
        padded_tokens: padding of this replica's batches to the longest batch, in tokens.
        prefills_delayed: steps in which replicas with a prefill had to wait.
        prefills_forced: times that such a wait reached its limit.
    """

    steps: int = 0
    idle_batches: int = 0
    eager_steps: int = 0
    padded_tokens: int = 0
    prefills_delayed: int = 0
    prefills_forced: int = 0

    def copy(self) -> DpStats:
        """Return a copy of the counters."""
        return msgspec.structs.replace(self)


@dataclass(slots=True, kw_only=True)
class PrefillDelayer:
    """The rule of the vote. It counts steps and reads no clock, so equal intents give equal votes on all ranks.

    Attributes:
        max_delay_steps: limit of the delay in steps; 0 disables delays. SGLang's value is 30: with decode steps of
            20 ms it adds less than a second to the time to first token.
        low_usage: a replica with a prefill and a lower usage of its KV tokens does not wait; 0 disables this rule.

    Raises:
        ConfigError: the steps are below 0, or the share is not from 0 to 1.
    """

    max_delay_steps: int = 0
    low_usage: float = 0.0
    _num_delayed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_integer("max_delay_steps", self.max_delay_steps, "is not a number of steps", at_least=0)
        check_share("low_usage", self.low_usage)

    def is_low(self, intent: PrefillIntent) -> bool:
        """Return whether this replica must not wait because its pool would run empty."""
        return intent.is_prefillable and intent.token_usage < self.low_usage

    def vote(self, intents: Sequence[PrefillIntent], *, any_low: bool) -> PrefillVote:
        """Return the vote for the next step.

        Args:
            intents: the intents of all replicas.
            any_low: whether `is_low` is true for one of them.
        """
        num_delayed, self._num_delayed = self._num_delayed, 0
        if not self.max_delay_steps:
            return "free"
        if not any(intent.is_running for intent in intents):
            return "no_decode"
        if any(intent.is_prefilling for intent in intents):
            return "prefilling"
        num_prefillable = sum(intent.is_prefillable for intent in intents)
        if not num_prefillable:
            return "no_request"
        if num_prefillable == len(intents):
            return "all"
        if any_low:
            return "low_usage"
        if num_delayed >= self.max_delay_steps:
            return "timed_out"
        self._num_delayed = num_delayed + 1
        return "delayed"


@dataclass(slots=True, kw_only=True)
class DpBatchSync:
    """One rank's end of the exchange. The scheduler's thread calls `exchange` once in every step, with or without work.

    Attributes:
        groups: the ranks of the other replicas (`dp_rank_groups`); none by default.
        replica: index of this replica.
        num_replicas: number of replicas.
        delayer: the rule of the vote.
        stats: counters.
        last: result of the last exchange. `last.may_prefill` applies to the next batch.

    Raises:
        ConfigError: the replica is not below the number of replicas, or that number is below 1.
    """

    groups: ParallelGroups = field(default_factory=ParallelGroups)
    replica: int = 0
    num_replicas: int = 1
    delayer: PrefillDelayer = field(default_factory=PrefillDelayer)
    stats: DpStats = field(default_factory=DpStats, init=False)
    last: DpStep = field(default_factory=DpStep, init=False)
    _exchange: _Exchange = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("num_replicas", self.num_replicas, "is not a number of replicas")
        check_integer("replica", self.replica, "is not a replica", at_least=0)
        if self.replica >= self.num_replicas:
            raise ConfigError("replica", self.replica, f"is not one of {self.num_replicas}", "count from 0")
        self._exchange = _Exchange(self.num_replicas)

    def exchange(self, shape: BatchShape, intent: PrefillIntent) -> DpStep:
        """Exchange this replica's batch shape and intent; return those of all replicas and the vote.

        Raises:
            SyncTimeoutError: a replica did not make the call in time.
            SyncDivergenceError: the replicas are at different steps.
            SettingsDivergenceError: the replicas have different settings of the vote.
        """
        exchange = self._exchange
        if not exchange.step:
            rule = {"replicas": self.num_replicas, "max_delay_steps": self.delayer.max_delay_steps}
            self.groups.check_equal("dp rules", {**rule, "low_usage": self.delayer.low_usage}, step=0)
        exchange.step += 1
        proposal = Proposal(_OPERATION, step=exchange.step)
        proposal.fill(exchange.slots, exchange.pack(self.replica, shape, intent))
        rows = exchange.unpack(self.groups.reduce(proposal).numbers)
        shapes, intents = zip(*rows, strict=True)
        vote = self.delayer.vote(intents, any_low=any(self.delayer.is_low(each) for each in intents))
        self.last = DpStep(shapes, any(each.has_work for each in intents), vote not in ("no_request", "delayed"), vote)
        self._count(shape, self.last)
        return self.last

    def _count(self, shape: BatchShape, step: DpStep) -> None:
        stats, longest = self.stats, step.max_num_tokens
        if longest:
            stats.steps += 1
            stats.idle_batches += not shape.num_tokens
            stats.eager_steps += not step.can_run_graph
            stats.padded_tokens += longest - shape.num_tokens
        stats.prefills_delayed += step.vote == "delayed"
        stats.prefills_forced += step.vote == "timed_out"


class _Exchange:
    """Packs the values of one replica into its slots, and unpacks those of all. The slots are created once."""

    __slots__ = ("_names", "slots", "step")

    def __init__(self, num_replicas: int) -> None:
        self._names = [[f"{name} {replica}" for name in _FIELDS] for replica in range(num_replicas)]
        self.slots = Slots(*(("min", name) for names in self._names for name in names))
        self.step = 0

    def pack(self, replica: int, shape: BatchShape, intent: PrefillIntent) -> list[int]:
        values = [MIN_NEUTRAL] * (len(_FIELDS) * len(self._names))
        flags = (
            shape.can_run_graph
            | intent.has_work << 1
            | intent.is_running << 2
            | intent.is_prefilling << 3
            | intent.is_prefillable << 4
            | int(intent.token_usage * _USAGE_STEPS) << 5
        )
        at = len(_FIELDS) * replica
        own = (shape.num_prefill_tokens, shape.num_decode_tokens, shape.num_context_tokens, flags)
        values[at : at + len(_FIELDS)] = own
        return values

    def unpack(self, numbers: dict[str, int]) -> list[tuple[BatchShape, PrefillIntent]]:
        rows = []
        for names in self._names:
            prefill, decode, context, flags = (numbers[name] for name in names)
            shape = BatchShape(prefill, decode, context, bool(flags & 1))
            intent = PrefillIntent(
                has_work=bool(flags & 2),
                is_running=bool(flags & 4),
                is_prefilling=bool(flags & 8),
                is_prefillable=bool(flags & 16),
                token_usage=(flags >> 5) / _USAGE_STEPS,
            )
            rows.append((shape, intent))
        return rows


def dp_rank_groups(parallel: ParallelState) -> RankGroups:
    """Return the global ranks that this rank exchanges with: those with its CP and TP coordinates in each replica."""
    stride = parallel.attn_cp_size * parallel.attn_tp_size
    rank = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    first = rank - parallel.attn_dp_rank * stride
    return RankGroups(rank=rank, tp=range(first, first + parallel.attn_dp_size * stride, stride))
