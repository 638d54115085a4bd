"""DpBatchSync: what the replicas of an engine with DP attention tell each other in every step.

**Why.** Under DP attention each replica has its own requests and its own KV cache, and all of them share the other
layers: in each step the tokens of all replicas go through the experts together. So a step takes as long as its longest
batch, every replica must take part in it, with an idle batch where it has none, and all must run it the same way, as
captured graph or not. A replica that prefills while the others decode makes them wait; the next step it is another one.

**One packed gather per step.** Each replica packs the shape of the batch that it has made, and what it would do in the
next step, into a few integers. They go through the same agreement as everything else (``ParallelGroups``): slots of its
own
replica are filled, those of others hold the largest integer, and the minimum over all ranks is the gather. A rank meets
the ranks with its own CP and TP coordinates in the other replicas; the ranks of a replica make equal calls, so all of
them hear the same. Nothing stands before the collective: a replica without work comes too.

**The vote.** Whether a replica may admit requests in step n + 1 follows from what all said in step n, by a pure rule
that all apply (``PrefillDelayer``): where requests wait in some replicas, and others could not join them, they wait
for each other, for so many steps at most. They do not wait where nothing is gained by it: a prefill goes on anyway, or
nobody decodes, or one has so few tokens in use that waiting would leave its pool empty. SGLang (0.5.23) asks this in a
collective of its own before the batch is made; here the answer is one step old, and costs none. It also holds each
chunk of a long prompt back anew; here a prefill that has begun goes on, and the others join it.

The invariant: all ranks of all replicas hold the same ``DpStep`` after each step. ``tests/test_dp_attn.py``
walks whole topologies, and takes parts of the exchange away to see ranks part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from scheduler_components.agreement import MIN_NEUTRAL, ParallelGroups, Proposal, Slots
from scheduler_components.errors import ConfigError
from scheduler_components.parallel_state import ParallelState
from scheduler_components.rank_groups import RankGroups
from scheduler_components.validators import check_integer

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
_USAGE_STEPS = 1_000_000  # token usage travels in millionths

PrefillVote: TypeAlias = Literal[
    "free", "undisturbed", "under_way", "all", "low_usage", "waited_enough", "nobody_asks", "delayed"
]
"""Why prefills may begin: nobody ever waits; nobody runs; one goes on anyway; all want one; one has an empty pool; they
have waited. Why not: nobody has asked, and who comes now asks first; they wait."""


class BatchShape(msgspec.Struct, frozen=True, gc=False):
    """What a replica computes in one step. All zero is an idle batch: nothing to compute, and the step is taken.

    Attributes:
        num_prefill_tokens, num_decode_tokens: positions computed, by kind.
        num_context_tokens: positions whose KV is read.
        can_run_graph: this batch fits a captured graph; an idle one always does.
    """

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_context_tokens: int = 0
    can_run_graph: bool = True

    @property
    def num_tokens(self) -> int:
        """Positions computed."""
        return self.num_prefill_tokens + self.num_decode_tokens


class PrefillIntent(msgspec.Struct, frozen=True, gc=False):
    """What a replica would do in the next step, as it looks after the batch of this one was made.

    Attributes:
        has_work: requests run or wait.
        is_running: requests run.
        is_prefilling: a prefill goes on in the next step, whatever is voted.
        is_prefillable: requests wait, and there is a slot for one.
        token_usage: KV tokens in use / capacity, 0 to 1.
    """

    has_work: bool = False
    is_running: bool = False
    is_prefilling: bool = False
    is_prefillable: bool = False
    token_usage: float = 0.0


class DpStep(msgspec.Struct, frozen=True, gc=False):
    """What all replicas do in one step, and whether they may prefill in the next: the same on all ranks.

    Attributes:
        shapes: of the batches of this step, by replica.
        any_work: some replica has requests left, so there will be another step, which all of them take.
        may_prefill: requests may be admitted in the next step.
        vote: why.
    """

    shapes: tuple[BatchShape, ...] = ()
    any_work: bool = False
    may_prefill: bool = True
    vote: PrefillVote = "free"

    @property
    def global_num_tokens(self) -> list[int]:
        """Positions computed, by replica (SGLang's name)."""
        return [shape.num_tokens for shape in self.shapes]

    @property
    def max_num_tokens(self) -> int:
        """Of the longest batch: what each batch is padded to."""
        return max(self.global_num_tokens, default=0)

    @property
    def can_run_graph(self) -> bool:
        """All replicas run the step as a captured graph, or none does."""
        return all(shape.can_run_graph for shape in self.shapes)


class DpStats(msgspec.Struct, gc=False):
    """Counters of one replica since the start; each only ever grows.

    Attributes:
        steps: in which some replica computed.
        idle_batches: of them, in which this one had nothing to compute.
        eager_steps: of them, without a captured graph.
        padded_tokens: positions that this replica's batches were short of the longest.
        prefills_delayed: steps before which replicas that would have prefilled were told to wait.
        prefills_forced: times that they had waited enough.
    """

    steps: int = 0
    idle_batches: int = 0
    eager_steps: int = 0
    padded_tokens: int = 0
    prefills_delayed: int = 0
    prefills_forced: int = 0

    def copy(self) -> DpStats:
        """Return the counts of this moment."""
        return msgspec.structs.replace(self)


@dataclass(slots=True, kw_only=True)
class PrefillDelayer:
    """The rule of the vote. It counts steps, and no time, so all ranks that hear the same answer the same.

    Attributes:
        max_delay_steps: replicas wait for each other for so many steps at most; 0 lets each prefill when it wants. 30
            as in SGLang: with decode steps of 20 ms less than a second is added to a first token.
        low_usage: a replica that would prefill and has a smaller share of its KV tokens in use does not wait. 0 never
            says so.

    Raises:
        ConfigError: the steps are below 0, or the share is not one.
    """

    max_delay_steps: int = 0
    low_usage: float = 0.0
    _num_delayed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_integer("max_delay_steps", self.max_delay_steps, "is not a number of steps", at_least=0)
        if not 0.0 <= self.low_usage <= 1.0:
            raise ConfigError("low_usage", self.low_usage, "is not a share", "give a number from 0 to 1")

    def is_low(self, intent: PrefillIntent) -> bool:
        """Say whether this replica asks not to wait."""
        return intent.is_prefillable and intent.token_usage < self.low_usage

    def vote(self, intents: Sequence[PrefillIntent], *, any_low: bool) -> PrefillVote:
        """Decide for the next step.

        Args:
            intents: of all replicas.
            any_low: one of them asks not to wait.
        """
        num_delayed, self._num_delayed = self._num_delayed, 0
        if not self.max_delay_steps:
            return "free"
        if not any(intent.is_running for intent in intents):
            return "undisturbed"
        if any(intent.is_prefilling for intent in intents):
            return "under_way"
        num_prefillable = sum(intent.is_prefillable for intent in intents)
        if not num_prefillable:
            return "nobody_asks"
        if num_prefillable == len(intents):
            return "all"
        if any_low:
            return "low_usage"
        if num_delayed >= self.max_delay_steps:
            return "waited_enough"
        self._num_delayed = num_delayed + 1
        return "delayed"


@dataclass(slots=True, kw_only=True)
class DpBatchSync:
    """One rank's end of the exchange. One thread calls ``agree`` once in every step, with work and without.

    Attributes:
        groups: the ranks of the other replicas (``dp_rank_groups``); by default nobody.
        replica: this one, from 0.
        num_replicas: that take part.
        delayer: the rule of the vote.
        stats: counters.
        last: what was agreed last; ``last.may_prefill`` holds for the next batch.

    Raises:
        ConfigError: the replica is not one of them, or they are none.
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
        """Bring this replica's batch and intent; return what all do.

        Raises:
            SyncTimeoutError: a replica did not come in time.
            SyncDivergenceError: replicas came at different steps.
            SettingsDivergenceError: replicas have different rules for the vote.
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
        self.last = DpStep(shapes, any(each.has_work for each in intents), vote not in ("nobody_asks", "delayed"), vote)
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
        stats.prefills_forced += step.vote == "waited_enough"


class _Exchange:
    """Packs what a replica brings into its own slots, and reads those of all. The slots are made once."""

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
    """Return who this rank meets: the rank with its own CP and TP coordinates in each replica, as global ranks."""
    stride = parallel.attn_cp_size * parallel.attn_tp_size
    rank = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    first = rank - parallel.attn_dp_rank * stride
    return RankGroups(rank=rank, tp=range(first, first + parallel.attn_dp_size * stride, stride))
