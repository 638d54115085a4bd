"""Reading one stream of a log from NATS: heartbeats, pointer, snapshot and messages go into an inbox."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from observability.jetstream.addresses import LogAddress
from observability.jetstream.log_follower import LogFollower
from observability.jetstream.nats_connection import NATS_ERRORS, NatsThread
from observability.kv_stream import StreamPosition, StreamStats, escape_unprintable
from observability.kv_stream.log_records import LogHeartbeat, Snapshot, SnapshotPointer, read_message
from scheduler_components import DecodeError
from scheduler_components._internal.extras import naming_extras
from scheduler_components.kv_events.codec import MAX_PAYLOAD_BYTES

with naming_extras:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

__all__ = ["Inbox", "InboxItem", "LogStream"]

_log = logging.getLogger("observability.jetstream")

_INBOX_ITEMS = 4_096
"""Messages, heartbeats and snapshots that wait to be applied: two seconds of a busy scheduler."""

_IDLE_HEARTBEAT_S = 5.0
_INACTIVE_S = 30.0
"""The broker deletes a consumer without a reader after this time."""

_READ_AGAIN_S = 0.5
_MAX_PROBLEM_BYTES = 500
_MAX_SNAPSHOT_BYTES = 1024 * 1024 * 1024
"""Four million blocks: the limit of what a writer can make a reader fetch."""

InboxItem = Callable[[float], Iterator[None]]
"""Applies one received item in slices; the argument is the current time."""


@dataclass(slots=True)
class Inbox:
    """Received items that are not applied yet. The connection's thread fills it, and the polling thread empties it."""

    items: deque[InboxItem] = field(default_factory=deque)
    has_items: threading.Event = field(default_factory=threading.Event)
    has_room: asyncio.Event = field(default_factory=asyncio.Event)

    async def put(self, item: InboxItem) -> None:
        """Add an item; wait while the inbox is full."""
        while len(self.items) >= _INBOX_ITEMS:
            self.has_room.clear()
            await self.has_room.wait()
        self.put_now(item)

    def put_now(self, item: InboxItem) -> None:
        """Add one of the rare items that need no limit."""
        self.items.append(item)
        self.has_items.set()


@dataclass(slots=True)
class LogStream:  # noqa: SCH003 - the tasks of one stream, and its counters
    """One stream's follower and its reading tasks. Implements ``LogChannel``.

    The polling thread uses ``follower``; the connection's thread uses everything else.

    Attributes:
        log_task: reads the log, which is at ``next_log_seq``.
        request_tasks, ended_tasks: requests, and ending readings of the log.
        bad_messages: unreadable messages and heartbeats.
        disconnects: times that the broker was lost.
        problem: why the writer cannot store batches; empty if it can.
    """

    address: LogAddress
    thread: NatsThread
    inbox: Inbox
    follower: LogFollower = field(init=False)
    client: Client | None = None
    log_task: asyncio.Task[None] | None = None
    next_log_seq: int = 0
    request_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    ended_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    bad_messages: int = 0
    disconnects: int = 0
    problem: str = ""

    # --- on the polling thread ---

    @property
    def position(self) -> StreamPosition:
        return self.follower.position

    def stats(self) -> StreamStats:
        """Return state and counters, including those of the connection."""
        cursor = self.follower.cursor
        stats = self.follower.stats(self.address.subject)
        return msgspec.structs.replace(
            stats,
            is_extended=True,
            last_error=self.problem or stats.last_error,
            disconnects=self.disconnects,
            bad_frames=self.bad_messages + cursor.forged,
            fenced=cursor.fenced,
        )

    def read_pointer(self, request_id: int) -> None:
        self.thread.call(self._start_task, self._read_pointer, request_id)

    def read_snapshot(self, request_id: int, pointer: SnapshotPointer) -> None:
        self.thread.call(self._start_task, self._read_snapshot, request_id, pointer)

    def request_snapshot(self) -> None:
        self.thread.call(self._start_task, self._request_snapshot)

    def read_log(self, reading_id: int, log_seq: int) -> None:
        self.thread.call(self._start_reading, reading_id, log_seq)

    # --- on the connection's thread ---

    def _start_task(self, work: Callable[..., object], *args: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work(*args))  # type: ignore[arg-type]
        self.request_tasks.add(task)
        task.add_done_callback(self.request_tasks.discard)

    async def _request_snapshot(self) -> None:
        try:
            if self.client is not None:
                await self.client.publish(self.address.snapshot_request_subject)
        except NATS_ERRORS as error:
            _log.debug("%s: cannot request a snapshot: %r", self.address, error)

    async def _read_pointer(self, request_id: int) -> None:
        pointer = None
        try:
            if self.client is not None:
                bucket = await self.client.jetstream().key_value(self.address.pointer_bucket)
                entry = await bucket.get(self.address.pointer_key)
                pointer = SnapshotPointer.decode(entry.value or b"")
        except (*NATS_ERRORS, DecodeError) as error:
            _log.debug("%s: cannot read the pointer: %r", self.address, error)
        self.inbox.put_now(partial(self.follower.on_pointer_read, request_id, pointer))

    async def _read_snapshot(self, request_id: int, pointer: SnapshotPointer) -> None:
        snapshot = None
        try:
            if self.client is not None:
                snapshot = await self._fetch_snapshot(self.client.jetstream(), pointer)
        except (*NATS_ERRORS, DecodeError) as error:
            _log.debug("%s: cannot read the snapshot: %r", self.address, error)
        self.inbox.put_now(partial(self.follower.on_snapshot_read, request_id, snapshot))

    async def _fetch_snapshot(self, js: JetStreamContext, pointer: SnapshotPointer) -> Snapshot | None:
        name = self.address.snapshot_object(pointer.slot)
        bucket = await js.object_store(self.address.snapshot_bucket)
        info = await bucket.get_info(name)
        if (info.size or 0) > _MAX_SNAPSHOT_BYTES:
            return None
        data = io.BytesIO()
        async with asyncio.timeout(self.follower.policy.answer_timeout_s * 10):
            await bucket.get(name, writeinto=data)
        return Snapshot.decode(data.getvalue())

    def begin(self, client: Client) -> None:
        """Start to receive heartbeats."""
        self.client = client
        self._start_task(self._receive_heartbeats, client)
        self._start_task(self._receive_problems, client)

    async def _receive_heartbeats(self, client: Client) -> None:
        subscription = await client.subscribe(self.address.heartbeat_subject)
        async for message in subscription.messages:
            try:
                heartbeat = LogHeartbeat.decode(message.data)
            except DecodeError:
                self.bad_messages += 1
                continue
            self.problem = ""
            await self.inbox.put(partial(self.follower.on_heartbeat, heartbeat))

    async def _receive_problems(self, client: Client) -> None:
        """Log why the writer cannot store batches, once per reason. Its next heartbeat ends the problem."""
        subscription = await client.subscribe(self.address.problem_subject)
        async for message in subscription.messages:
            text = escape_unprintable(message.data[:_MAX_PROBLEM_BYTES].decode(errors="replace"))
            if text and text != self.problem:
                _log.warning("%s: the writer cannot store batches: %s", self.address, text)
            self.problem = text

    def _start_reading(self, reading_id: int, log_seq: int) -> None:
        self.stop_reading()
        self.log_task = asyncio.get_running_loop().create_task(self._read_log(reading_id, log_seq))

    def stop_reading(self) -> None:
        """Cancel the reading of the log."""
        task, self.log_task = self.log_task, None
        if task is not None:
            self.ended_tasks.add(task)
            task.add_done_callback(self.ended_tasks.discard)
            task.cancel()

    async def _read_log(self, reading_id: int, log_seq: int) -> None:
        """Read from ``log_seq`` on. When the broker ends the subscription, continue after the last message."""
        self.next_log_seq = log_seq
        while True:
            try:
                await self._read_subscription(reading_id)
            except NATS_ERRORS as error:
                _log.debug("%s: cannot read the log: %r", self.address, error)
            await asyncio.sleep(_READ_AGAIN_S)

    async def _read_subscription(self, reading_id: int) -> None:
        assert self.client is not None
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.next_log_seq,
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
                # Not `async for`: it answers the broker's flow control only four times per second.
                await self._receive(reading_id, await messages.next_msg(None))
        finally:
            await _unsubscribe(messages)

    async def _receive(self, reading_id: int, message: Msg) -> None:
        """Put a message of the log into the inbox."""
        log_seq = message.metadata.sequence.stream
        try:
            if len(message.data) > MAX_PAYLOAD_BYTES:
                raise DecodeError("the message is larger than readers accept")
            decoded = read_message(log_seq, message.headers, message.data)
        except DecodeError:
            self.bad_messages += 1
        else:
            await self.inbox.put(partial(self.follower.on_message, reading_id, decoded))
        self.next_log_seq = max(self.next_log_seq, log_seq + 1)

    async def close(self) -> None:
        """Cancel every task."""
        tasks = (*self.request_tasks, *self.ended_tasks)
        if self.log_task is not None:
            tasks += (self.log_task,)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unsubscribe(messages: JetStreamContext.PushSubscription) -> None:
    try:
        await messages.unsubscribe()
    except NATS_ERRORS as error:
        _log.debug("cannot unsubscribe from the log: %r", error)
