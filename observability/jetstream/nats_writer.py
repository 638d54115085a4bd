"""Writing one worker's streams into JetStream, on a thread with a connection of its own.

Whoever publishes never waits for the broker: batches are numbered under a lock and sent by the thread. What the broker
cannot take is kept in bounded memory, as the state that it adds up to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import (
    DiscardPolicy,
    KeyValueConfig,
    ObjectStoreConfig,
    PubAck,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import APIError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from observability.jetstream.config import JetStreamConfig
from observability.jetstream.log_writer import LogLimits, LogStats, LogTraffic, LogWriter
from observability.jetstream.nats_connection import NATS_ERRORS, NatsThread
from observability.jetstream.records import LogAddress, LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from scheduler_components import DecodeError, EventBatch, PublisherStats
from scheduler_components.kv_events import BatchEncoder
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES

__all__ = ["JetStreamSink", "JetStreamWriter", "open_jetstream_writer"]

_log = logging.getLogger("observability.jetstream")

HEARTBEAT_INTERVAL_S = 0.5
"""A reader knows within this that nothing was lost at the end of what it has; a heartbeat is one small message."""

_MAX_UNDER_WAY = 256
"""Messages sent and not acknowledged: a tenth of a second of a busy scheduler, over a network of some milliseconds."""

_ACK_TIMEOUT_S = 5.0
"""After which a message counts as failed; it is sent again under the same id."""

_BASE_TIMEOUT_S = 60.0
_PAUSE_S = 0.5
"""After a failure, before the broker is tried again."""

_DUPLICATE_WINDOW_S = 120.0
"""For so long the broker knows the ids of what it has: many times as long as anything is tried again."""

_CLOSE_S = 2.0
"""How long closing waits for what is under way, as the ZeroMQ publisher's."""

_HEADER_BYTES = 150
"""Id and digest with their names, and the broker's own record of a message."""

_UNSOUND = (TypeError, ValueError, OverflowError, AttributeError, RecursionError, msgspec.MsgspecError)
"""What an encoder raises for a batch of which something cannot be written."""

_NAME_IN_USE = 10_058
"""JetStream: a stream of that name has another configuration."""


@dataclass(slots=True)
class _Stream:
    """One stream on the connection's thread.

    Attributes:
        writer: guarded by the owner's lock.
        news: something may be sent; snapshot_due: a snapshot may be due.
        under_way: messages whose acknowledgement is awaited, with the time of sending, the oldest first.
        slot: the object that the pointer names, whoever wrote it; -1 without a pointer. revision: of that pointer.
        has_begun: a pointer of this writer's was stored: one of a life that is not among its ``epochs`` means that
            another writer took over.
    """

    address: LogAddress
    writer: LogWriter
    news: asyncio.Event = field(default_factory=asyncio.Event)
    snapshot_due: asyncio.Event = field(default_factory=asyncio.Event)
    under_way: dict[asyncio.Future[PubAck], tuple[LogMessage, float]] = field(default_factory=dict)
    slot: int = -1
    revision: int = 0
    has_begun: bool = False
    epochs: set[bytes] = field(default_factory=set)
    is_superseded: bool = False
    is_told: bool = False


@dataclass(slots=True)
class _Broker:
    """What is used of the connection, once the log and the buckets are there."""

    client: Client
    js: JetStreamContext
    heads: KeyValue
    bases: ObjectStore

    @property
    def largest_bytes(self) -> int:
        """Of a payload."""
        return self.client.max_payload - 2 * _HEADER_BYTES


class JetStreamWriter:
    """Writes one worker's streams; made by ``open_jetstream_writer``. ``sink`` and ``stats`` may be called anywhere."""

    def __init__(self, config: JetStreamConfig, worker: str, topic: str, clock: Callable[[], float]) -> None:
        self._config = config
        self._worker = worker
        self._topic = topic
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: dict[int, _Stream] = {}
        self._traffic = LogTraffic()
        self._broker: _Broker | None = None
        self._is_prepared = asyncio.Event()
        self._prepare_again = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.thread = NatsThread(config, self, name=f"kv-events of {worker}")

    def __enter__(self) -> JetStreamWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- any thread ---

    def sink(self, rank: int, dialect: str = "array") -> JetStreamSink:
        """Open the stream of ``rank``, once.

        Raises:
            ConfigError: an unknown dialect, or names that the broker does not take.
        """
        address = LogAddress(self._worker, rank, self._topic, self._config.prefix)
        encoder = BatchEncoder(dialect)
        config = self._config
        overhead = len(address.subject) + _HEADER_BYTES
        writer = LogWriter(
            epoch=os.urandom(EPOCH_BYTES),
            rank=rank,
            limits=LogLimits(config.max_msgs, config.max_bytes, config.max_age_s, overhead),
            traffic=self._traffic,
        )
        stream = _Stream(address, writer)
        with self._lock:
            assert rank not in self._streams, f"the stream of rank {rank} is open"
            self._streams[rank] = stream
        self.thread.call(self._begin_stream, stream)
        return JetStreamSink(self, stream, encoder, self._lock)

    def describe(self) -> dict[str, object]:
        """Where readers find the streams, as values that JSON knows."""
        with self._lock:
            subjects = [stream.address.subject for _, stream in sorted(self._streams.items())]
        return {
            "servers": list(self.thread.redacted_servers),
            "prefix": self._config.prefix,
            "worker": self._worker,
            "topic": self._topic,
            "subjects": subjects,
        }

    def stats(self) -> dict[int, LogStats]:
        """Each stream's counters, by rank."""
        with self._lock:
            return {rank: self._stats_of(stream) for rank, stream in self._streams.items()}

    def _stats_of(self, stream: _Stream) -> LogStats:
        writer, counters = stream.writer, stream.writer.counters
        return LogStats(
            rank=stream.address.rank,
            subject=stream.address.subject,
            is_connected=self.thread.is_connected,
            is_superseded=stream.is_superseded,
            last_seq=writer.stream.next_sequence - 1,
            waiting=writer.num_waiting,
            stored=counters.stored,
            retried=counters.retried,
            collapsed=counters.collapsed,
            bases=counters.bases,
            failures=counters.failures,
            broker_losses=self.thread.num_disconnects,
        )

    def is_stored(self, stream: _Stream) -> bool:
        """True when the broker has everything of the stream."""
        with self._lock:
            return stream.is_superseded or (stream.writer.heartbeat() is not None and not stream.writer.num_waiting)

    def wake(self, stream: _Stream) -> None:
        """There is something to send."""
        if not stream.is_told:
            stream.is_told = True
            self.thread.call(stream.news.set)

    def close(self, deadline_s: float = _CLOSE_S) -> None:
        """Wait up to ``deadline_s`` until the broker has everything, then let go of it. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        until_s = time.monotonic() + deadline_s
        pause = threading.Event()
        while time.monotonic() < until_s and not all(map(self.is_stored, tuple(self._streams.values()))):
            pause.wait(0.005)
        waiting = sum(stats.waiting for stats in self.stats().values())
        if waiting:
            _log.warning("%d KV-event batches of %s did not reach the broker", waiting, self._worker)
        self.thread.stop()

    # --- the connection's thread ---

    async def run(self, client: Client) -> None:
        """Prepare the broker whenever it is there again, and say the beats."""
        try:
            while True:
                self._prepare_again.clear()
                await self._prepare(client)
                await self._beat_until(self._prepare_again)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_disconnected(self) -> None:
        """Nothing is sent until it is there again."""
        self._is_prepared.clear()

    def on_reconnected(self) -> None:
        """Look what it still has."""
        self._prepare_again.set()

    def _begin_stream(self, stream: _Stream) -> None:
        works = (self._send_forever, self._keep_base_forever, self._hear_readers, self._hear_writers)
        for work in works:
            task = asyncio.get_running_loop().create_task(work(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _hear_readers(self, stream: _Stream) -> None:
        """Readers who cannot begin with the snapshot ask for another."""
        await self._is_prepared.wait()
        assert self._broker is not None
        wanted = await self._broker.client.subscribe(stream.address.snapshot_request_subject)
        async for _ in wanted.messages:
            with self._lock:
                stream.writer.on_snapshot_requested()
            stream.snapshot_due.set()

    async def _hear_writers(self, stream: _Stream) -> None:
        """A heartbeat of somebody else's is a reason to look whose the stream is."""
        await self._is_prepared.wait()
        assert self._broker is not None
        beats = await self._broker.client.subscribe(stream.address.heartbeat_subject)
        async for message in beats.messages:
            try:
                is_foreign = LogHeartbeat.decode(message.data).epoch not in stream.epochs
                if is_foreign and not stream.is_superseded:
                    await self._find_head(self._broker, stream)
            except (*NATS_ERRORS, DecodeError) as error:
                _log.debug("%s: a heartbeat of another writer: %r", stream.address, error)

    async def _prepare(self, client: Client) -> None:
        """Make the log and the buckets, and see whether they have what they had."""
        is_said = False
        while True:
            try:
                self._broker = await self._open_broker(client)
                self._is_prepared.set()
                return
            except NATS_ERRORS as error:
                if not is_said:
                    _log.warning("%s: JetStream is not ready (%s); trying again", self._worker, error)
                    is_said = True
                await asyncio.sleep(_PAUSE_S)

    async def _open_broker(self, client: Client) -> _Broker:
        config, js = self._config, client.jetstream()
        address = LogAddress(self._worker, 0, self._topic, config.prefix)
        log = StreamConfig(
            name=address.log,
            subjects=[address.wildcard_subject],
            retention=RetentionPolicy.LIMITS,
            discard=DiscardPolicy.OLD,
            max_msgs_per_subject=config.max_msgs,
            max_bytes=config.max_bytes,
            max_age=config.max_age_s,
            storage=StorageType.FILE,
            num_replicas=config.replicas,
            duplicate_window=min(_DUPLICATE_WINDOW_S, config.max_age_s),
        )
        try:
            info = await js.add_stream(log)
        except APIError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            info = await js.update_stream(log)
        broker = _Broker(client, js, await self._open_heads(js, address), await self._open_bases(js, address))
        for stream in tuple(self._streams.values()):
            await self._look_at_head(broker, stream, info)
            stream.news.set()
            stream.snapshot_due.set()
        return broker

    async def _open_heads(self, js: JetStreamContext, address: LogAddress) -> KeyValue:
        config = self._config
        wanted = KeyValueConfig(address.pointer_bucket, history=1, ttl=config.max_age_s, replicas=config.replicas)
        try:
            return await js.create_key_value(wanted)
        except APIError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            return await js.key_value(address.pointer_bucket)  # another worker's writer made it, with other settings

    async def _open_bases(self, js: JetStreamContext, address: LogAddress) -> ObjectStore:
        config = self._config
        wanted = ObjectStoreConfig(ttl=config.max_age_s, replicas=config.replicas, storage=StorageType.FILE)
        try:
            return await js.create_object_store(address.snapshot_bucket, wanted)
        except APIError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            return await js.object_store(address.snapshot_bucket)

    async def _look_at_head(self, broker: _Broker, stream: _Stream, info: StreamInfo) -> None:
        """Begin with a snapshot where the broker does not have what this writer stored."""
        is_own = await self._find_head(broker, stream)
        with self._lock:
            writer, last_seq = stream.writer, info.state.last_seq
            if not stream.has_begun:
                writer.log_seq = last_seq
            elif not is_own or last_seq < writer.log_seq:
                writer.log_seq = last_seq
                writer.on_snapshot_lost()

    async def _find_head(self, broker: _Broker, stream: _Stream) -> bool:
        """See what the pointer names now; False where it is not what this writer stored last.

        Where it is of another life, after this writer stored one, another writer has taken the stream over.
        """
        pointer, revision = await _read_head(broker, stream.address)
        is_own = revision == stream.revision
        stream.revision, stream.slot = revision, -1 if pointer is None else pointer.slot
        if not is_own and stream.has_begun and pointer is not None and pointer.epoch not in stream.epochs:
            stream.is_superseded = True
            _log.warning("%s: another writer has taken the stream over; this one stops", stream.address)
        return is_own

    async def _beat_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for stream in tuple(self._streams.values()):
                await self._say_beat(stream)
                self._fail_overdue(stream)
            try:
                await asyncio.wait_for(stop.wait(), HEARTBEAT_INTERVAL_S)
            except TimeoutError:
                continue

    async def _say_beat(self, stream: _Stream) -> None:
        with self._lock:
            heartbeat = stream.writer.heartbeat()
        broker = self._broker
        if heartbeat is None or broker is None or stream.is_superseded or not self.thread.is_connected:
            return
        try:
            await broker.client.publish(stream.address.heartbeat_subject, heartbeat.encode())
        except NATS_ERRORS as error:
            _log.debug("a heartbeat of %s was not said: %s", stream.address, error)

    def _fail_overdue(self, stream: _Stream) -> None:
        """What was sent too long ago is sent again, with all that followed."""
        if stream.under_way and self._clock() - next(iter(stream.under_way.values()))[1] > _ACK_TIMEOUT_S:
            for future in tuple(stream.under_way):
                future.cancel()

    # --- batches ---

    async def _send_forever(self, stream: _Stream) -> None:
        while True:
            await stream.news.wait()
            stream.news.clear()
            stream.is_told = False
            await self._is_prepared.wait()
            await self._send_some(stream)
            with self._lock:
                is_due = bool(stream.writer.snapshot_reason(self._clock()))
            if is_due:
                stream.snapshot_due.set()

    async def _send_some(self, stream: _Stream) -> None:
        broker = self._broker
        assert broker is not None
        while len(stream.under_way) < _MAX_UNDER_WAY and self._is_prepared.is_set() and not stream.is_superseded:
            with self._lock:
                message = stream.writer.pop_message(broker.largest_bytes)
            if message is None:
                return
            try:
                future = await broker.js.publish_async(
                    stream.address.subject, message.payload, headers=message.headers, stream=stream.address.log
                )
            except NATS_ERRORS as error:
                self._failed(stream, message, error)
                return
            stream.under_way[future] = message, self._clock()
            future.add_done_callback(partial(self._answered, stream))

    def _answered(self, stream: _Stream, future: asyncio.Future[PubAck]) -> None:
        message, _ = stream.under_way.pop(future)
        error = TimeoutError("no acknowledgement") if future.cancelled() else future.exception()
        if error is not None:
            self._failed(stream, message, error)
            return
        ack = future.result()
        with self._lock:
            stream.writer.on_stored(message, ack.seq, is_duplicate=bool(ack.duplicate))
        stream.news.set()

    def _failed(self, stream: _Stream, message: LogMessage, error: BaseException) -> None:
        """Send it again, after a look at what the broker has."""
        with self._lock:
            stream.writer.on_failed(message)
        if self._is_prepared.is_set():
            _log.warning("%s: batch %d was not stored (%s); trying again", stream.address, message.seq, error)
            self._is_prepared.clear()
            asyncio.get_running_loop().call_later(_PAUSE_S, self._prepare_again.set)
        stream.news.set()

    # --- the snapshot ---

    async def _keep_base_forever(self, stream: _Stream) -> None:
        while True:
            with suppress(TimeoutError):  # a snapshot may be due by its age
                await asyncio.wait_for(stream.snapshot_due.wait(), 1.0)
            stream.snapshot_due.clear()
            await self._is_prepared.wait()
            while not stream.is_superseded:
                with self._lock:
                    reason = stream.writer.snapshot_reason(self._clock())
                if not reason or not await self._store_base(stream):
                    break

    async def _store_base(self, stream: _Stream) -> bool:
        """Make and store a snapshot; False when that failed."""
        broker = self._broker
        assert broker is not None
        snapshot, traffic_bytes = await self._make_base(stream)
        try:
            async with asyncio.timeout(_BASE_TIMEOUT_S):
                is_stored = await self._write_base(broker, stream, snapshot)
        except NATS_ERRORS as error:
            _log.warning("%s: the snapshot was not stored (%s); trying again", stream.address, error)
            is_stored = False
        with self._lock:
            if is_stored:
                stream.writer.on_snapshot_stored(snapshot, traffic_bytes, self._clock())
            else:
                stream.writer.on_snapshot_failed()
        if is_stored:
            await self._say_beat(stream)
            stream.news.set()
        else:
            await asyncio.sleep(_PAUSE_S)
            stream.snapshot_due.set()
        return is_stored

    async def _make_base(self, stream: _Stream) -> tuple[Snapshot, int]:
        """Make it in slices: the lock is free between two of them."""
        making = stream.writer.build_snapshot()
        while True:
            with self._lock:
                try:
                    next(making)
                except StopIteration as made:
                    value: tuple[Snapshot, int] = made.value
                    return value
            await asyncio.sleep(0)

    async def _write_base(self, broker: _Broker, stream: _Stream, snapshot: Snapshot) -> bool:
        """Write the snapshot into the object that the pointer does not name, then let the pointer name it.

        False where another writer has taken over, or the pointer changed meanwhile.
        """
        if not await self._find_head(broker, stream) and stream.is_superseded:
            return False
        revision = stream.revision
        pointer = SnapshotPointer(snapshot.epoch, snapshot.end, 0 if stream.slot else 1)
        stream.epochs.add(snapshot.epoch)
        await broker.bases.put(stream.address.snapshot_object(pointer.slot), snapshot.encode())
        try:
            stream.revision = await broker.heads.update(stream.address.pointer_key, pointer.encode(), revision)
        except KeyWrongLastSequenceError:
            await self._find_head(broker, stream)
            return False
        stream.slot = pointer.slot
        stream.has_begun = True
        return True


async def _read_head(broker: _Broker, address: LogAddress) -> tuple[SnapshotPointer | None, int]:
    """The pointer and its revision; one that no writer of this kit wrote counts as none."""
    try:
        entry = await broker.heads.get(address.pointer_key)
    except KeyNotFoundError as error:
        return None, 0 if error.entry is None else error.entry.revision or 0
    try:
        return SnapshotPointer.decode(entry.value or b""), entry.revision or 0
    except DecodeError:
        return None, entry.revision or 0


class JetStreamSink:
    """One stream's ``KvEventSink``, made by ``JetStreamWriter.sink``: numbers batches and wakes who sends them."""

    __slots__ = ("_encoder", "_lock", "_num_refused", "_stream", "_writer")

    def __init__(self, writer: JetStreamWriter, stream: _Stream, encoder: BatchEncoder, lock: threading.Lock) -> None:
        self._writer = writer
        self._stream = stream
        self._encoder = encoder
        self._lock = lock
        self._num_refused = 0

    def publish(self, events: EventBatch) -> None:
        """Number one batch. What readers would not take is left out, and counted."""
        with self._lock:
            payload = self._encoded(events)
            if payload is not None:
                self._stream.writer.append(payload)
        self._writer.wake(self._stream)

    def _encoded(self, events: EventBatch) -> bytes | None:
        rank = self._stream.address.rank
        try:
            return self._encoder.encode(events, rank)
        except _UNSOUND:
            payload, _, refused = self._encoder.encode_valid(events, rank)
            self._num_refused += len(refused)
            return payload

    def idle(self) -> None:
        """Nothing is deferred."""

    def set_upstream_state(self, state: str | None) -> None:
        """Tell readers how far the stream is known: None for whole, else a ``StreamState``."""
        with self._lock:
            self._stream.writer.upstream = state

    def start_epoch(self) -> None:
        """Begin with an empty state: the engine behind the stream is another."""
        with self._lock:
            self._stream.writer.start_epoch(os.urandom(EPOCH_BYTES))
        self._writer.wake(self._stream)

    def stats(self) -> PublisherStats:
        """Counters as other publishers have them; ``JetStreamWriter.stats`` says more."""
        with self._lock:
            writer = self._stream.writer
            stream = writer.stream
            return PublisherStats(
                batches_sent=writer.counters.stored,
                events_refused=self._num_refused,
                batches_collapsed=writer.counters.collapsed,
                batches_buffered=len(stream),
                bytes_buffered=stream.buffered_bytes,
                blocks_in_base=stream.num_snapshot_blocks,
                bytes_in_base=stream.num_snapshot_bytes,
                batches_pending=writer.num_waiting,
                last_sequence=stream.next_sequence - 1,
            )

    def shutdown(self) -> None:
        """Close the writer, with all its streams."""
        self._writer.close()


def open_jetstream_writer(
    config: JetStreamConfig, worker: str, *, topic: str = "", clock: Callable[[], float] = time.monotonic
) -> JetStreamWriter:
    """Begin to connect, and return the writer of one worker's streams; use it in a ``with`` block, or close it.

    This waits for nothing: a broker that is not there yet is tried until it is, and gets all that was published.

    Args:
        config: where the broker is, and how much it keeps.
        worker: names the worker in the fleet; readers ask for it.
        topic: of its streams.
        clock: monotonic seconds.

    Raises:
        ConfigError: a worker or topic that cannot be a name there.
    """
    LogAddress(worker, 0, topic, config.prefix)
    writer = JetStreamWriter(config, worker, topic, clock)
    writer.thread.start()
    return writer
