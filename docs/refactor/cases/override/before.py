"""A mixin that overrides a method of another mixin."""

from __future__ import annotations

from collections.abc import Callable


class OutputMixin:
    """Sends the output of a request."""

    def finish(self: Scheduler, rid: str) -> None:
        self.num_finished += 1
        self.send(f"{rid} ends")

    def process(self: Scheduler, rid: str, num_tokens: int) -> None:
        self.send(f"{rid} +{num_tokens}")
        if num_tokens == 0:
            self.finish(rid)


class DraftMixin:
    """Counts drafts, and overrides `finish`."""

    def finish(self: Scheduler, rid: str) -> None:
        self.num_drafts += 1
        super().finish(rid)


class Scheduler(DraftMixin, OutputMixin):
    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send
        self.num_finished = 0
        self.num_drafts = 0
        self.waiting: list[tuple[str, int]] = []

    def submit(self, rid: str, num_tokens: int) -> None:
        self.waiting.append((rid, num_tokens))

    def step(self) -> None:
        for place, (rid, num_tokens) in enumerate(self.waiting):
            self.process(rid, num_tokens)
            self.waiting[place] = (rid, num_tokens - 1)
        self.waiting = [each for each in self.waiting if each[1] >= 0]
        self.send(f"{self.num_finished} finished, {self.num_drafts} drafts")
