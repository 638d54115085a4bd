"""RouterListener: the router's view equals the view of the subscriber that it listens to."""

from __future__ import annotations

from types import TracebackType

from hypothesis import given
from hypothesis import strategies as st
from kit.events import batch, removed_run, stored_run

from observability.kv_stream import BatchApplier, BlockView, CountingView, NullStreamListener, StreamState, Tier
from observability.kv_stream.instructions import Clear
from observability.routing import KvRouter, LockedListener, RouterListener
from scheduler_components import AllBlocksCleared, DecodeError
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, DecodedBatch


def clock() -> float:
    return 0.0


def payload(*events: object) -> bytes:
    return BatchEncoder().encode(batch(*events), 0)  # type: ignore[arg-type]


STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "clear", "lost", "begin", "commit", "abort"]), st.integers(0, 5)),
    max_size=30,
)


@given(STEPS)
def test_the_router_sees_what_the_subscriber_sees(steps: list[tuple[str, int]]) -> None:
    router, view, is_staging = KvRouter(page_size=1), BlockView(), False
    router.on_replica_up("other", 0.0)
    router.on_replica_up("worker", 0.0)
    listener = RouterListener(router=router, replicas={0: "worker"}, clock=clock)
    applier = BatchApplier(rank=0, view=view, decoder=BatchDecoder(), listener=listener, wall_clock=clock)
    for number, (act, first) in enumerate(steps):
        if act in ("store", "remove", "clear"):
            events = {"store": stored_run(first, 3), "remove": removed_run(first, 2), "clear": AllBlocksCleared()}
            if is_staging:
                applier.apply_staged(number, payload(events[act]), is_snapshot_chunk=False)
            else:
                applier.apply(number, payload(events[act]), replayed=False)
        elif act == "lost":
            applier.carry_out(Clear("gap"))
        elif act == "begin":
            applier.start_staging()
            is_staging = True
        elif is_staging:
            if act == "commit":
                applier.commit_staging()
            else:
                applier.abort_staging()
            is_staging = False
        rank = router.rank_of("worker")
        assert rank is not None
        assert router.view.blocks(rank) == view.blocks(0)


def test_an_event_in_a_snapshot_confirms_what_was_sent() -> None:
    router = KvRouter(page_size=1)
    router.on_replica_up("worker", 0.0)
    listener = RouterListener(router=router, replicas={0: "worker"}, clock=clock)
    applier = BatchApplier(rank=0, view=CountingView(), decoder=BatchDecoder(), listener=listener, wall_clock=clock)
    router.speculative.add("worker", [1, 2], 0.0)
    applier.start_staging()
    applier.apply_staged(0, payload(stored_run(1, 1)), is_snapshot_chunk=True)
    assert len(router.speculative) == 1
    applier.commit_staging()
    assert router.overlaps(["worker"], [1, 2], now_s=0.0) == [(2, 0, 0)]


def test_a_discarded_snapshot_leaves_nothing_in_memory() -> None:
    """Neither one that was aborted, nor one that began again, nor one of a replica that has gone."""
    router = KvRouter(page_size=1)
    router.on_replica_up("worker", 0.0)
    listener = RouterListener(router=router, replicas={0: "worker"}, clock=clock)
    decoded = BatchDecoder().decode(payload(stored_run(1, 300)))
    for end in ("abort", "begin", "gone"):
        listener.on_snapshot_begin(0)
        listener.on_batch_applied(0, 0, decoded, replayed=True)
        assert router.view.has_blocks(Tier.DEVICE)
        if end == "begin":
            listener.on_snapshot_begin(0)
        elif end == "gone":
            router.remove_replica("worker")
        listener.on_snapshot_end(0, was_used=end == "gone")
        while router.view.sweep():
            pass
        assert not router.view.has_blocks(Tier.DEVICE)


def test_streams_of_other_ranks_are_ignored() -> None:
    router = KvRouter(page_size=1)
    router.on_replica_up("worker", 0.0)
    listener = RouterListener(router=router, replicas={0: "worker"}, clock=clock)
    decoded = BatchDecoder().decode(payload(stored_run(1, 3)))
    listener.on_snapshot_begin(7)
    listener.on_batch_applied(7, 0, decoded, replayed=False)
    listener.on_snapshot_end(7, was_used=True)
    listener.on_view_cleared(7, "gap")
    listener.on_batch_unreadable(0, 1, DecodeError("broken"))
    listener.on_gap(0, 1, 2)
    listener.on_state_changed(0, StreamState.CONNECTING, StreamState.LIVE)
    assert router.view.ranks == ()


# --- under a lock ---

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
