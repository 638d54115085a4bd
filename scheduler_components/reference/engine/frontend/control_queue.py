"""Orders at the front: given to every replica, and how they ended on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from scheduler_components import ComponentError
from scheduler_components.control_requests import (
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
from scheduler_components.reference.engine.frontend.errors import EngineFailedError
from scheduler_components.reference.engine.frontend.frontend import Frontend

__all__ = ["ControlQueue", "ControlFailedError"]

_ANSWER_DEADLINE_S = 30.0  # beyond the order's own


class ControlFailedError(ComponentError):
    """An order was not carried out on every replica; ``problems`` says why, by replica."""

    def __init__(self, operation: str, problems: Mapping[int, str]) -> None:
        self.operation = operation
        self.problems = dict(problems)
        listed = "; ".join(f"replica {replica}: {problem}" for replica, problem in sorted(problems.items()))
        super().__init__(f"{operation}: {listed}")


@dataclass(slots=True, kw_only=True)
class ControlQueue:
    """Gives orders to all replicas, one order at a time.

    Replicas are not in lockstep with each other, so what they must have in common is compared here: new weights are
    committed when every replica has checked its own, and all have one checksum.

    Attributes:
        front: the way to the replicas.
        weight_version: of the weights that all replicas compute with.
    """

    front: Frontend
    weight_version: str = DEFAULT_WEIGHT_VERSION
    _ids: count[int] = field(default_factory=lambda: count(1), init=False, repr=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)

    async def send(self, order: ControlRequest) -> tuple[ControlReply, ...]:
        """Give an order to every replica; returns their answers.

        Raises:
            ControlFailedError: a replica has not carried it out; others may have.
            EngineFailedError: the engine has ended, or a replica did not answer in time.
            RankSilentError: a rank hangs.
        """
        answers = await self._ask(order)
        problems = {replica: answer.problem for replica, answer in enumerate(answers) if answer.problem}
        if problems:
            raise ControlFailedError(control_request_name(order), problems)
        return answers

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        """Pause every replica or none; returns how many requests were ended or put back.

        Raises:
            ControlFailedError: requests still ran at the deadline; all replicas go on.
        """
        async with self._turn:
            try:
                return sum(answer.num_requests for answer in await self.send(PauseGeneration(mode, deadline_s)))
            except ControlFailedError:
                await self.send(ContinueGeneration())
                raise

    async def update_weights(
        self, weight_version: str, parts: Mapping[str, bytes], *, checksum: int | None = None, deadline_s: float = 0.0
    ) -> int:
        """Bring new weights to every rank, or to none; returns their checksum.

        Args:
            weight_version: what they are called from then on.
            parts: by name.
            checksum: what all of them must have; None to take what they have, if it is one.
            deadline_s: how long to wait until nothing runs.

        Raises:
            ControlFailedError: a rank could not, or has other weights; all keep the old ones. Where some have the new
                ones already, the engine has failed.
        """
        async with self._turn:
            try:
                await self.send(BeginWeightUpdate(weight_version, deadline_s))
                for name, content in parts.items():
                    await self.send(LoadWeights(name, content))
                checksum = self._one_checksum(await self.send(CheckWeights()), checksum)
            except (ControlFailedError, asyncio.CancelledError):
                await asyncio.shield(self._ask(RollBackWeights()))  # refused where no session is open (any more)
                raise
            await self._end_update(EndWeightUpdate(checksum))
            self.weight_version = weight_version
            return checksum

    async def _end_update(self, order: EndWeightUpdate) -> None:
        """Commit on all replicas. Where only some could, the engine has two models, and must not go on."""
        try:
            await self.send(order)
        except ControlFailedError as error:
            if len(error.problems) == len(self.front.leaders):
                await self._ask(RollBackWeights())
            else:
                self.front.fail(EngineFailedError(f"replicas have different weights: {error}"))
            raise

    @staticmethod
    def _one_checksum(answers: tuple[ControlReply, ...], wanted: int | None) -> int:
        wanted = answers[0].checksum if wanted is None else wanted
        others = {at: each.checksum for at, each in enumerate(answers) if each.checksum != wanted}
        if others:
            problems = {
                at: f"the weights have checksum {found:016x}, not {wanted:016x}" for at, found in others.items()
            }
            raise ControlFailedError(control_request_name(CheckWeights()), problems)
        return wanted

    async def _ask(self, order: ControlRequest) -> tuple[ControlReply, ...]:
        front, board = self.front, self.front.board
        order_id = next(self._ids)
        keys = [(order_id, replica) for replica in range(len(front.leaders))]
        front.broadcast_control(order_id, order)

        def is_over() -> bool:
            return (
                board.failure is not None
                or bool(front.heartbeats.silent_replicas())
                or all(key in found for key in keys)
            )

        found = board.answers.orders
        deadline_s = order.deadline_s if isinstance(order, PauseGeneration | IdleControlRequest) else 0.0
        try:
            async with asyncio.timeout(deadline_s + _ANSWER_DEADLINE_S):
                await board.wait_until(is_over)
        except TimeoutError:
            late = [replica for key in keys if key not in found for replica in key[1:]]
            problem = f"{control_request_name(order)}: replicas {late} have not answered in {_ANSWER_DEADLINE_S} s"
            raise EngineFailedError(problem) from None
        answers = [found.pop(key, None) for key in keys]
        if board.failure is not None:
            raise EngineFailedError(f"{control_request_name(order)}: {board.failure}")
        told = tuple(answer for answer in answers if answer is not None)
        if len(told) < len(keys):
            raise next(iter(front.heartbeats.silent_replicas().values()))
        return told
