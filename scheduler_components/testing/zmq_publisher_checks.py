"""Checks of every publisher of KV events. Run each of ``PUBLISHER_CHECKS`` on a publisher of your own.

A check takes a function that opens a publisher: rank 0, without a topic and access control, bound to a tcp address that
the check can dial. It publishes through the publisher's own methods, listens with raw sockets, and raises
``ConformanceError`` with its trace. Each check opens one publisher and shuts it down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import zmq

from scheduler_components import BlockRemoved, KVCacheEvent, KVEventBatch
from scheduler_components.kv_events import BatchDecoder, Endpoint
from scheduler_components.testing.chain_event_generator import ChainEventGenerator
from scheduler_components.testing.check_trace import CheckTrace, checks_in
from scheduler_components.testing.interfaces import BLOCK_SIZE, BoundPublisher, Frames
from scheduler_components.testing.stream_verifier import AdvertisedStream, RecordedStream, ReplayResponse, verify_stream
from scheduler_components.testing.zmq_stream_probe import StreamProbe

__all__ = ["PUBLISHER_CHECKS", "OpenPublisher"]

OpenPublisher = Callable[[], BoundPublisher]

DEADLINE_S = 10.0
"""A batch that was not sent within this time is lost."""

_NUM_BATCHES = 60


@dataclass(slots=True)
class _PublisherBench:
    """A publisher with a listener, and the published events."""

    trace: CheckTrace
    publisher: BoundPublisher
    probe: StreamProbe
    while_waiting: list[Callable[[], object]]
    history: ChainEventGenerator = field(default_factory=ChainEventGenerator)
    published: list[KVCacheEvent] = field(default_factory=list)

    def publish(self, count: int) -> None:
        """Publish ``count`` batches of one event."""
        for _ in range(count):
            event = self.history.next(len(self.published))
            self.published.append(event)
            self.publisher.publish(KVEventBatch(float(len(self.published)), (event,)))

    def publish_until_received(self) -> None:
        """Publish until a batch arrives: a PUB socket drops batches before it has read the subscription."""

        def is_received() -> bool:
            if not self.probe.live:
                self.publish(1)
            return bool(self.probe.live)

        was_received = self.probe.receive_until(is_received, DEADLINE_S)
        self.trace.note("published batches until a subscriber received one")
        self.trace.require(was_received, f"a live batch within {DEADLINE_S} s", "silence")

    def expect_live(self, count: int) -> None:
        """Wait until the last ``count`` events arrive live, in order."""
        wanted = self.published[-count:]
        self.probe.receive_until(lambda: _events(self.probe.live)[-count:] == wanted, DEADLINE_S)
        self.trace.expect(wanted, _events(self.probe.live)[-count:], f"the last {count} events, live")

    def verify(self, record: RecordedStream, concerns: Callable[[str], bool]) -> None:
        """Verify the record by the rules that the check concerns."""
        verdict = verify_stream(record, AdvertisedStream(0, b"", BLOCK_SIZE))
        broken = [f"{each.rule}: {each.seen}" for each in verdict.violations if concerns(each.rule)]
        self.trace.expect([], broken, "broken rules of the wire")


def check_live_batches_match_the_wire_format(open_publisher: OpenPublisher) -> None:
    """Every event arrives once and in order, with three frames, growing numbers and ``[time, events, rank]``."""
    with _bench("Live batches arrive whole, in order, in the frames of the wire", open_publisher) as bench:
        bench.publish_until_received()
        bench.trace.call(f"published {_NUM_BATCHES} batches", lambda: bench.publish(_NUM_BATCHES))
        bench.expect_live(_NUM_BATCHES)
        # This check uses no replay. The next check verifies replays for late joiners.
        bench.verify(RecordedStream(live=tuple(bench.probe.live)), lambda rule: rule != "late-joiner")


def check_replay_from_0_returns_the_whole_stream(open_publisher: OpenPublisher) -> None:
    """A replay from 0 returns the whole stream, byte for byte as it was sent live."""
    with _bench("A replay from 0 is the stream", open_publisher) as bench:
        bench.publish_until_received()
        bench.trace.call(f"published {_NUM_BATCHES} batches", lambda: bench.publish(_NUM_BATCHES))
        bench.expect_live(_NUM_BATCHES)
        bench.trace.note("asked for a replay from 0")
        answer = bench.probe.request_replay(0, DEADLINE_S)
        bench.trace.require(answer.ended, "an answer with its end marker", f"{len(answer.messages)} messages without")
        bench.trace.expect(bench.published, _events(answer.messages), "every event, in order")
        live_first = int.from_bytes(bench.probe.live[0][1], "big")
        bench.trace.note(f"asked for a replay from {live_first}")
        again = bench.probe.request_replay(live_first, DEADLINE_S)
        record = RecordedStream(live=tuple(bench.probe.live), history=answer, again=again)
        bench.verify(record, lambda rule: rule.startswith("replay") or rule == "no-gap")


def check_every_replay_ends_with_the_end_marker(open_publisher: OpenPublisher) -> None:
    """The end marker also ends an empty reply, and the reply to a malformed request."""
    with _bench("Every reply ends with the end marker", open_publisher) as bench:
        for what, ask in (
            ("from 0 before anything was published", lambda: bench.probe.request_replay(0, DEADLINE_S)),
            ("from far beyond the end", lambda: bench.probe.request_replay(1 << 60, DEADLINE_S)),
            ("of seven bytes", lambda: bench.probe.send_malformed_request(DEADLINE_S)),
            ("that is this kit's extension", lambda: bench.probe.probe_extension(DEADLINE_S)),
        ):
            bench.trace.note(f"sent a replay request {what}")
            answer = ask()
            if isinstance(answer, ReplayResponse):
                bench.trace.expect(((), True), (answer.messages, answer.ended), "a bare end marker")
            else:  # The extension may send any reply that ends.
                bench.trace.require(answer is not None, "a reply that ends", "none")
        bench.publish(1)
        bench.trace.note("published a batch and asked from 0")
        bench.trace.expect(
            bench.published, _events(bench.probe.request_replay(0, DEADLINE_S).messages), "the published batch"
        )


def check_unencodable_event_takes_no_sequence(open_publisher: OpenPublisher) -> None:
    """An event that cannot be encoded takes no number: the events around it have consecutive numbers."""
    with _bench("An event that cannot be encoded does not affect others", open_publisher) as bench:
        bench.publish(1)
        poison = KVEventBatch(1.0, (BlockRemoved((1 << 70,)),))
        bench.trace.note("published an event with a hash of 71 bits")
        try:
            bench.publisher.publish(poison)
        except Exception as error:  # noqa: BLE001 - any error is accepted
            bench.trace.note(f"publish() raised {type(error).__name__}")
        bench.trace.call("published one more batch", lambda: bench.publish(1))
        answer = bench.probe.request_replay(0, DEADLINE_S)
        bench.trace.expect(bench.published, _events(answer.messages), "both good events by replay")
        numbers = [int.from_bytes(frames[-2], "big") for frames in answer.messages]
        bench.trace.expect(list(range(numbers[0], numbers[0] + 2)), numbers, "consecutive numbers")


def check_shutdown_flushes_and_releases(open_publisher: OpenPublisher) -> None:
    """Batches before ``shutdown`` arrive, no thread remains, and a second call does nothing."""
    threads = set(threading.enumerate())
    with _bench("shutdown() sends the pending batches and leaves no thread", open_publisher) as bench:
        bench.publish_until_received()
        bench.publisher.idle()  # A publisher that defers work to idle() has pending batches after this.
        bench.publish(8)
        bench.while_waiting.clear()
        bench.trace.call("published 8 batches and called shutdown()", bench.publisher.shutdown)
        bench.expect_live(8)
        bench.trace.call("called shutdown() again", bench.publisher.shutdown)
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    bench.trace.expect([], left, "threads left")


@contextmanager
def _bench(title: str, open_publisher: OpenPublisher) -> Iterator[_PublisherBench]:
    trace = CheckTrace(title)
    publisher = trace.call("opened a publisher", open_publisher)
    while_waiting: list[Callable[[], object]] = [publisher.idle]
    try:
        replay = Endpoint.parse(publisher.replay_endpoint or "", field="replay_endpoint")
        with zmq.Context() as context:
            probe = StreamProbe(
                context,
                Endpoint.parse(publisher.endpoint),
                replay,
                while_waiting=lambda: [work() for work in while_waiting],
            )
            try:
                yield _PublisherBench(trace, publisher, probe, while_waiting)
            finally:
                probe.close()
    finally:
        publisher.shutdown()


def _events(messages: tuple[Frames, ...] | list[Frames]) -> list[KVCacheEvent]:
    decoder = BatchDecoder()
    return [event for frames in messages for event in decoder.decode(frames[-1]).events]


PUBLISHER_CHECKS: tuple[Callable[[OpenPublisher], None], ...] = checks_in(globals())
"""All checks of a publisher."""
