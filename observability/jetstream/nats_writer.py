"""Writing one worker's streams into JetStream, on a thread with its own connection.

Publishing never waits for the broker: the caller numbers batches under a lock, and the thread sends them. While the
broker is unreachable, bounded memory keeps the newest batches and the state before them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from observability.jetstream.addresses import LogAddress
from observability.jetstream.broker_preparation import PAUSE_S, BrokerPreparation
from observability.jetstream.config import JetStreamConfig
from observability.jetstream.log_writer import (
    ACK_TIMEOUT_S,
    DUPLICATE_WINDOW_S,
    HEARTBEAT_INTERVAL_S,
    MAX_IN_FLIGHT,
    SNAPSHOT_CHECK_S,
    LogLimits,
    LogTraffic,
    LogWriter,
)
from observability.jetstream.nats_connection import NATS_ERRORS, NatsThread
from observability.jetstream.nats_sink import JetStreamSink, WrittenStream
from observability.kv_stream import LogStats
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from scheduler_components import DecodeError
from scheduler_components._internal.extras import naming_extras
from scheduler_components.kv_events import BatchEncoder
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES

with naming_extras:
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

__all__ = ["JetStreamWriter", "open_jetstream_writer"]

_log = logging.getLogger("observability.jetstream")

_SNAPSHOT_TIMEOUT_S = 60.0
_CLOSE_S = 2.0
"""How long closing waits for messages in flight; the same as for the ZeroMQ publisher."""

_HEADER_BYTES = 150
"""Id and digest with their names, and the broker's own record of a message."""

_NO_STORAGE = 10_047
"""JetStream's error code for a stream that is larger than what the server may store."""

_NAME_IN_USE = 10_058
"""JetStream's error code for a stream of that name with another configuration."""


@dataclass(slots=True)
class _Broker:
    """The connection and its buckets, after the log and the buckets were created."""

    client: Client
    js: JetStreamContext
    pointers: KeyValue
    snapshots: ObjectStore

    @property
    def max_payload_bytes(self) -> int:
        return self.client.max_payload - 2 * _HEADER_BYTES


class JetStreamWriter:
    """Writes one worker's streams. ``open_jetstream_writer`` creates it.

    ``sink``, ``describe`` and ``stats`` may be called on any thread.
    """

    def __init__(self, config: JetStreamConfig, worker: str, topic: str, clock: Callable[[], float]) -> None:
        self._config = config
        self._worker = worker
        self._topic = topic
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: dict[int, WrittenStream] = {}
        self._traffic = LogTraffic()
        self._broker: _Broker | None = None
        self._preparation = BrokerPreparation()
        self._is_prepared = asyncio.Event()  # wakes those that wait until the preparation is done
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
            ConfigError: an unknown dialect, or a name that the broker does not accept.
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
        stream = WrittenStream(address, writer)
        with self._lock:
            assert rank not in self._streams, f"the stream of rank {rank} is open"
            self._streams[rank] = stream
        self.thread.call(self._begin_stream, stream)
        return JetStreamSink(stream, encoder, self._lock, wake=self._wake, close=self.close)

    def describe(self) -> dict[str, object]:
        """Return where readers find the streams, as JSON values."""
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
        """Return each stream's counters, by rank."""
        with self._lock:
            return {rank: self._stats_of(stream) for rank, stream in self._streams.items()}

    def _stats_of(self, stream: WrittenStream) -> LogStats:
        writer = stream.writer
        return replace(
            writer.counters,
            subject=stream.address.subject,
            is_connected=self.thread.is_connected,
            is_superseded=stream.ownership.is_superseded,
            last_seq=writer.stream.next_sequence - 1,
            waiting=writer.num_waiting,
            broker_losses=self.thread.num_disconnects,
        )

    def _is_stored(self, stream: WrittenStream) -> bool:
        """Return True when the broker has every batch of the stream."""
        with self._lock:
            writer = stream.writer
            return stream.ownership.is_superseded or (writer.heartbeat() is not None and not writer.num_waiting)

    def _wake(self, stream: WrittenStream) -> None:
        """Wake the thread, because a batch waits to be sent."""
        if not stream.is_woken:
            stream.is_woken = True
            self.thread.call(stream.has_work.set)

    def close(self, deadline_s: float = _CLOSE_S) -> None:
        """Wait up to ``deadline_s`` until the broker has every batch, then disconnect. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        until_s = time.monotonic() + deadline_s
        pause = threading.Event()
        while time.monotonic() < until_s and not all(map(self._is_stored, tuple(self._streams.values()))):
            pause.wait(0.005)
        waiting = sum(stats.waiting for stats in self.stats().values())
        if waiting:
            _log.warning("%d KV-event batches of %s did not reach the broker", waiting, self._worker)
        self.thread.stop()

    # --- the connection's thread ---

    async def run(self, client: Client) -> None:
        """Prepare the broker after each connect, and send heartbeats."""
        try:
            while True:
                self._prepare_again.clear()
                await self._prepare(client)
                await self._send_heartbeats(self._prepare_again)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_disconnected(self) -> None:
        """Stop sending until the broker is prepared again."""
        self._preparation.on_disconnected()
        self._is_prepared.clear()

    def on_reconnected(self) -> None:
        """Prepare the broker again, because it may have lost messages."""
        self._prepare_again.set()

    def _begin_stream(self, stream: WrittenStream) -> None:
        loops = (
            self._keep_sending,
            self._keep_snapshot_current,
            self._receive_snapshot_requests,
            self._watch_other_writers,
        )
        for loop in loops:
            task = asyncio.get_running_loop().create_task(loop(stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _receive_snapshot_requests(self, stream: WrittenStream) -> None:
        await self._is_prepared.wait()
        assert self._broker is not None
        subscription = await self._broker.client.subscribe(stream.address.snapshot_request_subject)
        async for _ in subscription.messages:
            with self._lock:
                stream.writer.on_snapshot_requested()
            stream.snapshot_due.set()

    async def _watch_other_writers(self, stream: WrittenStream) -> None:
        """Read the pointer when another writer sends a heartbeat: that writer may have taken the stream over."""
        await self._is_prepared.wait()
        assert self._broker is not None
        subscription = await self._broker.client.subscribe(stream.address.heartbeat_subject)
        async for message in subscription.messages:
            try:
                is_foreign = LogHeartbeat.decode(message.data).epoch not in stream.ownership.epochs
                if is_foreign and not stream.ownership.is_superseded:
                    await self._refresh_pointer(self._broker, stream)
            except (*NATS_ERRORS, DecodeError) as error:
                _log.debug("%s: cannot check the heartbeat of another writer: %r", stream.address, error)

    async def _prepare(self, client: Client) -> None:
        """Create the log and the buckets, or check that they still have the stored messages."""
        is_logged = False
        while True:
            number = self._preparation.begin()
            self._is_prepared.clear()
            try:
                self._broker = await self._open_broker(client)
                if self._preparation.end(number):
                    self._is_prepared.set()
                return
            except NATS_ERRORS as error:
                problem = _describe_error(error)
                if not is_logged:
                    _log.warning("%s: JetStream is not ready (%s); trying again", self._worker, problem)
                    is_logged = True
                await self._send_problem(client, problem)
                await asyncio.sleep(PAUSE_S)

    async def _send_problem(self, client: Client, problem: str) -> None:
        """Send to the readers why nothing is stored: without a snapshot they get no heartbeat."""
        for stream in tuple(self._streams.values()):
            try:
                await client.publish(stream.address.problem_subject, problem.encode())
            except NATS_ERRORS as error:
                _log.debug("%s: cannot send a problem: %s", stream.address, error)

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
            duplicate_window=min(DUPLICATE_WINDOW_S, config.max_age_s),
        )
        try:
            info = await js.add_stream(log)
        except APIError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            info = await js.update_stream(log)
        broker = _Broker(
            client, js, await self._open_pointer_bucket(js, address), await self._open_snapshot_bucket(js, address)
        )
        for stream in tuple(self._streams.values()):
            await self._check_pointer(broker, stream, info)
            stream.has_work.set()
            stream.snapshot_due.set()
        return broker

    async def _open_pointer_bucket(self, js: JetStreamContext, address: LogAddress) -> KeyValue:
        config = self._config
        settings = KeyValueConfig(address.pointer_bucket, history=1, ttl=config.max_age_s, replicas=config.replicas)
        try:
            return await js.create_key_value(settings)
        except APIError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            return await js.key_value(address.pointer_bucket)  # another worker's writer created it with other settings

    async def _open_snapshot_bucket(self, js: JetStreamContext, address: LogAddress) -> ObjectStore:
        config = self._config
        settings = ObjectStoreConfig(ttl=config.max_age_s, replicas=config.replicas, storage=StorageType.FILE)
        try:
            return await js.create_object_store(address.snapshot_bucket, settings)
        except APIError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            return await js.object_store(address.snapshot_bucket)

    async def _check_pointer(self, broker: _Broker, stream: WrittenStream, info: StreamInfo) -> None:
        """Schedule a new snapshot if the broker has lost messages of this writer."""
        is_known = await self._refresh_pointer(broker, stream)
        with self._lock:
            stream.ownership.on_broker_checked(stream.writer, is_known=is_known, last_log_seq=info.state.last_seq)

    async def _refresh_pointer(self, broker: _Broker, stream: WrittenStream) -> bool:
        """Read the pointer; return False if it is not the one that this writer stored last.

        If it names an epoch that is not this writer's, another writer has taken the stream over.
        """
        ownership = stream.ownership
        was_superseded, num_stored = ownership.is_superseded, ownership.num_stored
        pointer, revision = await _read_pointer(broker, stream.address)
        is_known = ownership.on_pointer_read(pointer, revision, num_stored=num_stored)
        if ownership.is_superseded and not was_superseded:
            _log.warning("%s: another writer has taken the stream over; this one stops", stream.address)
        return is_known

    async def _send_heartbeats(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for stream in tuple(self._streams.values()):
                await self._send_heartbeat(stream)
                self._cancel_overdue(stream)
            try:
                await asyncio.wait_for(stop.wait(), HEARTBEAT_INTERVAL_S)
            except TimeoutError:
                continue

    async def _send_heartbeat(self, stream: WrittenStream) -> None:
        with self._lock:
            heartbeat = stream.writer.heartbeat()
        broker = self._broker
        if heartbeat is None or broker is None or stream.ownership.is_superseded or not self.thread.is_connected:
            return
        try:
            await broker.client.publish(stream.address.heartbeat_subject, heartbeat.encode())
        except NATS_ERRORS as error:
            _log.debug("%s: cannot send a heartbeat: %s", stream.address, error)

    def _cancel_overdue(self, stream: WrittenStream) -> None:
        """Cancel all messages in flight once the oldest is overdue. They are sent again in order."""
        if stream.in_flight and self._clock() - next(iter(stream.in_flight.values()))[1] > ACK_TIMEOUT_S:
            for future in tuple(stream.in_flight):
                future.cancel()

    # --- batches ---

    async def _keep_sending(self, stream: WrittenStream) -> None:
        while True:
            await stream.has_work.wait()
            stream.has_work.clear()
            stream.is_woken = False
            await self._is_prepared.wait()
            await self._send_waiting(stream)
            with self._lock:
                is_due = bool(stream.writer.snapshot_reason(self._clock()))
            if is_due:
                stream.snapshot_due.set()

    async def _send_waiting(self, stream: WrittenStream) -> None:
        broker, ownership = self._broker, stream.ownership
        assert broker is not None
        while len(stream.in_flight) < MAX_IN_FLIGHT and self._preparation.is_done and not ownership.is_superseded:
            with self._lock:
                message = stream.writer.pop_message(broker.max_payload_bytes)
            if message is None:
                return
            try:
                future = await broker.js.publish_async(
                    stream.address.subject, message.payload, headers=message.headers, stream=stream.address.log
                )
            except NATS_ERRORS as error:
                self._on_failed(stream, message, error)
                return
            stream.in_flight[future] = message, self._clock()
            future.add_done_callback(partial(self._on_acknowledged, stream))

    def _on_acknowledged(self, stream: WrittenStream, future: asyncio.Future[PubAck]) -> None:
        message, _ = stream.in_flight.pop(future)
        error = TimeoutError("no acknowledgement") if future.cancelled() else future.exception()
        if error is not None:
            self._on_failed(stream, message, error)
            return
        ack = future.result()
        with self._lock:
            stream.writer.on_stored(message, ack.seq, is_duplicate=bool(ack.duplicate))
        stream.has_work.set()

    def _on_failed(self, stream: WrittenStream, message: LogMessage, error: BaseException) -> None:
        """Schedule the message again, and check first which messages the broker has."""
        with self._lock:
            stream.writer.on_failed(message)
        if self._preparation.is_done:
            _log.warning("%s: batch %d was not stored (%s); trying again", stream.address, message.seq, error)
        self._prepare_after_failure()
        stream.has_work.set()

    def _prepare_after_failure(self) -> None:
        """Prepare the broker again soon, unless that is under way."""
        pause_s = self._preparation.on_failed()
        if pause_s is not None:
            self._is_prepared.clear()
            asyncio.get_running_loop().call_later(pause_s, self._prepare_again.set)

    # --- the snapshot ---

    async def _keep_snapshot_current(self, stream: WrittenStream) -> None:
        while True:
            with suppress(TimeoutError):  # a snapshot may be due by its age
                await asyncio.wait_for(stream.snapshot_due.wait(), SNAPSHOT_CHECK_S)
            stream.snapshot_due.clear()
            await self._is_prepared.wait()
            while not stream.ownership.is_superseded:
                with self._lock:
                    reason = stream.writer.snapshot_reason(self._clock())
                if not reason or not await self._store_snapshot(stream):
                    break

    async def _store_snapshot(self, stream: WrittenStream) -> bool:
        """Build and store a snapshot; return False if that failed."""
        broker = self._broker
        assert broker is not None
        snapshot, traffic_bytes = await self._build_snapshot(stream)
        try:
            async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                is_stored = await self._write_snapshot(broker, stream, snapshot)
        except NATS_ERRORS as error:
            problem = _describe_error(error)
            _log.warning("%s: the snapshot was not stored (%s); trying again", stream.address, problem)
            is_stored = False
            self._prepare_after_failure()
        with self._lock:
            if is_stored:
                stream.writer.on_snapshot_stored(snapshot, traffic_bytes, self._clock())
            else:
                stream.writer.on_snapshot_failed()
        if is_stored:
            await self._send_heartbeat(stream)
            stream.has_work.set()
        else:
            await asyncio.sleep(PAUSE_S)
            stream.snapshot_due.set()
        return is_stored

    async def _build_snapshot(self, stream: WrittenStream) -> tuple[Snapshot, int]:
        """Build the snapshot in slices, and release the lock between two of them."""
        slices = stream.writer.build_snapshot()
        while True:
            with self._lock:
                try:
                    next(slices)
                except StopIteration as end:
                    result: tuple[Snapshot, int] = end.value
                    return result
            await asyncio.sleep(0)

    async def _write_snapshot(self, broker: _Broker, stream: WrittenStream, snapshot: Snapshot) -> bool:
        """Write the snapshot to the object that the pointer does not name, then update the pointer.

        Return False if another writer has taken over, or the pointer has changed in between.
        """
        ownership = stream.ownership
        await self._refresh_pointer(broker, stream)
        if ownership.is_superseded:
            return False
        revision, pointer = ownership.revision, ownership.next_pointer(snapshot)
        await broker.snapshots.put(stream.address.snapshot_object(pointer.slot), snapshot.encode())
        try:
            stored = await broker.pointers.update(stream.address.pointer_key, pointer.encode(), revision)
        except KeyWrongLastSequenceError:
            await self._refresh_pointer(broker, stream)
            return False
        ownership.on_pointer_stored(pointer, stored)
        return True


def _describe_error(error: BaseException) -> str:
    if isinstance(error, APIError) and error.err_code == _NO_STORAGE:
        return (
            f"{error.description}: make room on the server's disk, or raise its max_file_store or lower max_bytes, and "
            "restart it: it measures the disk when it starts"
        )
    return str(error) or type(error).__name__


async def _read_pointer(broker: _Broker, address: LogAddress) -> tuple[SnapshotPointer | None, int]:
    """Return the pointer and its revision. A pointer that cannot be decoded counts as none."""
    try:
        entry = await broker.pointers.get(address.pointer_key)
    except KeyNotFoundError as error:
        return None, 0 if error.entry is None else error.entry.revision or 0
    try:
        return SnapshotPointer.decode(entry.value or b""), entry.revision or 0
    except DecodeError:
        return None, entry.revision or 0


def open_jetstream_writer(
    config: JetStreamConfig, worker: str, *, topic: str = "", clock: Callable[[], float] = time.monotonic
) -> JetStreamWriter:
    """Start to connect, and return the writer of one worker's streams. Use it in a ``with`` block, or close it.

    Return without waiting for the connection: the thread retries until the broker is there, then sends every batch.

    Args:
        config: where the broker is, and how much it keeps.
        worker: name of the worker in the fleet, by which readers find it.
        topic: of its streams.
        clock: monotonic seconds.

    Raises:
        ConfigError: the worker or the topic cannot be a name in NATS.
    """
    LogAddress(worker, 0, topic, config.prefix)
    writer = JetStreamWriter(config, worker, topic, clock)
    writer.thread.start()
    return writer
