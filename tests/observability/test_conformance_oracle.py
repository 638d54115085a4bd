"""Conformance with an oracle: an engine whose stream says what its pool holds conforms, one that forgets is named."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from threading import Event, Thread

import msgspec
import pytest
from kit.waiting import wait_until

from observability import check_conformance
from observability.kv_pool_client import KvPoolPage, KvPoolPlace
from scheduler_components import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KvPoolReader,
    ParallelState,
    RadixCache,
    SchedulerKvEventsPublisher,
)
from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher
from scheduler_components.testing.zmq_stream_probe import ProbeOptions
from scheduler_components.values import KvPoolSnapshot
from scheduler_engine.cli import main as cli

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

PAGE_SIZE = 4
OPTIONS = ProbeOptions(listen_s=20.0, enough_batches=150, answer_s=5.0, pool_every_s=0.05)
Change = Callable[[int, Iterable[KVCacheEvent]], Iterable[KVCacheEvent]]


class ConformingWorker:
    """A cache that requests fill and empty on a thread of its own, its stream, and ``/kv_pool`` as any engine may have.

    Args:
        change: edits the published events, given the number of the batch and its events.
        says_where: the oracle knows the number of the last batch.
        options: of the publisher.
    """

    def __init__(
        self, change: Change = lambda _, events: events, *, says_where: bool = True, **options: object
    ) -> None:
        self.cache = RadixCache(page_size=PAGE_SIZE, capacity_tokens=64 * PAGE_SIZE, record=True)
        config = KVEventsConfig(bind=True, **options)
        self.sink = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=config)
        parallel = ParallelState.trivial()
        publisher = SchedulerKvEventsPublisher(
            parallel=parallel, source=self.cache, sink=_Changed(self.sink, change or _tell_all)
        )
        self.reader = KvPoolReader(publisher=publisher, blocks=self.cache)
        self.says_where = says_where
        self.wanted: SimpleQueue[Future[KvPoolSnapshot]] = SimpleQueue()
        self.is_busy, self.is_over = Event(), Event()
        self.is_busy.set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._pages())
        self.threads = [Thread(target=self._run), Thread(target=self.server.serve_forever)]
        for thread in self.threads:
            thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.is_over.set()
        self.server.shutdown()
        for thread in self.threads:
            thread.join()
        self.server.server_close()
        self.reader.publisher.shutdown()

    def _run(self) -> None:
        chance = random.Random(7)
        while not self.is_over.wait(0.002):
            if self.is_busy.is_set():
                prompt = [chance.randrange(3) for _ in range(PAGE_SIZE * chance.randrange(1, 8))]
                match = self.cache.match_prefix(prompt)
                num_new = len(prompt) // PAGE_SIZE - len(match.pages)
                self.cache.lock(match.node)
                pages = self.cache.allocate(num_new)
                self.cache.unlock(match.node)
                self.cache.insert(prompt, [*match.pages, *pages])
                self.reader.publisher.publish_kv_events()
            self.reader.publisher.idle()
            while not self.wanted.empty():
                self.wanted.get().set_result(self.reader.read())

    def _pages(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Pages(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                future: Future[KvPoolSnapshot] = Future()
                engine.wanted.put(future)
                reading = future.result(timeout=10)
                ((place, hashes),) = reading.blocks.items()
                sequence = reading.sequence if engine.says_where else None
                counts = (KvPoolPlace(*place, len(hashes)),)
                body = msgspec.json.encode(
                    KvPoolPage(reading="r", sequence=sequence, places=counts, hashes=list(hashes))
                )
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Pages


def _tell_all(_: int, events: Iterable[KVCacheEvent]) -> Iterable[KVCacheEvent]:
    return events


class _Changed:
    """A sink in front of the publisher's, which changes the events."""

    def __init__(self, to: ZmqEventPublisher, change: Change) -> None:
        self.to, self.change, self.num_batches = to, change, 0
        self.idle, self.stats, self.shutdown = to.idle, to.stats, to.shutdown

    def publish(self, events: EventBatch) -> None:
        changed = tuple(self.change(self.num_batches, events.events))
        self.to.publish(msgspec.structs.replace(events, events=changed))
        self.num_batches += 1


@pytest.fixture
def open_engine() -> Iterator[Callable[..., ConformingWorker]]:
    opened: list[ConformingWorker] = []

    def open_one(*args: Change, **options: object) -> ConformingWorker:
        opened.append(ConformingWorker(*args, **options))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def check_worker(
    engine: ConformingWorker, options: ProbeOptions = OPTIONS
) -> tuple[int, str, dict[str, dict[str, object]]]:
    """Exit code, the report as text, and its rules by name."""
    report = check_conformance(
        engine.sink.endpoint, options, replay_endpoint=engine.sink.replay_endpoint, block_size=PAGE_SIZE,
        oracle=engine.url,
    )  # fmt: skip
    rules = {each["rule"]: each for each in json.loads(report.to_json())["streams"][0]["rules"]}
    return report.exit_code, "\n".join(report.lines()), rules


@pytest.mark.parametrize("options", [{}, {"buffer_steps": 5}, {"seq_base": "clock"}], ids=str)
def test_an_engine_that_tells_all_is_equal_to_its_pool_at_every_reading(
    open_engine: Callable[..., ConformingWorker], options: dict[str, object]
) -> None:
    code, text, rules = check_worker(open_engine(**options))
    assert code == 0, text
    assert {rules[rule]["status"] for rule in ("pool-missing", "pool-extra")} == {"kept"}
    assert "compared with the pool" in text


class Forgets:
    """Leaves out every third event of a kind, after the first ``after`` batches."""

    def __init__(self, kind: type[KVCacheEvent], after: int = 40) -> None:
        self.kind, self.after = kind, after
        self.num_seen = 0
        self.forgot_in: list[int] = []

    def __call__(self, number: int, events: Iterable[KVCacheEvent]) -> Iterator[KVCacheEvent]:
        for event in events:
            self.num_seen += isinstance(event, self.kind) and number >= self.after
            if self.num_seen % 3 == 1 and isinstance(event, self.kind) and number >= self.after:
                self.forgot_in.append(number)
            else:
                yield event


@pytest.mark.parametrize(("kind", "rule"), [(BlockRemoved, "pool-extra"), (BlockStored, "pool-missing")])
def test_an_engine_that_forgets_is_named_with_its_batch(
    open_engine: Callable[..., ConformingWorker], kind: type[KVCacheEvent], rule: str
) -> None:
    forgets = Forgets(kind)
    code, text, rules = check_worker(open_engine(forgets))
    assert code == 4, text
    assert rules[rule]["status"] == "broken"
    assert f"{rule}: " in text
    assert text.endswith("does NOT conform: a stream and its pool differ")
    for seen in rules[rule]["seen"]:  # type: ignore[attr-defined]
        numbers = [int(word) for word in seen.rpartition("since")[2].split() if word.isdecimal()]
        assert any(numbers[0] <= forgot <= numbers[-1] for forgot in forgets.forgot_in), seen


def test_an_oracle_that_does_not_know_where_the_stream_stands_is_read_while_it_stands_still(
    open_engine: Callable[..., ConformingWorker],
) -> None:
    engine = open_engine(Forgets(BlockRemoved, after=0), says_where=False)
    wait_until(lambda: engine.sink.stats().batches_sent > 60)
    busy = ProbeOptions(listen_s=0.5, answer_s=5.0, pool_every_s=0.1)
    assert check_worker(engine, busy)[2]["pool-extra"]["status"] == "not judged"
    engine.is_busy.clear()
    code, text, rules = check_worker(engine, busy)
    assert code == 4, text
    assert rules["pool-extra"]["status"] == "broken"


def test_the_command_says_it_by_its_exit_code(
    open_engine: Callable[..., ConformingWorker], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = open_engine(Forgets(BlockStored))
    arguments = [engine.sink.endpoint, "--replay-endpoint", engine.sink.replay_endpoint or "", "--batches", "100"]

    def run(*more: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["scheduler-components", "conformance", *arguments, *more])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code, *capsys.readouterr())

    code, output, _ = run("--oracle", engine.url)
    assert (code, "pool-missing" in output) == (4, True)
    code, output, complaint = run("--oracle", "http://127.0.0.1:1")
    assert (code, output) == (3, "")
    assert complaint.startswith("scheduler-components: http://127.0.0.1:1/kv_pool")
    assert complaint.count("\n") == 1
