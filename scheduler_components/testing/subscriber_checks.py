"""Checks of every subscriber. Run each of ``SUBSCRIBER_CHECKS`` on a subscriber of your own.

A check takes a function that opens a subscriber of one stream. It publishes through a scripted publisher with the
faults of released publishers, and polls the subscriber until its view is the publisher's state. ``deadline_s`` bounds
each wait: a few probe intervals of the subscriber are enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from scheduler_components.kv_events.replay_messages import END_SEQ
from scheduler_components.testing.chain_event_generator import ChainEventGenerator
from scheduler_components.testing.check_trace import CheckTrace, checks_in
from scheduler_components.testing.interfaces import StreamEndpoints, StreamSubscriber
from scheduler_components.testing.zmq_scripted_publisher import ScriptedPublisher

__all__ = ["DEADLINE_S", "SUBSCRIBER_CHECKS", "OpenSubscriber"]

DEADLINE_S = 20.0
_POLL_S = 0.005


OpenSubscriber = Callable[[StreamEndpoints], StreamSubscriber]


@dataclass(slots=True)
class _StreamBench:
    trace: CheckTrace
    publisher: ScriptedPublisher
    subscriber: StreamSubscriber
    deadline_s: float
    history: ChainEventGenerator = field(default_factory=ChainEventGenerator)

    def publish(self, count: int) -> None:
        """Publish ``count`` batches of one event."""
        for _ in range(count):
            self.publisher.publish_events(self.history.next(self.publisher.next_sequence))

    def work(self) -> None:
        """Run both sides once."""
        self.publisher.idle()
        try:
            self.subscriber.poll(_POLL_S)
        except Exception as error:
            raise self.trace.failure("poll() raises nothing", f"{type(error).__name__}: {error}") from error

    def until(self, condition: Callable[[], bool]) -> bool:
        """Run both sides until ``condition`` holds; return False after the deadline."""
        end_s = time.monotonic() + self.deadline_s
        while not condition():
            if time.monotonic() > end_s:
                return False
            self.work()
        return True

    def knows_all(self) -> bool:
        return self.subscriber.is_live() and set(self.subscriber.blocks()) == set(self.history.live_hashes)

    def expect_all(self) -> None:
        """Wait until the view is the publisher's state and the subscriber reports that it is live."""
        reached = self.until(self.knows_all)
        stored, viewed = set(self.history.live_hashes), set(self.subscriber.blocks())
        self.trace.require(
            reached,
            f"live, with all {len(stored)} blocks, within {self.deadline_s} s",
            f"{'live' if self.subscriber.is_live() else 'not live'}, {len(stored - viewed)} blocks missing and "
            f"{len(viewed - stored)} stale",
        )

    def follow_live(self) -> None:
        """Wait for the live connection, so that later messages are lost only on purpose."""
        joined = self.until(lambda: self.publisher.num_subscribers > 0)
        self.trace.note("waited for its subscription, then published 3 batches")
        self.trace.require(joined, f"a subscription to {self.publisher.topic!r} within {self.deadline_s} s", "none")
        self.publish(3)
        self.expect_all()


def check_late_joiners_get_everything(open_subscriber: OpenSubscriber, deadline_s: float = DEADLINE_S) -> None:
    """A late subscriber receives the replay and then live batches, in all dialects and framings."""
    for dialect, framing in (("array", "seed"), ("map", "topic"), ("vllm", "seed")):
        title = f"A late subscriber gets the whole state and follows it ({dialect} dialect, {framing} framing)"
        with _bench(title, open_subscriber, deadline_s, dialect, framing, num_before=50) as bench:
            bench.trace.note("published 50 batches before it joined")
            bench.expect_all()
            bench.trace.note("published 50 more")
            bench.publish(50)
            bench.expect_all()


def check_gaps_are_filled(open_subscriber: OpenSubscriber, deadline_s: float = DEADLINE_S) -> None:
    """A replay fills a gap in the live batches."""
    with _bench("A gap in the live numbers is filled by replay", open_subscriber, deadline_s) as bench:
        bench.follow_live()
        bench.trace.note("lost 5 live batches, then published 5 more")
        bench.publisher.loses_live = True
        bench.publish(5)
        bench.publisher.loses_live = False
        bench.publish(5)
        bench.expect_all()


def check_lost_last_batch_is_detected(open_subscriber: OpenSubscriber, deadline_s: float = DEADLINE_S) -> None:
    """A probe detects the loss of the last batch before a silence."""
    with _bench("A lost last batch is detected although no batch follows it", open_subscriber, deadline_s) as bench:
        bench.follow_live()
        bench.trace.note("lost one live batch that clears everything, then sent nothing")
        bench.publisher.loses_live = True
        bench.publisher.publish_events(bench.history.clear())
        bench.expect_all()


def check_duplicate_batch_is_ignored(open_subscriber: OpenSubscriber, deadline_s: float = DEADLINE_S) -> None:
    """A repeated live batch changes nothing."""
    with _bench("A batch that arrives twice is applied once", open_subscriber, deadline_s) as bench:
        bench.follow_live()
        stored = bench.publisher.publish_events(bench.history.store(701, 702))
        bench.publisher.publish_events(bench.history.remove())
        bench.expect_all()
        bench.trace.note(f"sent batch {stored}, whose block was removed since, again")
        publisher = bench.publisher
        publisher.send_raw(publisher.topic, stored.to_bytes(8, "big"), publisher.sent[stored])
        bench.publish(2)
        bench.expect_all()


def check_malformed_messages_are_ignored(open_subscriber: OpenSubscriber, deadline_s: float = DEADLINE_S) -> None:
    """Malformed messages change nothing and raise nothing."""
    with _bench("Malformed messages change nothing", open_subscriber, deadline_s) as bench:
        bench.follow_live()
        topic = bench.publisher.topic
        bench.trace.note("sent one frame, two frames, a short number, the number -1, and a payload that is not msgpack")
        for frames in ((b"",), (topic, bytes(8)), (topic, b"123", b""), (topic, END_SEQ, b"")):
            bench.publisher.send_raw(*frames)
        bench.publish(3)
        bench.expect_all()


def check_publisher_restart_is_detected(open_subscriber: OpenSubscriber, deadline_s: float = DEADLINE_S) -> None:
    """The subscriber follows a publisher that restarts at 0 with an empty cache."""
    with _bench("A restarted publisher is followed again", open_subscriber, deadline_s) as bench:
        bench.follow_live()
        bench.trace.note("restarted the publisher at number 0 with an empty cache, and published 3 batches")
        bench.publisher.restart()
        bench.history.clear()
        for token in (901, 902, 903):
            bench.publisher.publish_events(bench.history.store(token, token))
        bench.expect_all()


def check_not_live_while_a_gap_is_open(open_subscriber: OpenSubscriber, deadline_s: float = DEADLINE_S) -> None:
    """A subscriber is not live while a gap is open."""
    with _bench("A subscriber with an open gap is not live", open_subscriber, deadline_s) as bench:
        bench.follow_live()
        bench.trace.note("lost a live batch while the replay channel is silent, then published one more")
        publisher = bench.publisher
        publisher.answers = False
        publisher.loses_live = True
        publisher.publish_events(bench.history.store(801, 801))
        lost = bench.history.live_hashes[-1]
        publisher.loses_live = False
        seen = publisher.publish_events(bench.history.store(802, 802))
        # It has detected the gap when it has applied the later batch or is no longer live.
        bench.until(
            lambda: bench.history.live_hashes[-1] in bench.subscriber.blocks() or not bench.subscriber.is_live()
        )
        bench.trace.require(
            not (bench.subscriber.is_live() and lost not in bench.subscriber.blocks()),
            f"not live while a batch before {seen} is missing",
            "live",
        )
        bench.trace.note("let the replay channel answer again")
        publisher.answers = True
        bench.expect_all()


@contextmanager
def _bench(
    title: str,
    open_subscriber: OpenSubscriber,
    deadline_s: float,
    dialect: str = "array",
    framing: str = "seed",
    num_before: int = 0,
) -> Iterator[_StreamBench]:
    trace = CheckTrace(title)
    with ScriptedPublisher.open(topic="kv", dialect=dialect, framing=framing) as publisher:
        history = ChainEventGenerator()
        for number in range(num_before):
            publisher.publish_events(history.next(number))
        place = StreamEndpoints(publisher.endpoint, publisher.replay_endpoint or "", "kv")
        subscriber = trace.call("opened a subscriber", lambda: open_subscriber(place))
        try:
            yield _StreamBench(trace, publisher, subscriber, deadline_s, history)
        finally:
            subscriber.close()


SUBSCRIBER_CHECKS: tuple[Callable[[OpenSubscriber, float], None], ...] = checks_in(globals())
"""All checks of a subscriber."""
