"""What a relay publishes is what it knows, also of a source that it has to follow again.

``tests/observability/relay/test_stream_model.py`` searches for histories that break this.
"""

from __future__ import annotations

from functools import partial

import pytest

from observability.kv_stream import StreamListener, StreamState, Tier
from worlds import BrokenPromise, PublisherActor, PublisherShape, SubscriberActor
from worlds.recovery_model import RecoverySimulation, SteppedReader
from worlds.relay_actor import RelayActor


class Source:
    """One engine, as the relay follows it."""

    def __init__(self, engine: RecoverySimulation, reader: SteppedReader) -> None:
        self.engine = engine
        self.reader: SubscriberActor = reader.actor
        self.is_closed = False

    def close(self) -> None:
        self.engine.disconnect(0)
        self.is_closed = True


class World:
    """Two engines and a relay that has all of their blocks."""

    def __init__(self) -> None:
        self.engines = [RecoverySimulation(num_extended=0, num_plain=0) for _ in range(2)]
        self.sink = PublisherActor(PublisherShape(), broadcast=lambda _: None, first_sequence=lambda _: 0)
        self.relay = RelayActor([partial(self.follow, key) for key in range(2)], self.sink)
        self.relay.begin()
        for key in range(2):
            self.engines[key].store(10 * key, 2, False)
            self.engines[key].send()
            self.connect(key)

    def follow(self, key: int, listener: StreamListener) -> Source:
        engine = self.engines[key]
        reader = SteppedReader(engine.publisher, f"relay of {key}", has_extension=True)
        reader.actor.follower.applier.listener = listener
        engine.subscribers = [reader]
        return Source(engine, reader)

    def connect(self, key: int) -> None:
        self.engines[key].play([("connect", 0), ("serve", 0, 9, "none")])
        self.relay.flush()

    @property
    def published(self) -> set[int]:
        return {block for block, tier in self.sink.held if tier is Tier.DEVICE}


@pytest.fixture
def world() -> World:
    return World()


def test_publishes_the_union_and_is_whole_with_every_source(world: World) -> None:
    assert world.published == {0, 1, 10, 11}
    assert world.relay.is_whole and world.sink.sessions.upstream is None


def test_blocks_of_a_source_found_elsewhere_stay_until_it_is_known_again(world: World) -> None:
    before = world.relay.sources[0]
    world.engines[0].restart(False)
    world.engines[0].store(5, 1, False)
    world.engines[0].send()
    world.relay.follow_again(0)
    assert isinstance(before, Source) and before.is_closed
    assert world.published == {0, 1, 10, 11} and world.sink.sessions.upstream == StreamState.CONNECTING
    world.connect(0)
    assert world.published == {5, 10, 11} and world.sink.sessions.upstream is None


def test_a_forgotten_source_takes_its_blocks_along(world: World) -> None:
    world.relay.forget(0)
    assert world.published == {10, 11} and not world.relay.is_whole
    world.relay.follow_again(0)
    world.connect(0)
    assert world.published == {0, 1, 10, 11} and world.relay.is_whole


def test_a_relay_that_begins_again_knows_nothing(world: World) -> None:
    world.relay.end()
    world.sink.start_epoch()
    world.relay.begin()
    world.relay.flush()
    assert world.published == set() and world.sink.sessions.upstream == StreamState.CONNECTING


def test_a_block_that_no_source_has_breaks_a_promise(world: World) -> None:
    world.sink.held |= {(99, Tier.DEVICE)}
    with pytest.raises(BrokenPromise, match="1 blocks too many, 0 missing"):
        world.relay.check()
