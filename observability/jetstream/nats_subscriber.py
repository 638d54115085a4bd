"""Following streams that a writer keeps in JetStream: the same view, states and counters as over ZeroMQ.

A thread has the connection and puts what comes into an inbox; ``poll`` applies it on the caller's thread. The inbox is
bounded: who polls slowly is waited for, and the broker keeps what has not been read.
"""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from observability.jetstream.config import JetStreamConfig
from observability.jetstream.log_follower import LogFollower
from observability.jetstream.nats_connection import NATS_ERRORS, NatsThread
from observability.jetstream.records import LogAddress, LogHeartbeat, Snapshot, SnapshotPointer, read_message
from observability.kv_stream import (
    MAX_STREAMS,
    BatchApplier,
    BlockView,
    FairRLock,
    FollowPolicy,
    NullStreamListener,
    RankSet,
    StreamListener,
    StreamPosition,
    StreamStats,
)
from scheduler_components import ConfigError, DecodeError
from scheduler_components.events import Tier
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.kv_events.codec import MAX_PAYLOAD_BYTES

__all__ = ["JetStreamSubscriber", "open_jetstream_subscriber"]

_log = logging.getLogger("observability.jetstream")

_INBOX_ITEMS = 4_096
"""Messages, beats and bases read and not yet applied: two seconds of a busy scheduler."""

_SLICE = 256
"""Items applied in one ``poll``."""

_SWEEP_PAUSE_S = 0.001
"""Between two slices of what clears left behind: others get the processor and the lock as often."""

_IDLE_HEARTBEAT_S = 5.0
_INACTIVE_S = 30.0
"""The broker forgets a reading that nobody listens to after this."""

_READ_AGAIN_S = 0.5
_MAX_BASE_BYTES = 1024 * 1024 * 1024
"""Four million blocks: nobody makes a reader fetch more."""

Step = Callable[[float], Iterator[None]]
"""What is done with something that came, in slices; it gets the time."""


@dataclass(slots=True)
class _Inbox:
    """What came and was not applied yet. Filled on the connection's thread, emptied on the polling one."""

    items: deque[Step] = field(default_factory=deque)
    has_items: threading.Event = field(default_factory=threading.Event)
    has_room: asyncio.Event = field(default_factory=asyncio.Event)

    async def put(self, item: Step) -> None:
        """Add an item; waits while there is no room."""
        while len(self.items) >= _INBOX_ITEMS:
            self.has_room.clear()
            await self.has_room.wait()
        self.put_now(item)

    def put_now(self, item: Step) -> None:
        """Add one of the few items that are never too many."""
        self.items.append(item)
        self.has_items.set()


@dataclass(slots=True)
class _Reads:
    """What is read for one stream: its log from ``next_log_seq`` on, answers to questions; readings that are ending."""

    log: asyncio.Task[None] | None = None
    next_log_seq: int = 0
    answers: set[asyncio.Task[None]] = field(default_factory=set)
    ended: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(slots=True)
class _Counters:
    """``bad_messages``: messages and beats that are none; ``disconnects``: times that the broker was lost."""

    bad_messages: int = 0
    disconnects: int = 0


@dataclass(slots=True)
class LogStream:
    """One stream: its follower, and what is being read for it. A ``LogChannel``.

    ``follower`` is used on the polling thread; all else on the connection's.
    """

    address: LogAddress
    thread: NatsThread
    inbox: _Inbox
    follower: LogFollower = field(init=False)
    client: Client | None = None
    reads: _Reads = field(default_factory=_Reads)
    counters: _Counters = field(default_factory=_Counters)

    # --- on the polling thread ---

    def read_pointer(self, ask: int) -> None:
        """See ``LogChannel``."""
        self.thread.call(self._begin, self._answer_head, ask)

    def read_snapshot(self, ask: int, pointer: SnapshotPointer) -> None:
        """See ``LogChannel``."""
        self.thread.call(self._begin, self._answer_base, ask, pointer)

    def request_snapshot(self) -> None:
        """See ``LogChannel``."""
        self.thread.call(self._begin, self._want_base)

    def read_log(self, read: int, log_seq: int) -> None:
        """See ``LogChannel``."""
        self.thread.call(self._begin_reading, read, log_seq)

    # --- on the connection's thread ---

    def _begin(self, work: Callable[..., object], *args: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work(*args))  # type: ignore[arg-type]
        self.reads.answers.add(task)
        task.add_done_callback(self.reads.answers.discard)

    async def _want_base(self) -> None:
        try:
            if self.client is not None:
                await self.client.publish(self.address.snapshot_request_subject)
        except NATS_ERRORS as error:
            _log.debug("%s: no snapshot is asked for: %r", self.address, error)

    async def _answer_head(self, ask: int) -> None:
        pointer = None
        try:
            if self.client is not None:
                heads = await self.client.jetstream().key_value(self.address.pointer_bucket)
                entry = await heads.get(self.address.pointer_key)
                pointer = SnapshotPointer.decode(entry.value or b"")
        except (*NATS_ERRORS, DecodeError) as error:
            _log.debug("%s: no pointer: %r", self.address, error)
        self.inbox.put_now(partial(self.follower.on_pointer_read, ask, pointer))

    async def _answer_base(self, ask: int, pointer: SnapshotPointer) -> None:
        snapshot = None
        try:
            if self.client is not None:
                snapshot = await self._fetch_base(self.client.jetstream(), pointer)
        except (*NATS_ERRORS, DecodeError) as error:
            _log.debug("%s: no snapshot: %r", self.address, error)
        self.inbox.put_now(partial(self.follower.on_snapshot_read, ask, snapshot))

    async def _fetch_base(self, js: JetStreamContext, pointer: SnapshotPointer) -> Snapshot | None:
        name = self.address.snapshot_object(pointer.slot)
        bases = await js.object_store(self.address.snapshot_bucket)
        info = await bases.get_info(name)
        if (info.size or 0) > _MAX_BASE_BYTES:
            return None
        data = io.BytesIO()
        async with asyncio.timeout(self.follower.policy.answer_timeout_s * 10):
            await bases.get(name, writeinto=data)
        return Snapshot.decode(data.getvalue())

    def begin(self, client: Client) -> None:
        """Listen to beats."""
        self.client = client
        self._begin(self._listen, client)

    async def _listen(self, client: Client) -> None:
        beats = await client.subscribe(self.address.heartbeat_subject)
        async for message in beats.messages:
            try:
                heartbeat = LogHeartbeat.decode(message.data)
            except DecodeError:
                self.counters.bad_messages += 1
                continue
            await self.inbox.put(partial(self.follower.on_heartbeat, heartbeat))

    def _begin_reading(self, read: int, log_seq: int) -> None:
        self.stop_reading()
        self.reads.log = asyncio.get_running_loop().create_task(self._read_log(read, log_seq))

    def stop_reading(self) -> None:
        """Read the log no further."""
        task, self.reads.log = self.reads.log, None
        if task is not None:
            self.reads.ended.add(task)
            task.add_done_callback(self.reads.ended.discard)
            task.cancel()

    async def _read_log(self, read: int, log_seq: int) -> None:
        """Read from one place on, and again from behind what was read when the reading ends."""
        self.reads.next_log_seq = log_seq
        while True:
            try:
                await self._read_until_it_ends(read)
            except NATS_ERRORS as error:
                _log.debug("%s: the log is not read: %r", self.address, error)
            await asyncio.sleep(_READ_AGAIN_S)

    async def _read_until_it_ends(self, read: int) -> None:
        assert self.client is not None
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.reads.next_log_seq,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_INACTIVE_S,
            mem_storage=True,
            num_replicas=1,
        )
        messages = await self.client.jetstream().subscribe(
            self.address.subject,
            stream=self.address.log,
            config=config,
            manual_ack=True,
            flow_control=True,
            idle_heartbeat=_IDLE_HEARTBEAT_S,
        )
        try:
            while True:
                # Not `async for`: that answers the broker's flow control four times a second, this at once.
                await self._take(read, await messages.next_msg(None))
        finally:
            await _unsubscribed(messages)

    async def _take(self, read: int, message: Msg) -> None:
        """Put a message of the log into the inbox."""
        place = message.metadata.sequence.stream
        try:
            if len(message.data) > MAX_PAYLOAD_BYTES:
                raise DecodeError("a message above what readers take")
            sound = read_message(place, message.headers, message.data)
        except DecodeError:
            self.counters.bad_messages += 1
        else:
            await self.inbox.put(partial(self.follower.on_message, read, sound))
        self.reads.next_log_seq = max(self.reads.next_log_seq, place + 1)

    async def close(self) -> None:
        """Read nothing any more."""
        tasks = (*self.reads.answers, *self.reads.ended)
        if self.reads.log is not None:
            tasks += (self.reads.log,)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unsubscribed(messages: JetStreamContext.PushSubscription) -> None:
    try:
        await messages.unsubscribe()
    except NATS_ERRORS as error:
        _log.debug("leaving the log: %r", error)


class JetStreamSubscriber:
    """Follows streams in JetStream and keeps one view of them; made by ``open_jetstream_subscriber``.

    ``poll`` and ``wait_until`` belong to one thread, which also closes. Queries and ``stats`` may be called from any
    thread, and by a listener: they wait for one message to be applied, not for a whole snapshot.
    """

    def __init__(self, config: JetStreamConfig, view: BlockView, clock: Callable[[], float]) -> None:
        self._view = view
        self._clock = clock
        self._lock = FairRLock()
        self._inbox = _Inbox()
        self._streams: dict[int, LogStream] = {}
        self._is_closed = asyncio.Event()
        self.thread = NatsThread(config, self, name="kv-events reader")

    def __enter__(self) -> JetStreamSubscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, address: LogAddress, applier: BatchApplier, policy: FollowPolicy) -> None:
        """Follow one more stream; before ``start``."""
        stream = LogStream(address, self.thread, self._inbox)
        stream.follower = LogFollower(applier=applier, channel=stream, policy=policy)
        stream.follower.begin(self._clock())
        self._streams[address.rank] = stream

    def close(self) -> None:
        """Let go of the broker; the view and the counters stay readable. Safe to call twice."""
        self.thread.stop()

    # --- the connection's thread ---

    async def run(self, client: Client) -> None:
        """Listen until cancelled."""
        for stream in self._streams.values():
            stream.begin(client)
        try:
            await self._is_closed.wait()
        finally:
            for stream in self._streams.values():
                await stream.close()

    def on_disconnected(self) -> None:
        """Nobody is heard."""
        for stream in self._streams.values():
            stream.counters.disconnects += 1
            stream.stop_reading()
            self._inbox.put_now(partial(_lost, stream.follower))

    def on_reconnected(self) -> None:
        """Go on reading."""
        for stream in self._streams.values():
            self._inbox.put_now(partial(_back, stream.follower))

    # --- the polling thread ---

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` for something to come, then apply what has. True when anything had."""
        inbox, streams = self._inbox, self._streams.values()
        due_in_s = min(stream.follower.next_deadline_s for stream in streams) - self._clock()
        if not self._view.is_swept:
            due_in_s = min(due_in_s, _SWEEP_PAUSE_S)
        had_items = inbox.has_items.wait(max(0.0, min(timeout_s, due_in_s)))
        inbox.has_items.clear()
        for _ in range(_SLICE):
            if not inbox.items:
                break
            with self._lock:
                for _ in inbox.items.popleft()(self._clock()):
                    self._lock.yield_to_waiters()
        if inbox.items:
            inbox.has_items.set()
        elif had_items:
            self.thread.call(inbox.has_room.set)
        now_s = self._clock()
        for stream in streams:
            with self._lock:
                stream.follower.tick(now_s)
        if not self._view.is_swept:
            with self._lock:
                self._view.sweep()
        return had_items

    def wait_until(self, rank: int, seq: int, timeout_s: float) -> bool:
        """Poll until the view of ``rank`` has batch ``seq`` and no recovery is under way; False after ``timeout_s``.

        The stream is ``LIVE`` or ``PARTIAL`` then; ask ``stats`` which.
        """
        cursor = self._streams[rank].follower.cursor
        deadline_s = self._clock() + timeout_s
        while not (cursor.is_settled and cursor.last_seq >= seq):
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return False
            self.poll(left_s)
        return True

    # --- any thread ---

    def positions(self) -> dict[int, StreamPosition]:
        """Where the view of each stream stands, by rank."""
        with self._lock:
            cursors = {rank: stream.follower.cursor for rank, stream in self._streams.items()}
            return {
                rank: StreamPosition(rank, cursor.state, cursor.last_seq, cursor.is_settled)
                for rank, cursor in cursors.items()
            }

    def stats(self) -> dict[int, StreamStats]:
        """Each stream's state and counters, by rank."""
        with self._lock:
            return {rank: self._stats_of(stream) for rank, stream in self._streams.items()}

    def _stats_of(self, stream: LogStream) -> StreamStats:
        cursor, applier = stream.follower.cursor, stream.follower.applier
        return msgspec.structs.replace(
            applier.stats(cursor, endpoint=stream.address.subject),
            is_extended=True,
            disconnects=stream.counters.disconnects,
            bad_frames=stream.counters.bad_messages + cursor.forged,
            fenced=cursor.fenced,
        )

    def blocks(self, rank: int, tier: Tier = Tier.DEVICE, *, group_idx: int | None = None) -> Set[int]:
        """A copy of the hashes that ``rank`` holds on ``tier``; see ``BlockView.blocks``."""
        with self._lock:
            return self._view.blocks(rank, tier, group_idx=group_idx)

    def match_lengths(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> dict[int, int]:
        """How many of a prompt's leading blocks each rank holds; see ``BlockView.match_lengths``."""
        with self._lock:
            return self._view.match_lengths(hashes, tier, group_idx=group_idx)

    def best_ranks(
        self, hashes: Iterable[int], tier: Tier = Tier.DEVICE, *, group_idx: int | None = None
    ) -> tuple[int, RankSet]:
        """The longest prefix that any rank holds, and the ranks that do; see ``BlockView.best_ranks``."""
        with self._lock:
            return self._view.best_ranks(hashes, tier, group_idx=group_idx)

    def ranks_holding(self, block_hash: int, tier: Tier = Tier.DEVICE) -> tuple[int, ...]:
        """The ranks that hold one block on ``tier``."""
        with self._lock:
            return self._view.ranks_holding(block_hash, tier)


def _lost(follower: LogFollower, now_s: float) -> Iterator[None]:
    follower.on_disconnected(now_s)
    yield None


def _back(follower: LogFollower, now_s: float) -> Iterator[None]:  # noqa: ARG001 - as every step
    follower.on_reconnected()
    yield None


def open_jetstream_subscriber(
    config: JetStreamConfig,
    addresses: Iterable[LogAddress],
    *,
    policy: FollowPolicy | None = None,
    listener: StreamListener | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> JetStreamSubscriber:
    """Follow streams in JetStream; use the subscriber in a ``with`` block, or close it.

    This waits for nothing: a broker or a writer that is not there yet is waited for by ``poll``.

    Args:
        config: where the broker is.
        addresses: the streams; each needs its own rank, which is its number in the view.
        policy: how long to wait for what.
        listener: is told of every batch and change of state. It may ask the subscriber; it must not wait for another
            thread that does.
        clock: monotonic seconds, for deadlines; wall_clock: seconds since the epoch, for the lag.

    Raises:
        ConfigError: no address, or two with one rank.
    """
    wanted = tuple(addresses)
    if not 0 < len(wanted) <= MAX_STREAMS:
        raise ConfigError("addresses", len(wanted), "is not a number of streams", f"give 1 to {MAX_STREAMS} addresses")
    ranks = [address.rank for address in wanted]
    if len(set(ranks)) != len(ranks):
        raise ConfigError("addresses", ranks, "name a rank twice", "give each stream its own rank")
    view = BlockView()
    subscriber = JetStreamSubscriber(config, view, clock)
    for address in wanted:
        applier = BatchApplier(
            rank=address.rank,
            view=view,
            decoder=BatchDecoder(),
            listener=NullStreamListener() if listener is None else listener,
            wall_clock=wall_clock,
        )
        subscriber.open(address, applier, FollowPolicy() if policy is None else policy)
    subscriber.thread.start()
    return subscriber
