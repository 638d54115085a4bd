"""Checks of a gate: which ranks of an engine publish, report or lead. Run each of ``TOPOLOGY_CHECKS`` on your own.

A check takes a ``RankGate`` and asks it about every rank of every engine of ``topologies``. If two ranks of one KV
cache publish, readers get each event twice. If both report, a dashboard shows twice the load. If no rank does, the
cache is invisible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler_components.testing.check_trace import CheckTrace, checks_in
from scheduler_components.testing.interfaces import RankGate
from scheduler_components.testing.topology_space import Topology, TopologyRank, topologies

__all__ = ["TOPOLOGY_CHECKS"]


def check_each_cache_has_one_speaker(gate: RankGate) -> None:
    """Exactly one rank speaks for each KV cache, in every topology."""
    for topology in topologies():
        trace = _trace("Exactly one rank speaks for each KV cache", topology)
        for cache in range(topology.num_caches):
            ranks = topology.ranks_of(cache)
            speaking = [rank for rank in ranks if _ask(gate, rank, trace) is not None]
            trace.require(
                len(speaking) == 1,
                f"one rank that speaks for cache {cache}, of {_listed(ranks)}",
                _listed(speaking) or "none",
            )


def check_streams_have_the_numbers_of_their_replicas(gate: RankGate) -> None:
    """A rank that speaks for data-parallel replica r has stream r: readers dial base + r, routers send requests to r.

    So the numbers are 0 to n - 1 across all nodes.
    """
    for topology in topologies():
        trace = _trace("The stream of a replica has the number of the replica", topology)
        for rank, cache in zip(topology.ranks, topology.caches, strict=True):
            found = _ask(gate, rank, trace)
            if found is not None:
                trace.require(
                    type(found) is int and found == cache, f"stream {cache} of {rank}, an int", f"stream {found!r}"
                )


def check_each_rank_decides_alone(gate: RankGate) -> None:
    """A rank decides by its own ranks and sizes, whichever rank was asked before: each is a process of its own."""
    for topology in topologies():
        trace = _trace("A rank decides alone: asking others before changes nothing", topology)
        forward = [_ask(gate, rank, trace) for rank in topology.ranks]
        trace.note("asked the ranks again, the last one first")
        backward = [_ask(gate, rank, trace) for rank in reversed(topology.ranks)]
        for rank, first, second in zip(topology.ranks, forward, reversed(backward), strict=True):
            trace.expect(first, second, f"the answer of {rank}, whether it speaks and its stream")


def _ask(gate: RankGate, rank: TopologyRank, trace: CheckTrace) -> int | None:
    """Ask without recording the question. Only a question that fails is a step of the trace."""
    try:
        return gate(rank)
    except Exception as error:
        trace.note(f"gate({rank}) with {rank.parallel!r}")
        raise trace.failure("no error", f"{type(error).__name__}: {error}") from error


def _trace(title: str, topology: Topology) -> CheckTrace:
    trace = CheckTrace(title)
    trace.note(f"{topology.name}: {len(topology.ranks)} ranks")
    return trace


def _listed(ranks: Sequence[TopologyRank]) -> str:
    return ", ".join(map(str, ranks))


TOPOLOGY_CHECKS: tuple[Callable[[RankGate], None], ...] = checks_in(globals())
"""All checks of a gate."""
