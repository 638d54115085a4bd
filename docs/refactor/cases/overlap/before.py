"""A loop that processes a batch while the next one runs."""

from __future__ import annotations

from collections.abc import Callable


class ResultMixin:
    """Processes the batch that the device has finished: the one before the current."""

    def process_last(self: Scheduler) -> None:
        for rid, left in self.last_batch:
            self.send(f"{rid} +1 of {left}")
            if left == 1:
                self.num_ended += 1
        self.send(f"{len(self.last_batch)} processed, {len(self.cur_batch)} on the device")


class Scheduler(ResultMixin):
    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send
        self.waiting: list[tuple[str, int]] = []
        self.last_batch: list[tuple[str, int]] = []
        self.cur_batch: list[tuple[str, int]] = []
        self.num_ended = 0

    def submit(self, rid: str, num_tokens: int) -> None:
        self.waiting.append((rid, num_tokens))

    def step(self) -> None:
        going_on = [(rid, left - 1) for rid, left in self.cur_batch if left > 1]
        self.last_batch = self.cur_batch
        self.cur_batch = going_on + self.waiting[: 2 - len(going_on)]
        self.waiting = self.waiting[2 - len(going_on) :]
        self.process_last()
        self.send(f"{self.num_ended} ended")
