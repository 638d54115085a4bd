"""The judge of a log's reader finds each promise broken that holds at any time."""

from __future__ import annotations

import pytest
from kit.log_world import LogWorld

from observability.jetstream.log_follower import LogFollower
from observability.jetstream.log_writer import LogLimits
from observability.kv_stream.log_cursor import LogCursor
from observability.kv_stream.log_records import LogHeartbeat
from scheduler_components.kv_events import EventStream
from worlds.timeline import BrokenPromise

LIMITS = LogLimits(max_msgs=16, max_bytes=4_000, max_age_s=30.0, overhead_bytes=100, buffer_steps=4)


@pytest.fixture
def world() -> LogWorld:
    world = LogWorld(LIMITS)
    world.publish(1)
    world.wait(2.0)
    return world


def test_live_without_heartbeats_breaks_a_promise(world: LogWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogCursor, "on_heartbeat_timeout", lambda _: ())
    world.writer.close()
    with pytest.raises(BrokenPromise, match="LIVE needs heartbeats"):
        world.wait(5.0)
        world.reader.on_disconnected()


def test_requests_without_a_credit_break_a_promise(world: LogWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogFollower, "_take_credit", lambda *_: None)
    world.writer.close()
    with pytest.raises(BrokenPromise, match="bounded requests"):
        for epoch in range(8):
            world.broker.send_heartbeat(LogHeartbeat(bytes([100 + epoch]) * 16, 0, bytes(8), 0))
            world.wait(0.05)


def test_a_writer_that_keeps_every_batch_breaks_a_promise(world: LogWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventStream, "fold_oldest", lambda _: None)
    with pytest.raises(BrokenPromise, match="memory is bounded"):
        for block in range(40):
            world.publish(block)


def test_a_snapshot_that_repeats_its_batches_breaks_a_promise(world: LogWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    encode_chunk = EventStream.encode_chunk

    def encode_thrice(self: EventStream, chunk: list[object], *arguments: object, **options: object) -> object:
        return encode_chunk(self, chunk * 3, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(EventStream, "encode_chunk", encode_thrice)
    with pytest.raises(BrokenPromise, match="a snapshot has the size of the state"):
        for block in range(40):
            world.publish(block)
            world.wait(0.05)
