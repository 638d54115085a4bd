"""Each change of a view reaches the listener under the lock."""

from __future__ import annotations

from types import TracebackType

from observability.kv_stream import NullStreamListener
from observability.routing import LockedListener
from scheduler_components.kv_events import DecodedBatch

BATCH = DecodedBatch(0.0, (), 0)


class Lock:
    """A lock that knows whether it is held."""

    def __init__(self) -> None:
        self.is_held = False

    def __enter__(self) -> None:
        assert not self.is_held
        self.is_held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_held = False


class Recorder(NullStreamListener):
    """Records each change, and whether the lock was held."""

    def __init__(self, lock: Lock) -> None:
        self.lock, self.calls = lock, list[tuple[object, ...]]()

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        self.calls.append(("batch", rank, seq, batch, replayed, self.lock.is_held))

    def on_view_cleared(self, rank: int, reason: str) -> None:
        self.calls.append(("cleared", rank, reason, self.lock.is_held))

    def on_snapshot_begin(self, rank: int) -> None:
        self.calls.append(("begin", rank, self.lock.is_held))

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        self.calls.append(("end", rank, was_used, self.lock.is_held))


def test_each_change_of_a_view_is_passed_on_under_the_lock() -> None:
    lock = Lock()
    recorder = Recorder(lock)
    listener = LockedListener(recorder, lock)
    listener.on_snapshot_begin(3)
    listener.on_batch_applied(3, 7, BATCH, replayed=True)
    listener.on_snapshot_end(3, was_used=False)
    listener.on_view_cleared(3, "a gap")
    expected = [("begin", 3), ("batch", 3, 7, BATCH, True), ("end", 3, False), ("cleared", 3, "a gap")]
    assert recorder.calls == [(*call, True) for call in expected]
    assert not lock.is_held


def test_a_closed_listener_passes_on_nothing_and_ends_the_snapshots_that_have_begun() -> None:
    lock = Lock()
    recorder = Recorder(lock)
    listener = LockedListener(recorder, lock)
    for rank in (1, 2):
        listener.on_snapshot_begin(rank)
    listener.on_snapshot_end(1, was_used=True)
    listener.close()
    listener.on_batch_applied(2, 7, BATCH, replayed=False)
    listener.on_snapshot_end(2, was_used=True)
    listener.on_view_cleared(2, "closed")
    expected = [("begin", 1), ("begin", 2), ("end", 1, True), ("end", 2, False)]
    assert recorder.calls == [(*call, True) for call in expected]
