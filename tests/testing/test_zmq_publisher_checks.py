"""Every publisher check passes on the kit's publishers, and fails with its trace on one that breaks its promise."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from kit.variants import found, instead_of, variants

from scheduler_components.kv_events import KVEventsConfig, ZmqEventPublisher
from scheduler_components.testing import ConformanceError, ScriptedPublisher
from scheduler_components.testing import zmq_publisher_checks as checks

pytestmark = pytest.mark.sockets


def open_zmq(dialect: str, framing: str) -> ZmqEventPublisher:
    config = KVEventsConfig(bind=True, dialect=dialect, replay_framing=framing)
    return ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=config)


@pytest.mark.parametrize("check", checks.PUBLISHER_CHECKS)
@pytest.mark.parametrize(("dialect", "framing"), [("array", "seed"), ("vllm", "topic")])
def test_the_zmq_publisher_passes(check: Callable[[checks.OpenPublisher], None], dialect: str, framing: str) -> None:
    check(lambda: open_zmq(dialect, framing))


LIVE = checks.check_live_batches_match_the_wire_format
REPLAY = checks.check_replay_from_0_returns_the_whole_stream
MARKER = checks.check_every_replay_ends_with_the_end_marker


class BrokenPublisher(ScriptedPublisher):
    @instead_of("live_messages", LIVE, "live-frames: a message of 2 frames")
    def sends_two_frames(self, sequence, payload):
        return [frames[1:] for frames in super().live_messages(sequence, payload)]

    @instead_of("live_messages", LIVE, "the last 60 events, live", held=())
    def swaps_live(self, sequence, payload):
        if sequence % 10 == 9:
            self.held = super().live_messages(sequence, payload)
            return []
        released, self.held = self.held, []
        return [*super().live_messages(sequence, payload), *released]

    @instead_of("idle", REPLAY, "every event, in order")
    def keeps_few_for_replay(self):
        self.window = 10
        super().idle()

    @instead_of("idle", MARKER, "((), False)")
    def never_ends(self):
        self.ends_answers = False
        super().idle()

    @instead_of("answer", MARKER, "before anything was published")
    def silent_when_empty(self, request):
        return super().answer(request) if self.sent else []

    @instead_of("answer", MARKER, "a reply that ends")
    def silent_to_strangers(self, request):
        return super().answer(request) if len(request) < 37 else []

    @found(checks.check_unencodable_event_takes_no_sequence, "consecutive numbers: [0, 1]")
    class burns_numbers(ScriptedPublisher):
        burnt = 0

        def publish(self, events):
            try:
                super().publish(events)
            except (OverflowError, ValueError):
                self.burnt += 1

        @property
        def next_sequence(self):
            return super().next_sequence + self.burnt

    @instead_of("live_messages", checks.check_shutdown_flushes_and_releases, "the last 8 events, live", tail=())
    def loses_the_tail(self, sequence, payload):
        """Sends a batch when the next one comes."""
        sent, self.tail = self.tail, super().live_messages(sequence, payload)
        return sent


BROKEN = variants(BrokenPublisher)


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_publisher_fails_with_its_trace(monkeypatch, name):
    broken, check, expected_text = BROKEN[name]
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
