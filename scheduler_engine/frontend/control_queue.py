"""ControlQueue: execute control requests on every replica and combine their replies.

A control request pauses or continues generation, flushes the cache, updates weights, or releases memory. State and
profiles are read by ``Engine.ask`` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from scheduler_components import ComponentError
from scheduler_components.values import (
    DEFAULT_WEIGHT_VERSION,
    BeginWeightUpdate,
    CheckWeights,
    ContinueGeneration,
    ControlReply,
    ControlRequest,
    EndWeightUpdate,
    IdleControlRequest,
    LoadWeights,
    PauseGeneration,
    PauseMode,
    RollBackWeights,
    control_request_name,
)
from scheduler_engine.engine.messages import LoadAdapter, RankCommand, SubmitControl, UnloadAdapter
from scheduler_engine.frontend.errors import EngineFailedError
from scheduler_engine.frontend.frontend import REPLY_TIMEOUT_S, Frontend


class ControlFailedError(ComponentError):
    """A control request failed on at least one replica; ``problems`` maps replica to cause."""

    def __init__(self, operation: str, problems: Mapping[int, str]) -> None:
        self.operation = operation
        self.problems = dict(problems)
        listed = "; ".join(f"replica {replica}: {problem}" for replica, problem in sorted(problems.items()))
        super().__init__(f"{operation}: {listed}")


@dataclass(slots=True, kw_only=True)
class ControlQueue:
    """Sends each control request to all replicas: one pause at a time, and one weight update at a time.

    A pause does not wait for a weight update that waits for an idle engine: each replica carries the pause out first.

    Replicas are not in lockstep with each other, so this class compares what they must have in common. It commits new
    weights only after every replica has checked its own and all of them have one checksum.

    Attributes:
        frontend: sends to the replicas and receives their replies.
        weight_version: version of the weights that all replicas compute with.
    """

    frontend: Frontend
    weight_version: str = DEFAULT_WEIGHT_VERSION
    _ids: count[int] = field(default_factory=lambda: count(1), init=False, repr=False)
    _pausing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)
    _updating: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)

    async def send(self, request: ControlRequest) -> tuple[ControlReply, ...]:
        """Send a request to every replica and return their replies, by replica.

        Raises:
            ControlFailedError: it failed on a replica; it may have succeeded on others.
            EngineFailedError: the engine has failed, or a replica did not reply in time.
            RankSilentError: a rank is stopped or hangs.
        """
        replies = await self._exchange(request)
        problems = {replica: reply.problem for replica, reply in enumerate(replies) if reply.problem}
        if problems:
            raise ControlFailedError(control_request_name(request), problems)
        return replies

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        """Pause all replicas or none. Return how many requests were aborted or moved back to the waiting queue.

        Raises:
            ControlFailedError: requests were still running at the deadline; all replicas continue.
            EngineFailedError, RankSilentError: as ``send``; the replicas that go on continue.
        """
        async with self._pausing:
            try:
                return sum(reply.num_requests for reply in await self.send(PauseGeneration(mode, deadline_s)))
            except ControlFailedError:
                await self.send(ContinueGeneration())
                raise
            except (ComponentError, asyncio.CancelledError):
                self._undo(ContinueGeneration())
                raise

    async def update_weights(
        self, weight_version: str, parts: Mapping[str, bytes], *, checksum: int | None = None, deadline_s: float = 0.0
    ) -> int:
        """Load new weights on all ranks or on none, and return their checksum.

        Args:
            weight_version: the version name of the new weights.
            parts: tensors by name.
            checksum: the expected checksum; None accepts any that all replicas share.
            deadline_s: longest wait until no request runs.

        Raises:
            ControlFailedError: a rank failed or computed another checksum, and all ranks keep the old weights. If only
                some replicas committed the new weights, the engine has failed.
            EngineFailedError, RankSilentError: as ``send``. Before the commit the replicas keep the old weights.
        """
        async with self._updating:
            try:
                await self.send(BeginWeightUpdate(weight_version, deadline_s))
                for name, content in parts.items():
                    await self.send(LoadWeights(name, content))
                checksum = _common_checksum(await self.send(CheckWeights()), checksum)
            except (ControlFailedError, asyncio.CancelledError):
                await asyncio.shield(self._exchange(RollBackWeights()))  # fails harmlessly without an open session
                raise
            except ComponentError:
                self._undo(RollBackWeights())
                raise
            await self._commit(EndWeightUpdate(checksum))
            self.weight_version = weight_version
            return checksum

    async def _commit(self, request: EndWeightUpdate) -> None:
        """Commit on all replicas. If only some succeed, replicas serve different weights and the engine must fail."""
        try:
            await self.send(request)
        except ControlFailedError as error:
            if len(error.problems) == len(self.frontend.leaders):
                await self._exchange(RollBackWeights())
            else:
                self.frontend.fail(EngineFailedError(f"replicas have different weights: {error}"))
            raise

    async def load_adapter(self, name: str, path: str, *, pinned: bool = False, deadline_s: float) -> None:
        """Register an adapter on all replicas or on none, and load it on all ranks.

        After an error or a cancellation no replica has the name: one that did not reply forgets it when it goes on.

        Raises:
            ControlFailedError: a replica could not register or load it within ``deadline_s``.
            EngineFailedError, RankSilentError: as ``send``.
        """
        operation = f"load adapter {name!r}"
        try:
            replies = await self._send_command(
                operation, lambda request_id: LoadAdapter(request_id, name, path, pinned), deadline_s
            )
        except (ComponentError, asyncio.CancelledError):
            self._forget_adapter(name, range(len(self.frontend.leaders)))
            raise
        problems = {replica: reply.problem for replica, reply in enumerate(replies) if reply.problem}
        if problems:
            self._forget_adapter(name, [replica for replica in range(len(replies)) if replica not in problems])
            raise ControlFailedError(operation, problems)

    def _forget_adapter(self, name: str, replicas: Iterable[int]) -> None:
        """Let replicas unload an adapter that is not on all of them. They execute commands in order."""
        if self.frontend.replies.failure is None:
            for replica in replicas:
                self.frontend.send(replica, UnloadAdapter(next(self._ids), name))

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter on all replicas. Each unloads it when no request uses it.

        Raises:
            ControlFailedError: a replica does not have it.
        """
        operation = f"unload adapter {name!r}"
        replies = await self._send_command(operation, lambda request_id: UnloadAdapter(request_id, name), 0.0)
        problems = {replica: reply.problem for replica, reply in enumerate(replies) if reply.problem}
        if problems:
            raise ControlFailedError(operation, problems)

    def _undo(self, request: ControlRequest) -> None:
        """Let all replicas undo a request whose replies are not awaited any more. They execute requests in order."""
        if self.frontend.replies.failure is None:
            self.frontend.broadcast(SubmitControl(next(self._ids), request))

    async def _exchange(self, request: ControlRequest) -> tuple[ControlReply, ...]:
        deadline_s = request.deadline_s if isinstance(request, PauseGeneration | IdleControlRequest) else 0.0
        name = control_request_name(request)
        return await self._send_command(name, lambda request_id: SubmitControl(request_id, request), deadline_s)

    async def _send_command(
        self, name: str, command: Callable[[int], RankCommand], deadline_s: float
    ) -> tuple[ControlReply, ...]:
        """Send a command with its own number to every replica and return their replies, by replica."""
        frontend, replies = self.frontend, self.frontend.replies
        received = replies.commands.controls
        request_id = next(self._ids)
        keys = [(request_id, replica) for replica in range(len(frontend.leaders))]
        replies.commands.awaited.add(request_id)
        frontend.broadcast(command(request_id))

        def is_done() -> bool:
            return (
                replies.failure is not None
                or bool(frontend.heartbeats.silent_replicas())
                or all(key in received for key in keys)
            )

        try:
            async with asyncio.timeout(deadline_s + REPLY_TIMEOUT_S):
                await replies.wait_until(is_done)
        except TimeoutError:
            late = [replica for _, replica in keys if (request_id, replica) not in received]
            raise EngineFailedError(f"{name}: replicas {late} did not reply within {REPLY_TIMEOUT_S} s") from None
        finally:
            replies.commands.awaited.remove(request_id)
            found = [received.pop(key, None) for key in keys]
        if replies.failure is not None:
            raise EngineFailedError(f"{name}: {replies.failure}")
        complete = tuple(reply for reply in found if reply is not None)
        if len(complete) < len(keys):
            raise next(iter(frontend.heartbeats.silent_replicas().values()))
        return complete


def _common_checksum(replies: tuple[ControlReply, ...], expected: int | None) -> int:
    expected = replies[0].checksum if expected is None else expected
    problems = {
        replica: f"the weights have checksum {reply.checksum:016x}, not {expected:016x}"
        for replica, reply in enumerate(replies)
        if reply.checksum != expected
    }
    if problems:
        raise ControlFailedError(control_request_name(CheckWeights()), problems)
    return expected
