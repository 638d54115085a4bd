"""The groups of global ranks that agree with each other, computed from an engine's parallel sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.parallel_state import ParallelState

__all__ = ["RankGroups", "agreeing_ranks", "ordered_groups", "world_rank_groups"]


def _as_ranks(ranks: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if ranks is None else tuple(ranks)


@attrs.frozen(kw_only=True)
class RankGroups:
    """The groups that one rank belongs to, as global ranks; None for a group that the engine does not have.

    Ranks reduce over attention-CP, then attention-TP, or over TP if the engine has neither; then over PP, the ranks at
    the same position of every pipeline stage.

    A group of one rank differs from a missing group: an engine whose attention groups have one rank each (DP attention)
    agrees with no other rank, and must not fall back to a TP group that spans other replicas.

    Raises:
        ConfigError: a group names a rank twice, or does not contain ``rank``.
    """

    rank: int
    attn_cp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)
    attn_tp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)
    tp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)
    pp: tuple[int, ...] | None = attrs.field(default=None, converter=_as_ranks)

    def __attrs_post_init__(self) -> None:
        for name in ("attn_cp", "attn_tp", "tp", "pp"):
            ranks = getattr(self, name)
            if ranks is not None and (self.rank not in ranks or len(set(ranks)) != len(ranks)):
                raise ConfigError(
                    name,
                    ranks,
                    f"is not a set of ranks that contains rank {self.rank}",
                    "list each member once, or give None for a group that does not exist",
                )

    @property
    def reduce_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups to reduce over, in order. Groups of one rank are skipped, and equal groups appear once."""
        given = [ranks for ranks in (self.attn_cp, self.attn_tp) if ranks is not None]
        if not given and self.tp is not None:
            given = [self.tp]
        if self.pp is not None:
            given.append(self.pp)
        return tuple(dict.fromkeys(tuple(sorted(ranks)) for ranks in given if len(ranks) > 1))


def world_rank_groups(parallel: ParallelState) -> tuple[RankGroups, ...]:
    """Return the groups of every rank of the engine's world, indexed by ``ParallelState.world_rank``."""
    world: list[RankGroups] = []
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
        world += [_groups_of(me, peers, first, parallel.pp_size) for me in peers]
    return tuple(world)


def _groups_of(me: ParallelState, peers: Sequence[ParallelState], first: int, pp_size: int) -> RankGroups:
    replica = [peer for peer in peers if peer.attn_dp_rank == me.attn_dp_rank]
    return RankGroups(
        rank=first + me.tp_rank,
        attn_cp=[first + peer.tp_rank for peer in replica if peer.attn_tp_rank == me.attn_tp_rank],
        attn_tp=[first + peer.tp_rank for peer in replica if peer.attn_cp_rank == me.attn_cp_rank],
        tp=[first + peer.tp_rank for peer in peers],
        pp=[stage * me.tp_size + me.tp_rank for stage in range(pp_size)],
    )


def agreeing_ranks(rank: int, world: Sequence[RankGroups]) -> tuple[int, ...]:
    """Return all ranks that ``rank`` is connected to through reduce groups, itself included, in ascending order."""
    groups_of = {each.rank: each.reduce_groups for each in world}
    connected, waiting = {rank}, [rank]
    while waiting:
        reached = {peer for group in groups_of[waiting.pop()] for peer in group} - connected
        connected |= reached
        waiting += reached
    return tuple(sorted(connected))


def ordered_groups(world: Sequence[RankGroups]) -> tuple[tuple[int, ...], ...]:
    """Return every reduce group of the world once, in an order that all ranks share: by hop, then by first rank.

    Create process groups in this order on every rank, including the ranks that are not members.
    """
    max_hops = max((len(each.reduce_groups) for each in world), default=0)
    ordered: dict[tuple[int, ...], None] = {}
    for hop in range(max_hops):
        ordered |= dict.fromkeys(sorted({each.reduce_groups[hop] for each in world if len(each.reduce_groups) > hop}))
    return tuple(ordered)
