"""A shadow: both sides see the same world, the leader's result is used, and nothing of the follower reaches a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.errors import ComponentError, ConfigError
from scheduler_refactor.shadow import Shadow


class Sink:
    def __init__(self) -> None:
        self.sent: list[object] = []
        self.level = 0

    def send(self, value: object) -> int:
        self.sent.append(value)
        return len(self.sent)

    @property
    def size(self) -> int:
        return len(self.sent)


@dataclass
class Reporter:
    """Takes an event and the time, counts, and sends."""

    take: Callable[[], int]
    clock: Callable[[], float]
    sink: Sink
    factor: int = 1
    count: int = field(default=0)

    def report(self, extra: int = 0) -> tuple[int, float]:
        self.count += 1
        value = self.take() * self.factor
        if value < 0:
            raise ValueError(f"negative: {value}")
        self.sink.send((value + extra, self.clock()))
        return self.count, self.clock()


class Twice:
    """A shadowed reporter over a world that counts what reaches it."""

    def __init__(self, events: list[int], *, new: type[Reporter] = Reporter, **options: int) -> None:
        self.events, self.sink, self.now = list(events), Sink(), 0.0
        self.shadow = Shadow("reporter")
        old_take, new_take = self.shadow.tee("take", lambda: self.events.pop(0))
        old_clock, new_clock = self.shadow.tee("clock", self.tick, exact=False)
        old_sink, new_sink = self.shadow.port("sink", self.sink, calls=("send",))
        self.old = Reporter(old_take, old_clock, old_sink)
        self.new = new(new_take, new_clock, new_sink, **options)
        self.both = self.shadow.component(self.old, self.new, calls=("report",))

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @property
    def differences(self) -> int:
        return self.shadow.stats().differences


def test_an_equal_follower_is_no_difference_and_has_no_effect() -> None:
    twice = Twice([3, 4])
    assert [twice.both.report(), twice.both.report(10)] == [(1, 2.0), (2, 4.0)]
    assert twice.sink.sent == [(3, 1.0), (14, 3.0)]
    assert (twice.old.count, twice.new.count) == (2, 2)
    stats = twice.shadow.stats()
    assert (stats.calls, stats.differences, stats.failures) == (2, 0, 0)


class SendsTwice(Reporter):
    def report(self, extra: int = 0) -> tuple[int, float]:
        result = super().report(extra)
        self.sink.send("again")
        return result


class SendsNothing(Reporter):
    def report(self, extra: int = 0) -> tuple[int, float]:
        self.count += 1
        self.take()
        return self.count, self.clock()


class SendsFirst(Reporter):
    def report(self, extra: int = 0) -> tuple[int, float]:
        self.sink.send("first")
        return super().report(extra)


class ReturnsOther(Reporter):
    def report(self, extra: int = 0) -> tuple[int, float]:
        count, now = super().report(extra)
        return count + 1, now


class Handles(Reporter):
    """Handles the errors of its sink, as a component of the kit does."""

    def report(self, extra: int = 0) -> tuple[int, float]:
        self.count += 1
        self.take()
        try:
            self.sink.send("other")
        except ComponentError:
            self.count += 0
        return self.count, self.clock()


class Assigns(Reporter):
    def report(self, extra: int = 0) -> tuple[int, float]:
        self.sink.level = 7
        return super().report(extra)


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (SendsTwice, "the follower calls sink.send, the leader makes no further call"),
        (SendsNothing, "the follower does not call sink.send"),
        (SendsFirst, "the follower calls sink.send, the leader calls take"),
        (ReturnsOther, "the leader returns (1, 2.0), the follower returns (2, 2.0)"),
        (Handles, "the leader calls sink.send((3, 1.0)), the follower sink.send('other')"),
        (Assigns, "the follower calls sink.__setattr__, the leader calls take"),
    ],
)
def test_each_kind_of_difference_is_counted_and_named(
    new: type[Reporter], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    twice = Twice([3], new=new)
    assert twice.both.report() == (1, 2.0)
    assert twice.sink.sent == [(3, 1.0)]
    assert twice.sink.level == 0
    assert twice.differences == 1
    assert text in str((caplog.records[0].exc_info or ())[1])


def test_an_episode_is_logged_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    twice = Twice([1, 2, 3, 4, 5], factor=2)
    for _ in range(3):
        twice.both.report()
    twice.new.factor = 1
    twice.both.report()
    assert (twice.differences, len(caplog.records)) == (3, 2)
    twice.new.factor = 2
    twice.both.report()
    assert (twice.differences, len(caplog.records)) == (4, 3)
    assert twice.shadow.failures.counts == {"the shadow of reporter.report": 4}


class Fails(Reporter):
    def report(self, extra: int = 0) -> tuple[int, float]:
        raise RuntimeError("broken")


def test_a_failure_of_the_follower_does_not_reach_the_step() -> None:
    twice = Twice([1], new=Fails)
    assert twice.both.report() == (1, 2.0)
    assert (twice.differences, twice.shadow.stats().failures) == (0, 1)


def test_an_error_of_the_leader_is_raised_and_compared() -> None:
    twice = Twice([-1, -1])
    with pytest.raises(ValueError, match="negative: -1"):
        twice.both.report()
    assert twice.differences == 0
    twice.new.factor = 2
    with pytest.raises(ValueError, match="negative: -1"):
        twice.both.report()
    assert twice.differences == 1


class RaisesAnotherType(Reporter):
    def report(self, extra: int = 0) -> tuple[int, float]:
        try:
            return super().report(extra)
        except ValueError as error:
            raise RuntimeError(str(error)) from None


class RaisesNothing(Reporter):
    def report(self, extra: int = 0) -> tuple[int, float]:
        self.take()
        return 0, 0.0


@pytest.mark.parametrize("new", [RaisesAnotherType, RaisesNothing])
def test_another_error_of_the_follower_is_a_difference(new: type[Reporter]) -> None:
    twice = Twice([-1], new=new)
    with pytest.raises(ValueError, match="negative: -1"):
        twice.both.report()
    assert (twice.differences, twice.shadow.stats().failures) == (1, 0)


def test_an_error_of_a_port_is_the_same_for_both() -> None:
    twice = Twice([])
    with pytest.raises(IndexError) as raised:
        twice.both.report()
    assert {entry.name for entry in raised.traceback}.isdisjoint({"_follow", "_outcome"})
    assert twice.shadow.stats().differences == twice.shadow.stats().failures == 0


def test_an_interrupt_of_the_leader_passes() -> None:
    shadow = Shadow("loop")

    def interrupted() -> None:
        raise KeyboardInterrupt

    step = shadow.pair("step", interrupted, interrupted)
    with pytest.raises(KeyboardInterrupt):
        step()
    assert shadow.stats().calls == 0
    assert shadow.pair("next", lambda: 3, lambda: 3)() == 3


@given(st.lists(st.sampled_from(["report", "new", "old"]), max_size=20))
def test_the_world_cannot_see_which_side_leads(actions: list[str]) -> None:
    """The way back: after any changes of sides, results and effects are those of the old component alone."""
    twice, events = Twice([*range(30)]), [*range(30)]
    now, sink = [0.0], Sink()

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    alone = Reporter(lambda: events.pop(0), tick, sink)
    for action in actions:
        if action == "report":
            assert twice.both.report() == alone.report()
        else:
            twice.shadow.lead(action)  # type: ignore[arg-type]
    assert twice.sink.sent == sink.sent
    assert twice.differences == 0
    assert twice.old.count == twice.new.count


def test_a_leading_new_side_is_real_and_the_old_one_follows() -> None:
    twice = Twice([1, 2, 3], factor=5)
    twice.shadow.lead("new")
    assert twice.both.factor == 5
    twice.both.report()
    twice.shadow.lead("old")
    assert twice.both.factor == 1
    twice.both.report()
    assert [value for value, _ in twice.sink.sent] == [5, 2]  # type: ignore[misc]
    assert twice.differences == 2


def test_a_stopped_shadow_calls_the_leader_alone() -> None:
    twice = Twice([1, 2])
    twice.shadow.stop()
    assert twice.both.report() == (1, 2.0)
    assert (twice.new.count, twice.shadow.stats().calls) == (0, 0)
    with pytest.raises(ConfigError, match="has missed calls"):
        twice.shadow.lead("new")
    twice.shadow.lead("old")


def test_sides_change_between_calls_only() -> None:
    shadow = Shadow("loop")
    step = shadow.pair("step", lambda: shadow.lead("new"), lambda: None)
    with pytest.raises(ConfigError, match="inside a call"):
        step()


def test_arguments_that_a_method_changes_are_copied() -> None:
    def drain(queue: list[int]) -> int:
        return queue.pop() + len(queue)

    shadow = Shadow("queue")
    queue = [1, 2, 3]
    assert shadow.pair("drain", drain, drain, arguments=lambda queue: ((list(queue),), {}))(queue) == 5
    assert queue == [1, 2]
    assert shadow.stats().differences == 0
    assert shadow.pair("drain", drain, drain, arguments=lambda queue: queue.missing)(queue) == 3
    assert shadow.stats().failures == 1


def test_an_encoder_freezes_what_the_leader_sends() -> None:
    shadow = Shadow("buffer")
    sent: list[bytes] = []
    old_send, new_send = shadow.tee("send", lambda buffer: sent.append(bytes(buffer)), encode=bytes)
    broken, _ = shadow.tee("broken", lambda buffer: sent.append(b"!"), encode=lambda buffer: buffer.missing)

    def flush(send: Callable[[bytearray], None]) -> Callable[[], None]:
        def run() -> None:
            buffer = bytearray(b"abc")
            send(buffer)
            buffer.clear()

        return run

    shadow.pair("flush", flush(old_send), flush(new_send))()
    assert (sent, shadow.stats().differences) == ([b"abc"], 0)
    shadow.pair("flush", flush(broken), flush(new_send))()
    assert (sent[1:], shadow.stats().differences) == ([b"!"], 1)


def test_results_are_compared_as_the_user_says() -> None:
    shadow = Shadow("ratio")
    ratio = shadow.pair("ratio", lambda: 0.3, lambda: 0.1 + 0.2, same=lambda old, new: abs(old - new) < 1e-9)
    assert ratio() == 0.3
    assert shadow.stats().differences == 0
    shadow.pair("ratio", lambda: 1, lambda: 1, same=lambda old, new: 1 / 0 > 1)()
    assert shadow.stats().failures == 1


def test_a_follower_outside_of_a_call_reaches_reads_only() -> None:
    twice = Twice([1])
    assert twice.new.clock() == 1.0
    assert twice.new.sink.size == 0
    with pytest.raises(Exception, match="outside of a compared call"):
        twice.new.take()
    assert twice.old.take() == 1


def test_a_follower_cannot_call_the_shadow_again() -> None:
    shadow = Shadow("chain")
    calls: list[str] = []
    inner = shadow.pair("inner", lambda: calls.append("old"), lambda: calls.append("new"))
    shadow.pair("outer", lambda: None, inner)()
    assert (calls, shadow.stats().differences) == ([], 1)


def test_a_shadowed_component_is_read_but_not_assigned() -> None:
    twice = Twice([1])
    assert twice.both.count == 0
    with pytest.raises(AttributeError, match="set it on both components"):
        twice.both.factor = 3


@pytest.mark.parametrize("where", ["component", "port"])
def test_a_missing_method_is_named(where: str) -> None:
    shadow = Shadow("sink")
    with pytest.raises(ConfigError, match="is no method of Sink"):
        if where == "port":
            shadow.port("sink", Sink(), calls=("level",))
        else:
            shadow.component(Sink(), Sink(), calls=("publish",))


def test_an_unknown_side_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no side"):
        Shadow("x").lead("newest")  # type: ignore[arg-type]


def test_a_change_of_sides_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    shadow = Shadow("load")
    shadow.lead("new")
    assert "shadow load: the new side leads now; 0 differences until now" in caplog.text
