"""A simulated broker with one writer and one reader, for tests of what they do."""

from __future__ import annotations

from worlds.jetstream_actor import LogReaderActor, LogWriterActor, Truth
from worlds.simulated_broker import SimulatedBroker
from worlds.timeline import Timeline

from observability.jetstream.log_writer import LogLimits
from scheduler_components import BlockStored


class LogWorld:
    """A broker, one writer and one reader."""

    def __init__(self, limits: LogLimits) -> None:
        self.timeline = Timeline(seed=1)
        self.broker = SimulatedBroker(self.timeline, limits)
        self.truth: Truth = {}
        self.writer = self.add_writer(0)
        self.reader = LogReaderActor(self.timeline, self.broker, self.truth, "reader")
        self.reader.start()

    def add_writer(self, number: int) -> LogWriterActor:
        writer = LogWriterActor(self.timeline, self.broker, number, self.truth)
        writer.start()
        return writer

    def wait(self, duration_s: float) -> None:
        self.timeline.run_until(self.timeline.now_s + duration_s)

    def publish(self, *blocks: int) -> None:
        for block in blocks:
            self.writer.publish(BlockStored((block,), None, (block,), 1, None))
