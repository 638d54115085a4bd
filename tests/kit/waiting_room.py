"""A waiting room for tests: it prepares nothing, and each test says which rank is ready for which request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scheduler_components.agreement import AgreedValues, Proposal
from scheduler_components.errors import QueueFullError
from scheduler_components.waiting.agreed_queue import AgreedQueue
from scheduler_components.waiting.held_request import HeldRequest

R = TypeVar("R", bound=HeldRequest)


def every_request(_: HeldRequest) -> bool:
    return True


@dataclass
class ListedRoom(Generic[R]):
    """Records which requests entered and ended. ``wants`` chooses who waits here; it may raise."""

    name: str = "grammar"
    wants: Callable[[R], bool] = every_request
    max_wait_s: float = 100.0
    max_waiting: int = 100
    entered: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    queue: AgreedQueue[R] = field(init=False)

    def __post_init__(self) -> None:
        self.queue = AgreedQueue(name=self.name, max_wait_s=self.max_wait_s, max_waiting=self.max_waiting, num_lanes=2)

    def enter(self, request: R) -> bool:
        if not self.wants(request):
            return False
        if not self.queue.add(request.rid, request):
            raise QueueFullError(self.name, len(self.queue))
        self.entered.append(request.rid)
        return True

    def end(self, request: R) -> None:
        self.queue.cancel(request.rid)
        self.ended.append(request.rid)

    def fill(self, proposal: Proposal) -> None:
        self.queue.fill(proposal)

    def apply(self, step: int, agreed: AgreedValues) -> None:
        self.queue.apply(step, agreed)

    def report_ready(self, rids: Sequence[str]) -> None:
        for rid in rids:
            self.queue.on_ready(rid)
