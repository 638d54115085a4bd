"""The checks of gates pass on ``ParallelState``, and find each gate that is broken, and the known faults of engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kit.engine_stream_rules import (
    SGLANG_EVENTS,
    SGLANG_FORWARD_PASSES,
    SGLANG_KV_METRICS,
    SGLANG_METRICS,
    VLLM_EVENTS,
    RuleGate,
)
from kit.variants import found, instead_of, variants

from scheduler_components import ParallelState
from scheduler_components.testing import TOPOLOGY_CHECKS, ConformanceError
from scheduler_components.testing import topology_checks as checks
from scheduler_components.testing.interfaces import RankGate

KIT_GATES = {
    name: RuleGate(lambda rank, name=name: getattr(rank, name), lambda rank: rank.kv_stream_index)  # type: ignore[misc]
    for name in ("owns_kv_stream", "reports_metrics", "leads_replica")
}


@pytest.mark.parametrize("check", TOPOLOGY_CHECKS)
@pytest.mark.parametrize("name", KIT_GATES)
def test_the_gates_of_a_parallel_state_pass(name: str, check: Callable[[RankGate], None]) -> None:
    check(KIT_GATES[name])


def failed(gate: RankGate) -> dict[str, str]:
    """Return the checks that a gate fails, with the text of each error."""
    found = {}
    for check in TOPOLOGY_CHECKS:
        try:
            check(gate)
        except ConformanceError as error:
            found[check.__name__] = str(error)
    return found


ONE, NUMBERS, ALONE = (check.__name__ for check in TOPOLOGY_CHECKS)

ENGINES: dict[str, tuple[RankGate, dict[str, str]]] = {
    "SGLang, KV events and load": (SGLANG_EVENTS, {}),
    "vLLM, KV events": (VLLM_EVENTS, {}),
    "SGLang, metrics": (SGLANG_METRICS, {ONE: "x PP 2 on 1 node"}),
    "SGLang, forward passes": (SGLANG_FORWARD_PASSES, {ONE: "x CP 2 x", NUMBERS: "(attention, dp_rank None)"}),
    "SGLang, KvMetrics": (SGLANG_KV_METRICS, {NUMBERS: "DP 2 (attention, dp_rank None)"}),
}
"""Gates of engines, and what the checks find in them: the topology that the trace of each failing check names."""


@pytest.mark.parametrize("name", ENGINES)
def test_the_faults_of_an_engine_are_found(name: str) -> None:
    gate, faults = ENGINES[name]
    found = failed(gate)
    assert found.keys() == faults.keys()
    for check, topology in faults.items():
        assert topology in found[check]


def test_a_failure_names_the_topology_the_cache_and_its_ranks() -> None:
    with pytest.raises(ConformanceError) as error:
        checks.check_each_cache_has_one_speaker(SGLANG_METRICS)
    assert str(error.value) == (
        "Exactly one rank speaks for each KV cache\n"
        "  1. DP 1 (plain) x CP 1 x TP 1 x PP 2 on 1 node from GPU 0: 2 ranks\n"
        "  expected: one rank that speaks for cache 0, of dp0/pp0/tp0(attn_cp0, attn_tp0), "
        "dp0/pp1/tp0(attn_cp0, attn_tp0)\n"
        "  found:    dp0/pp0/tp0(attn_cp0, attn_tp0), dp0/pp1/tp0(attn_cp0, attn_tp0)"
    )


# Gates as authors of engines write them.


def first(parallel: ParallelState) -> bool:
    return parallel.owns_kv_stream


def index(parallel: ParallelState) -> int:
    return parallel.kv_stream_index


def replica_of(rank):
    parallel = rank.parallel
    sizes = (parallel.tp_size, parallel.pp_size, parallel.attn_cp_size, rank.num_nodes, parallel.dp_size)
    return *sizes, parallel.kv_stream_index


class Gate:
    """A gate that decides by the ranks of a node, or by the calls before."""

    def __init__(self):
        self.seen = set()
        self.num_calls = 0

    def __call__(self, rank):
        return self.stream_index(rank) if self.speaks(rank) else None

    def speaks(self, rank):
        return rank.parallel.owns_kv_stream

    def stream_index(self, rank):
        return rank.parallel.kv_stream_index


class BrokenGate(Gate):
    @instead_of("stream_index", NUMBERS)
    def local_to_the_node(self, rank):
        """Numbers the streams of each node from 0."""
        return rank.parallel.kv_stream_index % max(1, rank.parallel.kv_stream_count // rank.num_nodes)

    # Only the first node publishes, because only it has an HTTP server.
    only_the_first_node = found(ONE, speaks=lambda self, rank: super().speaks(rank) and rank.node_rank == 0)
    the_first_device_of_a_node = found(ONE, speaks=lambda self, rank: rank.parallel.gpu_id == 0)

    @instead_of("speaks", ALONE)
    def the_first_that_asks(self, rank):
        """The first rank of a cache that asks speaks."""
        is_free = replica_of(rank) not in self.seen
        self.seen.add(replica_of(rank))
        return is_free

    @instead_of("stream_index", ALONE)
    def the_next_number(self, rank):
        """Gives out the next number whenever a rank asks."""
        self.num_calls += 1
        return (self.num_calls - 1) % rank.parallel.kv_stream_count


# Who speaks, by a wrong rule.
SPEAKERS = {
    "ignores pipeline stages": lambda rank: rank.attn_tp_rank == 0 and rank.attn_cp_rank == 0,
    "ignores context parallelism": lambda rank: rank.pp_rank == 0 and rank.attn_tp_rank == 0,
    "ignores tensor parallelism": lambda rank: rank.pp_rank == 0 and rank.attn_cp_rank == 0,
    "only the first rank of the world": lambda rank: rank.tp_rank == 0 and rank.pp_rank == 0,
    "every rank": lambda _: True,
    "no rank without dp_rank": lambda rank: first(rank) and rank.dp_rank is not None,
    "only dp_rank 0": lambda rank: first(rank) and not rank.dp_rank,
    "compares dp_rank with None": lambda rank: first(rank) and rank.dp_rank >= 0,
    "every multiple of the TP size of attention": lambda rank: (
        not rank.pp_rank and not rank.tp_rank % rank.attn_tp_size
    ),
    "the last stage by the wrong size": lambda rank: (
        rank.pp_rank == rank.tp_size - 1 and not rank.attn_tp_rank and not rank.attn_cp_rank
    ),
    "the first rank of each group of experts": lambda rank: first(rank) and rank.moe_ep_rank == 0,
    "the first rank of the experts for all": lambda rank: rank.pp_rank == 0 and rank.moe_ep_rank == 0,
    "the first replica of the experts": lambda rank: first(rank) and rank.moe_dp_rank == 0,
    "silent with decode context parallelism": lambda rank: first(rank) and rank.dcp_size == 1,
}
# The number of its stream, by a wrong rule.
INDICES = {
    "the index is dp_rank or 0": lambda rank: rank.dp_rank or 0,
    "the index is the attention's": lambda rank: rank.attn_dp_rank,
    "the index is the rank of the stage": lambda rank: rank.tp_rank,
    "the index counts attention-TP groups": lambda rank: (
        rank.tp_rank // rank.attn_tp_size if rank.dp_rank is None else index(rank)
    ),
    "the index begins with 1": lambda rank: index(rank) + 1,
    "the index is counted from the last": lambda rank: rank.kv_stream_count - 1 - index(rank),
    "the index is that of an independent engine": lambda _: 0,
    "the index is a text": lambda rank: str(index(rank)),
    "the index is the device": lambda rank: rank.gpu_id,
}
BROKEN = {
    **{name: (lambda speaks=speaks: RuleGate(speaks, index), ONE) for name, speaks in SPEAKERS.items()},
    **{name: (lambda number=number: RuleGate(first, number), NUMBERS) for name, number in INDICES.items()},
    "the index is dp_rank": (lambda: RuleGate(first, lambda rank: rank.dp_rank), ONE),
    **variants(BrokenGate),
}
"""Broken gates, and a check that finds each. The rank and sizes are right where the name says nothing of them."""


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_gate_is_found(name: str) -> None:
    open_gate, expected = BROKEN[name]
    [check] = [each for each in TOPOLOGY_CHECKS if each.__name__ == expected]
    with pytest.raises(ConformanceError):
        check(open_gate())
