"""InputBlocker relays, holds or rejects each message."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.input_blocker import BlockerState, InputBlocker, InputLimits
from scheduler_components.testing import VirtualClock
from scheduler_components.testing.fakes import ListRefusalSink, TextInputReader
from scheduler_components.values import RejectionReason


class BlockerBench:
    """A blocker, and a scheduler that admits the passed messages immediately."""

    def __init__(self, **bounds: float | None) -> None:
        self.clock, self.rejections = VirtualClock(1_700_000_000.0), ListRefusalSink()
        self.active_ids: set[str] = set()
        self.blocker = InputBlocker(
            bounds=InputLimits(**bounds), active_ids=self.active_ids, reject=self.rejections.reject, clock=self.clock
        )

    def handle(self, *texts: str, is_broadcast: bool = True) -> list[str]:
        frames = [
            letter.frame.decode()
            for text in texts
            for letter in self.blocker.handle(text.encode(), TextInputReader().read(text.encode()))
        ]
        if is_broadcast:
            self.active_ids |= {text.split(":")[1] for text in frames if text.startswith("request")}
            self.blocker.on_broadcast()
        return frames

    def reasons(self) -> list[tuple[str, str]]:
        return [(refusal.rid, refusal.reason) for refusal in self.rejections.refused]


def test_messages_are_relayed_in_order_of_arrival() -> None:
    texts = ["request:a", "command:flush", "request:b", "abort:a"]
    bench = BlockerBench()
    assert bench.handle(*texts) == texts
    assert bench.blocker.stats.requests_admitted == 2
    assert not bench.rejections.refused


def test_blocked_input_holds_requests_only() -> None:
    bench = BlockerBench()
    assert bench.handle("block:", "block:", "request:a", "command:update", "request:b") == ["command:update"]
    assert bench.blocker.state is BlockerState.BLOCKED
    assert bench.blocker.stats.requests_held == 2
    assert bench.handle("abort:a") == []
    assert bench.handle("unblock:", "request:c", "unblock:") == ["request:b", "request:c"]
    assert bench.reasons() == [("a", RejectionReason.ABORTED)]
    assert bench.blocker.stats.requests_held == 0


def test_a_request_beyond_the_held_ones_is_rejected() -> None:
    bench = BlockerBench(max_held_requests=1)
    assert bench.handle("block:", "request:a", "request:b") == []
    assert bench.reasons() == [("b", RejectionReason.HELD_FULL)]


def test_draining_rejects_new_requests_and_admits_held_ones() -> None:
    bench = BlockerBench()
    assert bench.handle("block:", "request:a", "drain:") == ["request:a"]
    assert bench.blocker.state is BlockerState.DRAINING
    assert bench.handle("request:b", "abort:a", "command:dump") == ["abort:a", "command:dump"]
    assert bench.reasons() == [("b", RejectionReason.DRAINING)]
    assert bench.handle("unblock:", "request:b") == ["request:b"]


def test_a_request_that_is_too_large_is_rejected_with_its_size() -> None:
    bench = BlockerBench(max_request_bytes=20)
    assert bench.handle("request:a:123456789!", "request:b:1234567890!") == ["request:a:123456789!"]
    assert bench.rejections.refused[0].text == "rid='b': has 21 bytes, the limit is 20; shorten the prompt"


def test_a_request_above_the_rate_is_rejected_with_a_retry_time() -> None:
    bench = BlockerBench(max_requests_per_s=2.0, burst_requests=2)
    assert bench.handle("request:a", "request:b", "request:c", "abort:a") == ["request:a", "request:b", "abort:a"]
    (refusal,) = bench.rejections.refused
    assert (refusal.reason, refusal.retry_after_s) == (RejectionReason.TOO_MANY, 0.5)
    assert "exceeds the rate of 2 requests per second; try again in 0.500 s" in refusal.text
    bench.clock.now_s += 0.5
    assert bench.handle("request:c", "request:d") == ["request:c"]
    bench.clock.now_s -= 100  # a clock that goes back neither gives nor takes
    assert bench.handle("request:d") == []
    assert bench.rejections.refused[-1].retry_after_s == 0.5
    bench.clock.now_s += 1000  # and a long rest gives no more than the burst
    assert len(bench.handle("request:e", "request:f", "request:g")) == 2


def test_a_rejected_request_does_not_count_for_the_rate() -> None:
    bench = BlockerBench(max_requests_per_s=1.0, burst_requests=1, max_request_bytes=12)
    assert bench.handle("request:b:0123456789", "request:a") == ["request:a"]


def test_a_copy_in_flight_is_dropped_and_another_request_with_its_id_is_rejected() -> None:
    bench = BlockerBench()
    assert bench.handle("request:a:x", "request:a:x", "request:a:y", is_broadcast=False) == ["request:a:x"]
    bench.active_ids.add("a")
    bench.blocker.on_broadcast()
    assert bench.handle("request:a:x", "request:a:y") == []
    assert bench.reasons() == [("a", RejectionReason.IN_USE)] * 2
    assert bench.blocker.stats.requests_repeated == 2
    bench.handle("block:", "request:h:x", "request:h:x", "request:h:y")
    assert bench.blocker.stats.requests_repeated == 3
    assert bench.reasons()[2:] == [("h", RejectionReason.IN_USE)]


def test_a_copy_of_an_ended_request_is_rejected_and_its_id_can_be_reused() -> None:
    bench = BlockerBench()
    bench.handle("request:a:x")
    bench.active_ids.clear()
    assert bench.handle("request:a:x") == []
    assert bench.reasons() == [("a", RejectionReason.SERVED)]
    assert bench.handle("request:a:y") == ["request:a:y"]


def test_an_early_abort_rejects_its_request_once() -> None:
    bench = BlockerBench(abort_memory_s=10.0)
    assert bench.handle("abort:a", "request:a:x") == []
    assert bench.reasons() == [("a", RejectionReason.ABORTED)]
    assert bench.handle("request:a:x") == ["request:a:x"]  # it was not served: this is another one
    assert bench.handle("abort:b") == []
    bench.clock.now_s += 10.5
    assert bench.handle("request:b") == ["request:b"]


def test_the_memory_of_recent_requests_is_bounded() -> None:
    bench = BlockerBench(max_known_requests=1)
    bench.handle("request:a", "request:b")
    bench.active_ids.clear()
    assert bench.handle("request:b", "request:a") == ["request:a"]
    assert bench.handle("abort:x", "abort:y", "request:x", "request:y") == ["request:x"]
    assert bench.reasons() == [("b", RejectionReason.SERVED), ("y", RejectionReason.ABORTED)]
    assert bench.handle("request:m", "request:n", "abort:m", is_broadcast=False) == [
        "request:m",
        "request:n",
        "abort:m",
    ]


def test_the_abort_of_a_long_running_request_is_relayed() -> None:
    """So long that the screen has forgotten it: the scheduler has not."""
    bench = BlockerBench(max_known_requests=1)
    bench.handle("request:a", "request:b")
    assert bench.handle("abort:a") == ["abort:a"]


def test_a_late_abort_does_not_reject_a_later_request_with_its_id() -> None:
    bench = BlockerBench()
    bench.handle("request:a:x")
    bench.active_ids.clear()  # it ended, and its client had left just before
    assert bench.handle("abort:a", "request:a:y") == ["abort:a", "request:a:y"]


def test_a_failing_rejection_sink_is_counted() -> None:
    bench = BlockerBench(max_request_bytes=10)
    bench.rejections.error = OSError("no way back")
    assert bench.handle("request:a:too long", "request:b") == ["request:b"]
    assert bench.blocker.failures.total == 1
    assert bench.blocker.stats.requests_refused == 1


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_recv_per_poll": 0},
        {"max_request_bytes": 0},
        {"max_requests_per_s": 0.0},
        {"max_requests_per_s": math.nan},
        {"burst_requests": 0},
        {"max_held_requests": 0},
        {"max_known_requests": 0},
        {"abort_memory_s": -1.0},
    ],
)
def test_an_invalid_limit_is_rejected(bounds: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bounds))):
        InputLimits(**bounds)


TEXTS = st.lists(
    st.one_of(
        st.builds("request:{}:{}".format, st.sampled_from("abcde"), st.integers(0, 1)),
        st.builds("abort:{}".format, st.sampled_from("abcde")),
        st.sampled_from(["block:", "unblock:", "drain:", "command:dump"]),
    ),
    max_size=30,
)


@given(texts=TEXTS, is_broadcast=st.booleans())
def test_every_request_is_relayed_held_rejected_or_a_copy(texts: list[str], is_broadcast: bool) -> None:
    bench = BlockerBench()
    went_on = bench.handle(*texts, is_broadcast=is_broadcast)
    stats = bench.blocker.stats
    requests = [text for text in texts if text.startswith("request")]
    assert [text for text in went_on if text.startswith("command")] == [t for t in texts if t.startswith("command")]
    num_admitted = len([text for text in went_on if text.startswith("request")])
    assert stats.requests_admitted == is_broadcast * num_admitted, "a request counts when it is relayed"
    assert stats.requests_refused == len(bench.rejections.refused)
    assert len(requests) == (num_admitted + stats.requests_refused + stats.requests_repeated + stats.requests_held)
    arrivals = iter(requests)  # what goes on keeps its order
    assert all(text in arrivals for text in went_on if text.startswith("request"))
