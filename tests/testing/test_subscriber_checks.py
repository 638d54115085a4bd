"""Every subscriber check passes on the kit's subscriber and fails with a trace on a broken one."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import suppress

import pytest
import zmq

from observability.kv_stream import FollowPolicy, StreamState, open_subscriber, static_address
from scheduler_components import DecodeError
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.testing import ConformanceError, EventLedger
from scheduler_components.testing import subscriber_checks as checks
from scheduler_components.testing.interfaces import StreamEndpoints

pytestmark = pytest.mark.sockets

QUICK = FollowPolicy(answer_timeout_s=0.3, retry_min_s=0.02, retry_max_s=0.1, probe_interval_s=0.1)


class Follower:
    """The kit's subscriber of one stream."""

    def __init__(self, place: StreamEndpoints) -> None:
        address = static_address(place.endpoint, replay=place.replay_endpoint, topic=place.topic)
        self.subscriber = open_subscriber([address], policy=QUICK)
        self.poll, self.close = self.subscriber.poll, self.subscriber.close

    def blocks(self) -> Set[int]:
        return self.subscriber.blocks(0)

    def is_live(self) -> bool:
        return self.subscriber.stats()[0].state is StreamState.LIVE


@pytest.mark.parametrize("check", checks.SUBSCRIBER_CHECKS)
def test_the_kits_subscriber_passes(check: Callable[[checks.OpenSubscriber, float], None]) -> None:
    check(Follower, checks.DEADLINE_S)


class Naive:
    """A subscriber that applies live batches, never requests a replay and is always live, as in many routers."""

    def __init__(self, place: StreamEndpoints) -> None:
        self.ledger, self.decoder = EventLedger(), BatchDecoder()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(place.topic)
        self.socket.connect(place.endpoint)
        self.last = -1

    def poll(self, timeout_s: float) -> None:
        while self.socket.poll(int(1000 * timeout_s)):
            _, sequence, payload = self.socket.recv_multipart()
            self.receive(int.from_bytes(sequence, "big", signed=True), payload)

    def receive(self, sequence: int, payload: bytes) -> None:
        if sequence > self.last:
            self.last = sequence
            self.apply(payload)

    def apply(self, payload: bytes) -> None:
        with suppress(DecodeError):
            self.ledger.apply_all(self.decoder.decode(payload).events)

    def blocks(self) -> Set[int]:
        return self.ledger.hashes()

    def is_live(self) -> bool:
        return True

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


class AppliesOldBatches(Naive):
    def receive(self, sequence, payload):
        self.apply(payload)


@pytest.mark.broken_variants
@pytest.mark.parametrize(
    ("check", "broken", "message"),
    [
        (checks.check_late_joiners_get_everything, Naive, "blocks missing"),
        (checks.check_gaps_are_filled, Naive, "blocks missing"),
        (checks.check_lost_last_batch_is_detected, Naive, "0 blocks missing and 3 stale"),
        (checks.check_duplicate_batch_is_ignored, AppliesOldBatches, "1 stale"),
        (checks.check_malformed_messages_are_ignored, Naive, "ValueError: not enough values to unpack"),
        (checks.check_publisher_restart_is_detected, Naive, "3 blocks missing and 3 stale"),
        (checks.check_not_live_while_a_gap_is_open, Naive, "not live while a batch"),
    ],
)
def test_a_broken_subscriber_fails_with_its_trace(check, broken, message):
    with pytest.raises(ConformanceError) as failed:
        check(broken, 0.5)
    assert message in str(failed.value), str(failed.value)


def test_a_subscriber_that_never_subscribes_fails_the_check() -> None:
    class NeverSubscribes(Naive):
        def __init__(self, place: StreamEndpoints) -> None:
            super().__init__(StreamEndpoints("inproc://unbound", "", place.topic))

    with pytest.raises(ConformanceError, match="a subscription to b'kv' within"):
        checks.check_gaps_are_filled(NeverSubscribes, 0.1)
