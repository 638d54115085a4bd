"""Every publisher check passes on the kit's publishers, and fails with its trace on one that breaks its promise."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from scheduler_components import EventBatch
from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher
from scheduler_components.testing import ConformanceError, ScriptedPublisher
from scheduler_components.testing import zmq_publisher_checks as checks
from scheduler_components.testing.interfaces import Frames

pytestmark = pytest.mark.sockets


def open_zmq(dialect: str, framing: str) -> ZmqEventPublisher:
    config = KVEventsConfig(bind=True, dialect=dialect, replay_framing=framing)
    return ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=config)


@pytest.mark.parametrize("check", checks.PUBLISHER_CHECKS)
@pytest.mark.parametrize(("dialect", "framing"), [("array", "seed"), ("vllm", "topic")])
def test_the_zmq_publisher_passes(check: Callable[[checks.OpenPublisher], None], dialect: str, framing: str) -> None:
    check(lambda: open_zmq(dialect, framing))


class SendsTwoFrames(ScriptedPublisher):
    def live_messages(self, sequence: int, payload: bytes) -> list[Frames]:
        return [frames[1:] for frames in super().live_messages(sequence, payload)]


class SwapsLive(ScriptedPublisher):
    held: list[Frames] = []  # noqa: RUF012

    def live_messages(self, sequence: int, payload: bytes) -> list[Frames]:
        if sequence % 10 == 9:
            self.held = super().live_messages(sequence, payload)
            return []
        released, self.held = self.held, []
        return [*super().live_messages(sequence, payload), *released]


class KeepsFewForReplay(ScriptedPublisher):
    def idle(self) -> None:
        self.window = 10
        super().idle()


class NeverEnds(ScriptedPublisher):
    def idle(self) -> None:
        self.ends_answers = False
        super().idle()


class SilentWhenEmpty(ScriptedPublisher):
    def answer(self, request: bytes) -> list[Frames]:
        return super().answer(request) if self.sent else []


class SilentToStrangers(ScriptedPublisher):
    def answer(self, request: bytes) -> list[Frames]:
        return super().answer(request) if len(request) < 37 else []


class BurnsNumbers(ScriptedPublisher):
    burnt = 0

    def publish(self, events: EventBatch) -> None:
        try:
            super().publish(events)
        except (OverflowError, ValueError):
            self.burnt += 1

    @property
    def next_sequence(self) -> int:
        return super().next_sequence + self.burnt


class LosesTheTail(ScriptedPublisher):
    """Sends a batch when the next one comes."""

    tail: list[Frames] = []  # noqa: RUF012

    def live_messages(self, sequence: int, payload: bytes) -> list[Frames]:
        sent, self.tail = self.tail, super().live_messages(sequence, payload)
        return sent


@pytest.mark.broken_variants
@pytest.mark.parametrize(
    ("check", "broken", "expected_text"),
    [
        (checks.check_live_batches_match_the_wire_format, SendsTwoFrames, "live-frames: a message of 2 frames"),
        (checks.check_live_batches_match_the_wire_format, SwapsLive, "the last 60 events, live"),
        (checks.check_replay_from_0_returns_the_whole_stream, KeepsFewForReplay, "every event, in order"),
        (checks.check_every_replay_ends_with_the_end_marker, NeverEnds, "((), False)"),
        (checks.check_every_replay_ends_with_the_end_marker, SilentWhenEmpty, "before anything was published"),
        (checks.check_every_replay_ends_with_the_end_marker, SilentToStrangers, "a reply that ends"),
        (checks.check_unencodable_event_takes_no_sequence, BurnsNumbers, "consecutive numbers: [0, 1]"),
        (checks.check_shutdown_flushes_and_releases, LosesTheTail, "the last 8 events, live"),
    ],
)
def test_a_broken_publisher_fails_with_its_trace(
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[checks.OpenPublisher], None],
    broken: type[ScriptedPublisher],
    expected_text: str,
) -> None:
    monkeypatch.setattr(checks, "DEADLINE_S", 0.3)
    with pytest.raises(ConformanceError) as failed:
        check(broken.open)
    assert expected_text in str(failed.value)


def test_a_remaining_thread_is_reported() -> None:
    released = threading.Event()
    waiting = threading.Thread(target=released.wait, name="left-behind")

    class LeavesAThread(ScriptedPublisher):
        def shutdown(self) -> None:
            super().shutdown()
            if not waiting.ident:
                waiting.start()

    with pytest.raises(ConformanceError, match="left-behind"):
        checks.check_shutdown_flushes_and_releases(LeavesAThread.open)
    released.set()
    waiting.join()
