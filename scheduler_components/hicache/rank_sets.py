"""Which ranks agree with which: attention-CP, then attention-TP, or TP where an engine has neither."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.parallel_state import ParallelState

__all__ = ["RankSets", "domain_of", "groups_in_order", "world_rank_sets"]


def _as_ranks(ranks: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if ranks is None else tuple(ranks)


@attrs.frozen(kw_only=True)
class RankSets:
    """The groups that one rank is in, as global ranks; None for a group that the engine does not have.

    A group of one and a missing group differ: an engine whose attention groups have one rank each (DP attention)
    agrees with nobody, and must not fall back to a TP group that spans other replicas.

    Raises:
        ConfigError: a set names a rank twice, or leaves out ``rank``.
    """

    rank: int
    attn_cp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)
    attn_tp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)
    tp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)

    def __attrs_post_init__(self) -> None:
        for name in ("attn_cp", "attn_tp", "tp"):
            ranks = getattr(self, name)
            if ranks is not None and (self.rank not in ranks or len(set(ranks)) != len(ranks)):
                raise ConfigError(
                    name,
                    ranks,
                    f"is not a set of ranks with rank {self.rank} in it",
                    "give each member once, or None for a group that does not exist",
                )

    @property
    def hops(self) -> tuple[tuple[int, ...], ...]:
        """Groups to reduce over, in order: those of one rank are skipped, equal sets are taken once.

        MIN over the attention-CP group and then over the attention-TP group is MIN over the whole grid of them.
        """
        given = [ranks for ranks in (self.attn_cp, self.attn_tp) if ranks is not None]
        if not given and self.tp is not None:
            given = [self.tp]
        return tuple(dict.fromkeys(tuple(sorted(ranks)) for ranks in given if len(ranks) > 1))


def world_rank_sets(parallel: ParallelState) -> tuple[RankSets, ...]:
    """Return the rank sets of every process of the engine's world, by global rank.

    The global rank is ``pp_rank * tp_size + tp_rank``, the order that ``ParallelState.from_torchrun`` reads. Pipeline
    stages hold different layers and do not agree with each other here.
    """
    world: list[RankSets] = []
    for stage in range(parallel.pp_size):
        peers = [
            ParallelState.from_tp_rank(
                tp_rank,
                tp_size=parallel.tp_size,
                attn_dp_size=parallel.attn_dp_size,
                attn_cp_size=parallel.attn_cp_size,
            )
            for tp_rank in range(parallel.tp_size)
        ]
        first = stage * parallel.tp_size
        world += [_rank_sets_of(me, peers, first) for me in peers]
    return tuple(world)


def _rank_sets_of(me: ParallelState, peers: Sequence[ParallelState], first: int) -> RankSets:
    replica = [peer for peer in peers if peer.attn_dp_rank == me.attn_dp_rank]
    return RankSets(
        rank=first + me.tp_rank,
        attn_cp=[first + peer.tp_rank for peer in replica if peer.attn_tp_rank == me.attn_tp_rank],
        attn_tp=[first + peer.tp_rank for peer in replica if peer.attn_cp_rank == me.attn_cp_rank],
        tp=[first + peer.tp_rank for peer in peers],
    )


def domain_of(rank: int, world: Sequence[RankSets]) -> tuple[int, ...]:
    """Return every rank that ``rank`` agrees with through any number of hops, itself included, sorted."""
    hops_of = {sets.rank: sets.hops for sets in world}
    domain, waiting = {rank}, [rank]
    while waiting:
        reached = {peer for hop in hops_of[waiting.pop()] for peer in hop} - domain
        domain |= reached
        waiting += reached
    return tuple(sorted(domain))


def groups_in_order(world: Sequence[RankSets]) -> tuple[tuple[int, ...], ...]:
    """Return every group of the world once, in an order that all ranks share: hop by hop, then by first rank.

    Whatever makes groups collectively makes them in this order, whether or not the caller is a member.
    """
    most_hops = max((len(sets.hops) for sets in world), default=0)
    ordered: dict[tuple[int, ...], None] = {}
    for at in range(most_hops):
        ordered |= dict.fromkeys(sorted({sets.hops[at] for sets in world if len(sets.hops) > at}))
    return tuple(ordered)
