"""The batch is an argument, so the component cannot read the one that the device runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Results:
    """Processes the batch that the device has finished."""

    send: Callable[[str], None]
    num_ended: int = 0

    def process(self, batch: list[tuple[str, int]], num_on_device: int) -> None:
        for rid, left in batch:
            self.send(f"{rid} +1 of {left}")
            if left == 1:
                self.num_ended += 1
        self.send(f"{len(batch)} processed, {num_on_device} on the device")


class Scheduler:
    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send
        self.results = Results(send=self.send)
        self.waiting: list[tuple[str, int]] = []
        self.cur_batch: list[tuple[str, int]] = []

    def submit(self, rid: str, num_tokens: int) -> None:
        self.waiting.append((rid, num_tokens))

    def step(self) -> None:
        going_on = [(rid, left - 1) for rid, left in self.cur_batch if left > 1]
        last_batch = self.cur_batch
        self.cur_batch = going_on + self.waiting[: 2 - len(going_on)]
        self.waiting = self.waiting[2 - len(going_on) :]
        self.results.process(last_batch, len(self.cur_batch))
        self.send(f"{self.results.num_ended} ended")
