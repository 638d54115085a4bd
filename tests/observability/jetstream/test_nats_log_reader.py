"""Reading a log from NATS, with a client that answers what the test says: nothing that comes ends the reading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from kit.follower_bench import POLICY

pytest.importorskip("nats", reason="needs nats-py: pip install scheduler-components[jetstream]")

import nats.errors

from observability.jetstream import nats_log_reader
from observability.jetstream.addresses import LogAddress
from observability.jetstream.nats_log_reader import Inbox, LogStream
from observability.kv_stream.log_records import LogHeartbeat, LogMessage, Snapshot, SnapshotPointer
from scheduler_components.kv_events.codec import MAX_PAYLOAD_BYTES

EPOCH, DIGEST = b"\7" * 16, bytes(8)
POINTER = SnapshotPointer(EPOCH, 2, 1)
SNAPSHOT = Snapshot(EPOCH, 0, DIGEST, [], [b"a", b"b"], DIGEST, 5)


class InlineThread:
    """Runs what a ``NatsThread`` would schedule on its loop, in the loop of the test."""

    def call(self, function: Callable[..., object], *args: object) -> None:
        function(*args)


class RecordingFollower:
    """Keeps what its stream reports, as name and arguments."""

    policy = POLICY

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def _record(self, *call: Any) -> Iterator[None]:
        self.calls.append(call)
        yield

    def on_pointer_read(self, request_id: int, pointer: SnapshotPointer | None, now_s: float) -> Iterator[None]:
        return self._record("pointer", request_id, pointer)

    def on_snapshot_read(self, request_id: int, snapshot: Snapshot | None, now_s: float) -> Iterator[None]:
        return self._record("snapshot", request_id, snapshot)

    def on_message(self, reading_id: int, message: LogMessage, now_s: float) -> Iterator[None]:
        return self._record("message", reading_id, message)

    def on_heartbeat(self, heartbeat: LogHeartbeat, now_s: float) -> Iterator[None]:
        return self._record("heartbeat", heartbeat)


@dataclass
class FakeBroker:
    """What the buckets hold, or the error that every call raises. It is client, JetStream and bucket in one."""

    pointer: bytes | None = None
    snapshot: bytes = b""
    size: int | None = None
    error: Exception | None = None

    def jetstream(self) -> FakeBroker:
        return self

    async def key_value(self, name: str) -> FakeBroker:
        if self.error is not None:
            raise self.error
        return self

    async def object_store(self, name: str) -> FakeBroker:
        if self.error is not None:
            raise self.error
        return self

    async def get_info(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(size=len(self.snapshot) if self.size is None else self.size)

    async def get(self, name: str, writeinto: Any = None) -> SimpleNamespace:
        if writeinto is not None:
            writeinto.write(self.snapshot)
        return SimpleNamespace(value=self.pointer)


class ReaderBench:
    def __init__(self, client: Any = None) -> None:
        self.inbox, self.follower = Inbox(), RecordingFollower()
        self.stream = LogStream(LogAddress("pod"), InlineThread(), self.inbox)  # type: ignore[arg-type]
        self.stream.follower = self.follower  # type: ignore[assignment]
        self.stream.client = client

    async def ask(self, request: Callable[[], None]) -> list[tuple[Any, ...]]:
        """Send a request and return what the follower is given."""
        request()
        await asyncio.gather(*self.stream.request_tasks)
        return self.delivered()

    def delivered(self) -> list[tuple[Any, ...]]:
        while self.inbox.items:
            for _ in self.inbox.items.popleft()(0.0):
                pass
        return self.follower.calls


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 10))


@pytest.mark.parametrize(
    ("client", "found"),
    [
        (FakeBroker(pointer=POINTER.encode()), POINTER),
        (FakeBroker(pointer=None), None),
        (FakeBroker(pointer=b"nonsense"), None),
        (FakeBroker(error=nats.errors.TimeoutError()), None),
        (FakeBroker(error=OSError("reset")), None),
        (None, None),
    ],
    ids=["a pointer", "an empty entry", "nonsense", "no answer", "a lost connection", "not connected yet"],
)
def test_every_request_of_the_pointer_is_answered(client: Any, found: SnapshotPointer | None) -> None:
    async def scenario() -> None:
        bench = ReaderBench(client)
        assert await bench.ask(lambda: bench.stream.read_pointer(7)) == [("pointer", 7, found)]

    run(scenario())


@pytest.mark.parametrize(
    ("client", "found"),
    [
        (FakeBroker(snapshot=SNAPSHOT.encode()), SNAPSHOT),
        (FakeBroker(snapshot=SNAPSHOT.encode()[:-1]), None),
        (FakeBroker(snapshot=SNAPSHOT.encode(), size=2 << 30), None),
        (FakeBroker(error=nats.errors.ConnectionClosedError()), None),
        (None, None),
    ],
    ids=["a snapshot", "cut", "too large", "a lost connection", "not connected yet"],
)
def test_every_request_of_the_snapshot_is_answered(client: Any, found: Snapshot | None) -> None:
    async def scenario() -> None:
        bench = ReaderBench(client)
        assert await bench.ask(lambda: bench.stream.read_snapshot(8, POINTER)) == [("snapshot", 8, found)]

    run(scenario())


def test_a_request_of_another_snapshot_may_fail() -> None:
    async def fail(subject: str) -> None:
        raise nats.errors.ConnectionClosedError

    async def scenario() -> None:
        bench = ReaderBench(SimpleNamespace(publish=fail))
        assert await bench.ask(bench.stream.request_snapshot) == []

    run(scenario())


def log_message(log_seq: int, data: bytes = b"batch", **headers: str) -> Any:
    named = LogMessage(0, EPOCH, 3, DIGEST, data).headers
    sequence = SimpleNamespace(stream=log_seq)
    return SimpleNamespace(metadata=SimpleNamespace(sequence=sequence), headers=named | headers, data=data)


def test_a_bad_message_is_counted_and_the_reading_continues_after_it() -> None:
    async def scenario() -> None:
        bench = ReaderBench()
        for message in (
            log_message(4),
            log_message(5, **{"Nats-Msg-Id": "nonsense"}),
            log_message(6, bytes(MAX_PAYLOAD_BYTES + 1)),
            log_message(7, b"later"),
            log_message(6, b"again"),
        ):
            await bench.stream._receive(2, message)
        found = bench.delivered()
        assert [(call[1], call[2].log_seq, call[2].payload) for call in found] == [
            (2, 4, b"batch"), (2, 7, b"later"), (2, 6, b"again"),
        ]  # fmt: skip
        assert (bench.stream.bad_messages, bench.stream.next_log_seq) == (2, 8)

    run(scenario())


def test_a_bad_heartbeat_is_counted_and_the_next_one_is_received() -> None:
    good = LogHeartbeat(EPOCH, 4, DIGEST, 2)

    class Subscription:
        @property
        async def messages(self) -> Any:
            for data in (b"nonsense", good.encode()):
                yield SimpleNamespace(data=data)

    async def subscribe(subject: str) -> Subscription:
        return Subscription()

    async def scenario() -> None:
        bench = ReaderBench()
        bench.stream.begin(SimpleNamespace(subscribe=subscribe))  # type: ignore[arg-type]
        await asyncio.gather(*bench.stream.request_tasks)
        assert bench.delivered() == [("heartbeat", good)]
        assert bench.stream.bad_messages == 1

    run(scenario())


def test_a_full_inbox_holds_the_log_back_and_not_the_rare_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_log_reader, "_INBOX_ITEMS", 2)

    async def scenario() -> None:
        inbox = Inbox()
        for _ in range(2):
            await inbox.put(lambda now_s: iter(()))
        waiting = asyncio.ensure_future(inbox.put(lambda now_s: iter(())))
        await asyncio.sleep(0)
        inbox.put_now(lambda now_s: iter(()))
        assert (waiting.done(), len(inbox.items)) == (False, 3)
        inbox.items.clear()
        inbox.has_room.set()
        await waiting
        assert len(inbox.items) == 1
        assert inbox.has_items.is_set()

    run(scenario())


def test_a_reading_ends_with_the_next_one_and_all_end_with_the_stream() -> None:
    class Endless:
        """A subscription without a message."""

        num_unsubscribed = 0

        def jetstream(self) -> Endless:
            return self

        async def subscribe(self, *_: Any, **__: Any) -> Endless:
            return self

        async def next_msg(self, timeout: float | None) -> Any:
            return await asyncio.Future()

        async def unsubscribe(self) -> None:
            self.num_unsubscribed += 1
            raise nats.errors.ConnectionClosedError

    async def scenario() -> None:
        client, before = Endless(), asyncio.all_tasks()
        bench = ReaderBench(client)
        bench.stream.read_log(1, 11)
        first = bench.stream.log_task
        await asyncio.sleep(0.01)
        bench.stream.read_log(2, 20)
        await asyncio.sleep(0.01)
        assert first is not None
        assert first.cancelled()
        assert bench.stream.next_log_seq == 20
        await bench.stream.close()
        assert (client.num_unsubscribed, asyncio.all_tasks()) == (2, before)

    run(scenario())
