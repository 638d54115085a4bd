"""Writers and readers of a log do with a broker what the edges do: one writer owns the stream, and readers see silence.

``test_jetstream_part`` judges them under faults.
"""

from __future__ import annotations

import pytest
from kit.log_world import LogWorld

from observability.jetstream.log_writer import LogLimits
from observability.kv_stream import StreamState
from worlds.jetstream_actor import LogReaderActor
from worlds.timeline import BrokenPromise

LIMITS = LogLimits(max_msgs=16, max_bytes=4_000, max_age_s=30.0, overhead_bytes=100)


@pytest.fixture
def world() -> LogWorld:
    return LogWorld(LIMITS)


def test_a_reader_follows_a_writer(world: LogWorld) -> None:
    world.publish(1, 2)
    world.wait(2.0)
    assert world.reader.state is StreamState.LIVE
    world.publish(3)
    world.wait(0.1)
    assert world.reader.blocks == {1, 2, 3} == world.writer.held


def test_of_two_writers_the_older_one_stops(world: LogWorld) -> None:
    world.publish(1)
    world.wait(2.0)
    newer = world.add_writer(1)
    world.wait(2.0)
    assert world.writer.ownership.is_superseded and not newer.ownership.is_superseded
    assert world.reader.state is StreamState.LIVE and world.reader.follower.cursor.epoch == newer.core.epoch


def test_what_is_deleted_is_created_again(world: LogWorld) -> None:
    world.publish(1)
    world.wait(2.0)
    world.broker.delete_log()
    world.broker.delete_pointer_bucket()
    world.broker.delete_snapshot_bucket()
    world.publish(2)
    world.wait(6.0)
    late = LogReaderActor(world.timeline, world.broker, world.truth, "late")
    late.start()
    world.wait(2.0)
    assert late.state is StreamState.LIVE and late.blocks == {1, 2}


def test_without_heartbeats_no_reader_is_live_and_in_the_end_its_view_is_empty(world: LogWorld) -> None:
    world.publish(1)
    world.wait(2.0)
    world.writer.close()
    world.wait(2.1)
    assert world.reader.state is StreamState.CONNECTING and world.reader.blocks == {1}
    world.wait(6.0)
    assert world.reader.state is StreamState.DEAD and not world.reader.blocks


def test_a_lost_connection_is_used_again(world: LogWorld) -> None:
    world.publish(1)
    world.wait(2.0)
    for actor in (world.writer, world.reader):
        actor.on_disconnected()
    world.publish(2)
    world.wait(1.0)
    assert world.reader.state is StreamState.CONNECTING and world.writer.core.num_waiting == 1
    for actor in (world.writer, world.reader):
        actor.on_reconnected()
    world.wait(1.0)
    assert world.reader.state is StreamState.LIVE and world.reader.blocks == {1, 2}


def test_a_wrong_view_that_is_live_breaks_a_promise(world: LogWorld) -> None:
    world.publish(1)
    world.wait(2.0)
    world.truth.clear()
    with pytest.raises(BrokenPromise, match="LIVE"):
        world.wait(1.0)
