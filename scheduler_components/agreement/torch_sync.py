"""Agreement over torch.distributed: each thread has its own gloo groups, with a roll call after a failure.

Separate groups do not interleave with the engine's NCCL traffic or with other threads. Every rank of the world creates
them with ``new_group`` in one order. ``use_local_synchronization`` would not involve non-members, but its group names
repeat after a close, and a reopened group then finds stale addresses and hangs (measured with torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic

from scheduler_components._internal.extras import naming_extras
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.rank_groups import RankGroups, agreeing_ranks, ordered_groups
from scheduler_components.agreement.sync import SYNC_CALL_INTS, SyncCall, describe_calls, pack_call, unpack_call
from scheduler_components.errors import ConfigError, StartError, SyncDivergenceError, SyncTimeoutError, first_line

with naming_extras:
    import torch
    import torch.distributed as dist

__all__ = ["RollCall", "TorchSyncGroup", "open_torch_groups", "wait_for_collective"]

_POLL_S = 0.25
"""How often a waiting rank calls ``on_wait``: half the interval of a heartbeat."""


def _keep_waiting() -> None:
    """The default of ``on_wait``."""


def wait_for_collective(work: dist.Work, *, timeout_s: float, on_wait: Callable[[], None]) -> None:
    """Wait for a collective of gloo, and call ``on_wait`` four times per second meanwhile.

    What ``on_wait`` raises ends the wait, for example because the process must stop. The collective then stays in
    flight until gloo's own timeout. Until then a thread of gloo waits, so destroying its group blocks.

    Raises:
        RuntimeError: gloo failed, or the other ranks did not join within ``timeout_s``.
    """
    deadline_s = monotonic() + timeout_s
    while True:
        try:
            work.wait(timedelta(seconds=max(0.01, min(_POLL_S, deadline_s - monotonic()))))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises what gloo reports, unless it was completed between the two calls
                return
            if monotonic() >= deadline_s:
                raise
        on_wait()


@dataclass(slots=True, kw_only=True)
class RollCall:
    """Determines after a failed collective which of the agreeing ranks still answer, and which call each of them makes.

    A surviving rank may be waiting in another group and answer one timeout later, so the roll call waits for two
    timeouts. An error therefore reaches every survivor within three timeouts, or sooner if a dead peer's connections
    are closed.
    """

    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    timeout_s: float

    def failure(self, call: SyncCall, cause: RuntimeError) -> SyncTimeoutError | SyncDivergenceError:
        """Return the error for ``call``: the missing ranks, or the different calls of the ranks."""
        present = self._answers(call)
        missing = tuple(rank for rank in self.ranks if rank not in present)
        if not missing and len({(found.number, found.step, found.operation) for found in present.values()}) > 1:
            return SyncDivergenceError(call.number, describe_calls(present.values()))
        return SyncTimeoutError(call.operation, call.step, missing, self.timeout_s, first_line(cause))

    def _answers(self, call: SyncCall) -> dict[int, SyncCall]:
        """Send this rank's call to all peers and return the calls of the ranks that answer."""
        peers = [rank for rank in self.ranks if rank != self.rank]
        mine = torch.tensor(pack_call(call), dtype=torch.int64)
        # Post receives first: an answer that arrives before its receive is lost if the peer then exits.
        receives: dict[int, tuple[dist.Work | None, torch.Tensor]] = {}
        for peer in peers:
            answer = torch.zeros(SYNC_CALL_INTS, dtype=torch.int64)
            try:
                receives[peer] = dist.irecv(answer, peer, group=self.group), answer
            except RuntimeError:  # gloo: the peer has closed its connection, so it is missing
                continue
        sends = [send for peer in peers if (send := self._send(mine, peer)) is not None]
        deadline_s = monotonic() + 2 * self.timeout_s  # common to all peers
        present = {self.rank: call}
        for peer, (work, answer) in receives.items():
            if work is not None and _done(work, deadline_s):
                present[peer] = unpack_call(answer.tolist())
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
    """The ``SyncGroup`` of one gloo group. Use and close it on one thread."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    roll_call: RollCall
    timeout_s: float
    on_wait: Callable[[], None] = _keep_waiting
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
            roll_call, self.roll_call.group = self.roll_call.group, None
            with ExitStack() as closing:  # the second group is destroyed even if the first one cannot be
                closing.callback(_destroy, roll_call)
                closing.callback(_destroy, self.group)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is not a member of its group"
        wait_for_collective(work, timeout_s=self.timeout_s, on_wait=self.on_wait)


def _destroy(group: dist.ProcessGroup | None) -> None:
    # destroy_process_group(None) would destroy the default group of the engine.
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)


def open_torch_groups(
    world: Sequence[RankGroups],
    names: Sequence[str],
    *,
    timeout_s: float = 60.0,
    on_wait: Callable[[], None] = _keep_waiting,
) -> dict[str, ParallelGroups]:
    """Create one ``ParallelGroups`` per name, each with its own gloo groups, for one thread each.

    Every process of the torch.distributed world calls this with the same arguments at the same point of its start, from
    its main thread. This includes ranks that agree with no other rank.

    Args:
        world: the groups of every rank, as ``world_rank_groups`` returns them.
        names: one name per thread.
        timeout_s: longest wait for the other ranks in one collective.
        on_wait: called four times per second while a rank waits for others. What it raises ends the wait, so a process
            that must stop does not wait for a dead rank. It must not use the groups again, and closing them blocks up
            to ``timeout_s``: leave with ``os._exit``. The roll call after a failure does not call it.

    Raises:
        ConfigError: torch.distributed is not initialised, or its world has another size.
        StartError: the groups could not be created, usually because a rank did not join.
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
            "give the groups of every rank",
        )
    rank = dist.get_rank()
    try:
        return {name: _open_groups(rank, world, timeout_s, on_wait) for name in names}
    except RuntimeError as error:
        raise StartError(
            "gloo groups", first_line(error), "start every rank of the world with the same arguments"
        ) from error


def _open_groups(
    rank: int, world: Sequence[RankGroups], timeout_s: float, on_wait: Callable[[], None]
) -> ParallelGroups:
    hop_groups = {ranks: _new_group(ranks, timeout_s) for ranks in ordered_groups(world)}
    mine = next(each for each in world if each.rank == rank)
    replicas = sorted({agreeing_ranks(each.rank, world) for each in world})
    roll_calls = {ranks: _new_group(ranks, timeout_s) for ranks in replicas if len(ranks) > 1}
    replica = agreeing_ranks(rank, world)
    roll_call = RollCall(rank=rank, ranks=replica, group=roll_calls.get(replica), timeout_s=timeout_s)
    return ParallelGroups(
        rank=rank,
        groups=tuple(
            TorchSyncGroup(
                ranks=ranks, group=hop_groups[ranks], roll_call=roll_call, timeout_s=timeout_s, on_wait=on_wait
            )
            for ranks in mine.reduce_groups
        ),
    )


def _new_group(ranks: tuple[int, ...], timeout_s: float) -> dist.ProcessGroup | None:
    group: dist.ProcessGroup | None = dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group
