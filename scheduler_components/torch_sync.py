"""Agreement over torch.distributed: every thread has gloo groups of its own, and a roll call when one fails.

Dedicated groups never interleave with the engine's NCCL traffic or with another thread's. They are made with
``new_group`` on every rank of the world in one order; ``use_local_synchronization`` would spare the non-members, but
its group names repeat after a close, and a reopened group then finds stale addresses and hangs (measured, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist

from scheduler_components.agreement import ParallelGroups
from scheduler_components.errors import ConfigError, StartError, SyncDivergenceError, SyncTimeoutError
from scheduler_components.rank_groups import RankGroups, agreeing_ranks, ordered_groups
from scheduler_components.values import SYNC_CALL_INTS, SyncCall, describe_calls

__all__ = ["RollCall", "TorchSyncGroup", "open_torch_groups"]


@dataclass(slots=True, kw_only=True)
class RollCall:
    """Asks, once, after a failed collective, which ranks of the domain are still there and where they stand.

    A survivor may be waiting in another group of the domain and come here one timeout later, so the call waits twice
    ``timeout_s``: an error reaches every survivor within three timeouts, sooner where a peer's death closed its
    connections.
    """

    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    timeout_s: float

    def failure(self, call: SyncCall, cause: RuntimeError) -> SyncTimeoutError | SyncDivergenceError:
        """Return the error to raise for ``call``: who is missing, or where the ranks parted."""
        present = self._answers(call)
        missing = tuple(rank for rank in self.ranks if rank not in present)
        if not missing and len({(found.number, found.step, found.operation) for found in present.values()}) > 1:
            return SyncDivergenceError(call.number, describe_calls(present.values()))
        return SyncTimeoutError(call.operation, call.step, missing, self.timeout_s, str(cause).partition("\n")[0])

    def _answers(self, call: SyncCall) -> dict[int, SyncCall]:
        """Send this rank's place to all peers and return the places of those who answer."""
        peers = [rank for rank in self.ranks if rank != self.rank]
        mine = torch.tensor(call.to_ints(), dtype=torch.int64)
        # Receives are posted first: an answer that comes before its receive is lost when the peer then exits.
        receives: dict[int, tuple[dist.Work | None, torch.Tensor]] = {}
        for peer in peers:
            answer = torch.zeros(SYNC_CALL_INTS, dtype=torch.int64)
            try:
                receives[peer] = dist.irecv(answer, peer, group=self.group), answer
            except RuntimeError:  # gloo: the peer has closed its connection; it is missing
                continue
        sends = [send for peer in peers if (send := self._send(mine, peer)) is not None]
        deadline_s = monotonic() + 2 * self.timeout_s  # one for all peers, however many are missing
        present = {self.rank: call}
        for peer, (work, answer) in receives.items():
            if work is not None and _done(work, deadline_s):
                present[peer] = SyncCall.from_ints(answer.tolist())
        for send in sends:
            _done(send, deadline_s)
        return present

    def _send(self, mine: torch.Tensor, peer: int) -> dist.Work | None:
        try:
            return dist.isend(mine, peer, group=self.group)
        except RuntimeError:  # gloo: the peer has closed its connection
            return None


def _done(work: dist.Work, deadline_s: float) -> bool:
    left_s = max(0.01, deadline_s - monotonic())  # 0 would mean the group's own timeout
    try:
        return bool(work.wait(timedelta(seconds=left_s)))
    except RuntimeError:  # gloo: timed out, or the peer has closed its connection
        return False


@dataclass(slots=True, kw_only=True)
class TorchSyncGroup:
    """One gloo group of one thread. Use it, and close it, on one thread at a time."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    roll_call: RollCall
    timeout_s: float
    is_open: bool = field(default=True, init=False)

    def all_reduce_min(self, values: Sequence[int], call: SyncCall) -> list[int]:
        packed = torch.tensor(values, dtype=torch.int64)
        try:
            self._wait(dist.all_reduce(packed, op=dist.ReduceOp.MIN, group=self.group, async_op=True))
        except RuntimeError as error:
            raise self.roll_call.failure(call, error) from error
        return packed.tolist()

    def all_gather(self, values: Sequence[int], call: SyncCall) -> list[int]:
        packed = torch.tensor(values, dtype=torch.int64)
        gathered = [torch.empty_like(packed) for _ in self.ranks]
        try:
            self._wait(dist.all_gather(gathered, packed, group=self.group, async_op=True))
        except RuntimeError as error:
            raise self.roll_call.failure(call, error) from error
        return torch.cat(gathered).tolist()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            _destroy(self.group)
            if self.roll_call.group is not None:
                _destroy(self.roll_call.group)
                self.roll_call.group = None

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is not a member of its own group"
        work.wait(timedelta(seconds=self.timeout_s))


def _destroy(group: dist.ProcessGroup | None) -> None:
    # destroy_process_group(None) would destroy the engine's whole world.
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)


def open_torch_groups(
    world: Sequence[RankGroups], names: Sequence[str], *, timeout_s: float = 60.0
) -> dict[str, ParallelGroups]:
    """Make one domain per name, each with gloo groups of its own: one for the scheduler, one per background thread.

    Every process of the torch.distributed world calls this, with the same arguments, at the same point of its
    start (or of attaching a storage backend), from its main thread; also ranks that agree with nobody.

    Args:
        world: rank sets of every process, as ``world_rank_groups`` gives them.
        names: one per thread that will agree.
        timeout_s: longest wait for the other ranks in one collective.

    Raises:
        ConfigError: torch.distributed is not initialised, or its world is not ``world``.
        StartError: the groups could not be made, usually because a rank did not come.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "torch.distributed", None, "is not initialised", "call torch.distributed.init_process_group first"
        )
    if dist.get_world_size() != len(world):
        raise ConfigError(
            "world",
            len(world),
            f"is not torch.distributed's world of {dist.get_world_size()}",
            "give every rank's sets",
        )
    rank = dist.get_rank()
    try:
        return {name: _open_domain(rank, world, timeout_s) for name in names}
    except RuntimeError as error:
        raise StartError(
            "gloo groups", str(error).partition("\n")[0], "see that every rank of the world starts, in the same way"
        ) from error


def _open_domain(rank: int, world: Sequence[RankGroups], timeout_s: float) -> ParallelGroups:
    hop_groups = {ranks: _new_group(ranks, timeout_s) for ranks in ordered_groups(world)}
    mine = next(sets for sets in world if sets.rank == rank)
    domains = sorted({agreeing_ranks(sets.rank, world) for sets in world})
    roll_calls = {ranks: _new_group(ranks, timeout_s) for ranks in domains if len(ranks) > 1}
    domain = agreeing_ranks(rank, world)
    roll_call = RollCall(rank=rank, ranks=domain, group=roll_calls.get(domain), timeout_s=timeout_s)
    return ParallelGroups(
        rank=rank,
        groups=tuple(
            TorchSyncGroup(ranks=ranks, group=hop_groups[ranks], roll_call=roll_call, timeout_s=timeout_s)
            for ranks in mine.reduce_groups
        ),
    )


def _new_group(ranks: tuple[int, ...], timeout_s: float) -> dist.ProcessGroup | None:
    group: dist.ProcessGroup | None = dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group
