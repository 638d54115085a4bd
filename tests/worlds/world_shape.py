"""WorldShape: what a world consists of and which faults it has, drawn from its seed.

As in TigerBeetle's VOPR, a world has only some of the faults, each with a rate of its own. Worlds with all faults would
hide what a single one does.
"""

from __future__ import annotations

import random
from typing import Literal, TypeAlias

import attrs

from observability.kv_stream import FollowPolicy
from scheduler_components.kv_events.live_sender import LARGE_PAYLOAD_BYTES
from worlds.faulty_disk import DiskFaults
from worlds.faulty_link import LinkQuality
from worlds.publisher_actor import PublisherShape
from worlds.publisher_process import ProcessShape
from worlds.stream_connection import ReaderNetwork, ReaderShape, least_capacity

__all__ = [
    "STREAM_FAULTS",
    "StreamFault",
    "StreamShape",
    "TrafficShape",
    "draw_stream_shape",
    "network_of_plain_reader",
]

StreamFault: TypeAlias = Literal[
    "disconnect", "lose answer", "pause", "pause in answer", "forge", "other topic", "stall", "crash", "restart",
    "hidden restart", "poison", "truncate answers", "burst", "late thread", "lose sockets",
]  # fmt: skip
"""What happens to a stream at random times."""

STREAM_FAULTS: tuple[StreamFault, ...] = (
    "disconnect", "lose answer", "pause", "pause in answer", "forge", "other topic", "stall", "crash", "restart",
    "hidden restart", "poison", "truncate answers", "burst", "late thread", "lose sockets",
)  # fmt: skip

_BUSY_SHARE = 0.1
"""Share of the streams whose publisher appends some batches while one answer is sent: a large snapshot in many chunks,
over a link that is a few times as fast as the publisher."""

_CHUNK_BYTES = 256 * 1024
"""As of a publisher: the snapshot of a world's cache is one chunk."""

_LONG_WINDOW = 16
"""Window of a publisher that may send many chunks: with a shorter one it would have to cut the answer."""

_POLICY = FollowPolicy(
    answer_timeout_s=1.0,
    retry_min_s=0.1,
    retry_max_s=0.5,
    request_interval_s=0.2,
    probe_interval_s=1.0,
    dead_after_s=5.0,
)
"""Shorter times than the defaults, so that a world has more recoveries in a second."""


@attrs.frozen(kw_only=True)
class TrafficShape:
    """What a cache publishes.

    Attributes:
        rate_per_s: batches per second, on average.
        num_blocks: blocks that it may hold.
        clear_share: share of the batches that clear the cache.
        refused_share: share of the batches that have an event which no reader accepts.
        block_tokens: tokens of a block; with 1,024 a batch has up to 46 KB.
    """

    rate_per_s: float = 30.0
    num_blocks: int = 32
    clear_share: float = 0.0
    refused_share: float = 0.0
    block_tokens: int = 1


@attrs.frozen(kw_only=True)
class StreamShape:
    """A publisher, its readers, and their faults.

    Attributes:
        process: the publisher.
        traffic: what it publishes.
        readers: each with its network in a storm; faults on its links are part of it.
        faults: what happens at random times in a storm.
        faults_per_s: how often.
        disk: of the publisher's machine.
        set_back_s: how far its wall clock may be set back by a restart.
        has_extension: the publisher has the extension; readers may still do without.
    """

    process: ProcessShape
    traffic: TrafficShape
    readers: tuple[tuple[ReaderShape, ReaderNetwork], ...]
    faults: tuple[StreamFault, ...]
    faults_per_s: float
    disk: DiskFaults
    set_back_s: float = 0.0
    has_extension: bool = True


def draw_stream_shape(draw: random.Random, *, name: str = "reader", num_readers: int | None = None) -> StreamShape:
    """Draw a stream.

    Args:
        draw: of the world.
        name: of its readers, before their number.
        num_readers: None draws it.
    """
    is_busy = draw.random() < _BUSY_SHARE
    seq_base = draw.choice(("zero", "clock"))
    has_floor = seq_base == "clock" and draw.random() < 0.7
    window = draw.randint(48, 96) if is_busy else _draw_size(draw, 1, 128)
    block_tokens = 1_024 if draw.random() < 0.1 and not is_busy else 1
    max_bytes = draw.choice((10**6, 10**6, _draw_size(draw, 300, 50_000)))
    chunk_bytes = draw.choice((100 if window >= _LONG_WINDOW and max_bytes == 10**6 else 600, _CHUNK_BYTES))
    publisher = PublisherShape(
        window=window,
        max_bytes=10**6 if is_busy else max_bytes,
        max_pending=_draw_size(draw, 1, 64),
        chunk_bytes=40 if is_busy else chunk_bytes if block_tokens == 1 else _CHUNK_BYTES,
        seq_base=seq_base,
        large_bytes=draw.choice((LARGE_PAYLOAD_BYTES, LARGE_PAYLOAD_BYTES, LARGE_PAYLOAD_BYTES if is_busy else 100)),
    )
    calls = draw.choice(("publish", "publish", "publish", "idle", "inline"))
    process = ProcessShape(
        publisher=publisher,
        has_floor=has_floor,
        calls_idle=calls == "idle",
        is_inline=calls == "inline",
        repairs_floor=draw.random() < 0.5,
    )
    traffic = TrafficShape(
        rate_per_s=100.0 if is_busy else 10 ** draw.uniform(0.3, 2.0),
        num_blocks=160 if is_busy else _draw_size(draw, 4, 128),
        clear_share=draw.choice((0.0, 0.0, 0.01, 0.05)),
        refused_share=draw.choice((0.0, 0.0, 0.0, 0.1)),
        block_tokens=block_tokens,
    )
    count = draw.randint(1, 3) if num_readers is None else num_readers
    readers = tuple(_draw_reader(draw, f"{name} {number}", is_busy=is_busy) for number in range(count))
    return StreamShape(
        process=process,
        traffic=traffic,
        readers=readers,
        faults=tuple(each for each in STREAM_FAULTS if draw.random() < 0.4),
        faults_per_s=10 ** draw.uniform(0.0, 0.9),
        disk=DiskFaults(lies=draw.choice((0.0, 0.5, 0.5)), lost=0.5, torn=1.0),
        set_back_s=draw.choice((0.0, 100.0, 100.0) if has_floor else (0.0, 0.0, 100.0)),
    )


def _draw_size(draw: random.Random, least: int, most: int) -> int:
    """Draw a size, small ones as often as large ones."""
    return min(most, int(least * (most / least + 1) ** draw.random()))


def _draw_reader(draw: random.Random, name: str, *, is_busy: bool) -> tuple[ReaderShape, ReaderNetwork]:
    has_extension, network = draw.random() < 0.7, _draw_network(draw)
    if is_busy:
        capacity = least_capacity(network.replay.max_latency_s) * 3 // 2
        network = attrs.evolve(network, replay=attrs.evolve(network.replay, capacity=capacity))
    shape = ReaderShape(name=name, policy=_POLICY, has_extension=has_extension)
    return shape, network if has_extension else network_of_plain_reader(network)


def network_of_plain_reader(network: ReaderNetwork) -> ReaderNetwork:
    """Return the network for a reader without the extension.

    TCP loses the rest of an answer, not a message inside it. Nothing but a digest would show such a loss.
    """
    return attrs.evolve(network, replay=attrs.evolve(network.replay, loss=0.0))


def _draw_network(draw: random.Random) -> ReaderNetwork:
    latency_s = 10 ** draw.uniform(-4, -1.3)

    def rate(share: float) -> float:
        return 10 ** draw.uniform(-3, -0.7) if draw.random() < share else 0.0

    def rate_in_answers(share: float) -> float:
        return 10 ** draw.uniform(-2, -0.5) if draw.random() < share else 0.0

    live = LinkQuality(
        latency_s=latency_s,
        jitter_s=latency_s * draw.random(),
        loss=rate(0.5),
        duplication=rate(0.3),
        reordering=rate(0.3),
        capacity=draw.choice((None, None, _draw_size(draw, 8, 256))),
    )
    replay = LinkQuality(
        latency_s=latency_s,
        jitter_s=latency_s * draw.random(),
        loss=rate_in_answers(0.4),
        duplication=rate_in_answers(0.2),
        capacity=_draw_size(draw, 1, 64),
    )
    return ReaderNetwork(
        live=live,
        replay=replay,
        garbling=rate_in_answers(0.2),
        alteration=rate_in_answers(0.2),
        lateness=draw.choice((0.0, 0.0, 0.5)),
    )
