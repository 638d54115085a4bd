"""The space of topologies over which the checks of gates and port plans run.

It is every combination of data parallelism, attention-CP, attention-TP and pipeline stages of 1 to 3 with at most 24
ranks, in each form of data parallelism, and on one or several nodes. Ranks that differ in attention-DP, or in data
parallelism without DP attention, hold different KV caches. Ranks that differ in CP, TP or PP hold parts or copies of
one.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Literal, TypeAlias

import attrs

from scheduler_components.parallel_state import ParallelState

__all__ = ["DataParallelism", "Topology", "TopologyRank", "make_topology", "topologies"]

DataParallelism: TypeAlias = Literal["plain", "plain, dp_rank None", "attention", "attention, dp_rank None"]
"""How the replicas run: as worlds of their own, or under DP attention in one world. ``dp_rank`` may be None in an
engine of one replica, and under DP attention."""

_MAX_RANKS = 24
_NUM_GPUS_PER_NODE = 8


@attrs.frozen(kw_only=True)
class TopologyRank:
    """One rank of an engine, as its own process knows it.

    Attributes:
        parallel: its ranks and sizes. ``gpu_id`` is the number of its device on its node.
        node_rank: the node of the rank, from 0.
        num_nodes: the nodes of the engine.
    """

    parallel: ParallelState
    node_rank: int = 0
    num_nodes: int = 1

    def __str__(self) -> str:
        node = f" on node {self.node_rank}" if self.num_nodes > 1 else ""
        return f"{self.parallel}{node}"


@attrs.frozen(kw_only=True)
class Topology:
    """All ranks of one engine, and the KV cache that each of them holds a part or copy of.

    Attributes:
        name: its sizes.
        ranks: every rank.
        caches: the number of the cache of each rank, which is the number of its data-parallel replica.
        num_caches: the number of caches, and therefore of streams.
    """

    name: str
    ranks: tuple[TopologyRank, ...]
    caches: tuple[int, ...]
    num_caches: int

    def ranks_of(self, cache: int) -> tuple[TopologyRank, ...]:
        """Return the ranks that hold a part or copy of a cache."""
        return tuple(rank for rank, held in zip(self.ranks, self.caches, strict=True) if held == cache)


def make_topology(
    *,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    mode: DataParallelism = "plain",
    num_nodes: int = 1,
    first_gpu: int = 0,
) -> Topology:
    """Make an engine. Its ranks are spread evenly over the nodes: replica by replica, stage by stage.

    Args:
        dp, cp, tp, pp: replicas, attention-CP ranks, attention-TP ranks and pipeline stages.
        mode: how the replicas run.
        num_nodes: divides the number of ranks. Several nodes also divide the experts of the model among all ranks of a
            stage.
        first_gpu: the first device of the engine on its first node, which other engines may share.
    """
    is_attention = mode.startswith("attention")
    tp_size = (dp if is_attention else 1) * cp * tp
    worlds = 1 if is_attention else dp
    num_per_node = worlds * pp * tp_size // num_nodes
    moe_dp_size = 2 if num_nodes > 1 and tp_size % 2 == 0 else 1
    ranks, caches = list[TopologyRank](), list[int]()
    for number, (world, pp_rank, tp_rank) in enumerate(product(range(worlds), range(pp), range(tp_size))):
        parallel = ParallelState.from_tp_rank(
            tp_rank,
            tp_size=tp_size,
            attn_dp_size=dp if is_attention else 1,
            attn_cp_size=cp,
            moe_ep_size=tp_size // moe_dp_size if num_nodes > 1 else 1,
            moe_dp_size=moe_dp_size,
            pp_rank=pp_rank,
            pp_size=pp,
            dcp_size=2 if first_gpu and tp % 2 == 0 else 1,
            gpu_id=first_gpu + number % num_per_node,
            **({} if is_attention else {"dp_size": dp, "dp_rank": world}),
        )
        if mode.endswith("None"):
            parallel = attrs.evolve(parallel, dp_rank=None)
        ranks.append(TopologyRank(parallel=parallel, node_rank=number // num_per_node, num_nodes=num_nodes))
        caches.append(tp_rank // (cp * tp) if is_attention else world)
    where = f"{num_nodes} nodes" if num_nodes > 1 else f"1 node from GPU {first_gpu}"
    name = f"DP {dp} ({mode}) x CP {cp} x TP {tp} x PP {pp} on {where}"
    return Topology(name=name, ranks=tuple(ranks), caches=tuple(caches), num_caches=dp)


@lru_cache(maxsize=1)
def topologies() -> tuple[Topology, ...]:
    """Return the whole space, small engines first, and a few large ones of the field: some 600 engines."""
    found = [
        make_topology(dp=dp, cp=cp, tp=tp, pp=pp, mode=mode, num_nodes=num_nodes, first_gpu=first_gpu)
        for dp, cp, tp, pp in product((1, 2, 3), repeat=4)
        if dp * cp * tp * pp <= _MAX_RANKS
        for mode in _modes(dp)
        for num_nodes, first_gpu in _places(dp * cp * tp * pp)
    ]
    found.sort(key=lambda topology: len(topology.ranks))
    found += [
        make_topology(tp=_NUM_GPUS_PER_NODE),
        make_topology(dp=_NUM_GPUS_PER_NODE),
        make_topology(dp=16, mode="attention", num_nodes=2),
        make_topology(dp=16, mode="attention, dp_rank None", num_nodes=4),
        make_topology(dp=4, cp=2, tp=2, pp=2, mode="attention, dp_rank None", num_nodes=4),
    ]
    return tuple(found)


def _modes(dp: int) -> tuple[DataParallelism, ...]:
    return ("plain", "plain, dp_rank None") if dp == 1 else ("plain", "attention", "attention, dp_rank None")


def _places(num_ranks: int) -> list[tuple[int, int]]:
    """Return (number of nodes, first GPU) pairs: alone on a node, behind another engine, over several nodes."""
    several = [(num_nodes, 0) for num_nodes in (2, 3) if num_ranks % num_nodes == 0]
    return [(1, 0), (1, _NUM_GPUS_PER_NODE), *several]
