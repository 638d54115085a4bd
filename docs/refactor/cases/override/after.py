"""The override became a call: each definition has its own name, and the component calls it through a port."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class RequestFinisher(Protocol):
    """The members of the scheduler that `Output` uses."""

    def finish(self, rid: str) -> None: ...


@dataclass(slots=True, kw_only=True)
class Output:
    """Sends the output of a request."""

    finisher: RequestFinisher
    send: Callable[[str], None]
    num_finished: int = 0

    def finish_output(self, rid: str) -> None:
        self.num_finished += 1
        self.send(f"{rid} ends")

    def process(self, rid: str, num_tokens: int) -> None:
        self.send(f"{rid} +{num_tokens}")
        if num_tokens == 0:
            self.finisher.finish(rid)


class DraftMixin:
    """Counts drafts, and overrides `finish`."""

    def finish(self: Scheduler, rid: str) -> None:
        self.num_drafts += 1
        self.output.finish_output(rid)


class Scheduler(DraftMixin):
    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send
        self.num_drafts = 0
        self.output = Output(finisher=self, send=self.send)
        self.waiting: list[tuple[str, int]] = []

    def submit(self, rid: str, num_tokens: int) -> None:
        self.waiting.append((rid, num_tokens))

    def step(self) -> None:
        for place, (rid, num_tokens) in enumerate(self.waiting):
            self.output.process(rid, num_tokens)
            self.waiting[place] = (rid, num_tokens - 1)
        self.waiting = [each for each in self.waiting if each[1] >= 0]
        self.send(f"{self.output.num_finished} finished, {self.num_drafts} drafts")
