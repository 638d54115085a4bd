"""VirtualPageMover: when transfers end, in which order, and what storage then holds."""

from __future__ import annotations

from scheduler_components._internal.virtual_clock import NEVER_NS, VirtualClock
from scheduler_components.hicache import MemoryPageStore
from scheduler_components.values.page_operations import (
    BackupDone,
    CancelPrefetch,
    CopyToDevice,
    CopyToHost,
    IoEvent,
    LoadBackDone,
    PagesRead,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    ReleaseStorage,
    WriteDone,
    WriteToStorage,
)
from scheduler_engine.simulation.virtual_page_mover import SimulatedStorage, TransferLink, VirtualPageMover


def mover_of(storage: SimulatedStorage | None = None) -> VirtualPageMover:
    """Links with a latency of 10 ns, which take 1, 2, 4 and 8 ns per page."""
    to_host, to_device, to_storage, from_storage = (
        TransferLink(ns_per_page=ns_per_page, latency_ns=10) for ns_per_page in (1, 2, 4, 8)
    )
    return VirtualPageMover(
        clock=VirtualClock(),
        storage=storage,
        to_host=to_host,
        to_device=to_device,
        to_storage=to_storage,
        from_storage=from_storage,
    )


def storage_of(num_pages: int, ns_per_page: float = 0.0) -> SimulatedStorage:
    return SimulatedStorage(pages=MemoryPageStore(num_pages), ns_per_page=ns_per_page)


def digests_of(*pages: int) -> bytes:
    return b"".join(page.to_bytes(32, "little") for page in pages)


def drain(mover: VirtualPageMover) -> list[tuple[int, IoEvent]]:
    """Poll at the end of each operation; return the events with their times."""
    events: list[tuple[int, IoEvent]] = []
    while mover.next_end_ns < NEVER_NS:
        mover.clock.now_ns = mover.next_end_ns
        events += [(mover.clock.now_ns, event) for event in mover.poll()]
    return events


def test_copies_of_one_direction_take_turns() -> None:
    mover = mover_of()
    mover.submit([CopyToHost(1, (0, 1), (0, 1)), CopyToHost(2, (2,), (2,)), CopyToDevice(3, (0,), (5,))])
    assert mover.next_end_ns == 12
    assert drain(mover) == [(12, WriteDone(1, True)), (12, LoadBackDone(3, True)), (23, WriteDone(2, True))]


def test_a_link_that_was_idle_begins_at_the_submission() -> None:
    mover = mover_of()
    mover.submit([CopyToHost(1, (0,), (0,))])
    drain(mover)
    mover.clock.now_ns = 100
    mover.submit([CopyToHost(2, (0,), (0,))])
    assert drain(mover) == [(111, WriteDone(2, True))]


def test_nothing_ends_early() -> None:
    mover = mover_of()
    mover.submit([CopyToHost(1, (0, 1), (0, 1))])
    mover.clock.now_ns = 11
    assert mover.poll() == []
    mover.clock.now_ns = 12
    assert mover.poll() == [WriteDone(1, True)]


def test_the_budget_of_loads_is_what_is_not_being_loaded() -> None:
    mover = mover_of()
    budget = mover.load_back_budget_pages
    mover.submit([CopyToDevice(1, tuple(range(100)), tuple(range(100)))])
    assert mover.load_back_budget_pages == budget - 100
    drain(mover)
    assert mover.load_back_budget_pages == budget


def test_pages_are_stored_when_the_end_of_their_write_is_polled() -> None:
    mover = mover_of(storage_of(10))
    mover.submit([WriteToStorage(1, digests_of(7, 8), (0, 1)), QueryStorage(2, digests_of(7, 8))])
    assert drain(mover) == [(10, QueryDone(2, 0)), (18, BackupDone(1, True))]
    mover.submit([QueryStorage(3, digests_of(7, 8, 9))])
    assert drain(mover) == [(28, QueryDone(3, 2))]


def test_pages_that_storage_holds_are_not_written_again() -> None:
    mover = mover_of(storage_of(10))
    mover.submit([WriteToStorage(1, digests_of(1, 2, 3), (0, 1, 2))])
    drain(mover)
    mover.submit([WriteToStorage(2, digests_of(1, 2, 3, 4), (0, 1, 2, 3))])
    [(end_ns, event)] = drain(mover)
    assert (end_ns, event) == (22 + 10 + 4, BackupDone(2, True))


def test_storage_drops_the_pages_used_longest_ago() -> None:
    mover = mover_of(storage_of(3))
    mover.submit([WriteToStorage(1, digests_of(1), (0,)), WriteToStorage(2, digests_of(2, 3), (1, 2))])
    drain(mover)
    mover.submit([ReadFromStorage(3, digests_of(1), (0,))])
    drain(mover)
    mover.submit([WriteToStorage(4, digests_of(4), (3,))])
    drain(mover)
    mover.submit([QueryStorage(5, digests_of(1)), QueryStorage(6, digests_of(2)), QueryStorage(7, digests_of(3))])
    assert [event for _, event in drain(mover)] == [QueryDone(5, 1), QueryDone(6, 0), QueryDone(7, 1)]


def test_a_write_larger_than_storage_fails() -> None:
    mover = mover_of(storage_of(2))
    mover.submit([WriteToStorage(1, digests_of(1, 2, 3), (0, 1, 2))])
    assert [event for _, event in drain(mover)] == [BackupDone(1, False)]


def test_a_read_proceeds_in_slices_and_ends_at_the_first_missing_page() -> None:
    mover = mover_of(storage_of(100))
    mover.submit([WriteToStorage(1, digests_of(*range(40)), tuple(range(40)))])
    drain(mover)
    start_ns = mover.clock.now_ns
    mover.submit([ReadFromStorage(2, digests_of(*range(50)), tuple(range(50)))])
    first_ns = start_ns + 10 + 32 * 8
    last_ns = first_ns + 10 + 8 * 8
    assert drain(mover) == [
        (first_ns, PagesRead(2, 32)),
        (last_ns, PagesRead(2, 40)),
        (last_ns, ReadDone(2)),
    ]


def test_a_cancelled_read_ends_after_the_slice_under_way() -> None:
    mover = mover_of(storage_of(200))
    mover.submit([WriteToStorage(1, digests_of(*range(100)), tuple(range(100)))])
    drain(mover)
    start_ns = mover.clock.now_ns
    slice_ns = 10 + 32 * 8
    mover.submit([ReadFromStorage(2, digests_of(*range(100)), tuple(range(100)))])
    mover.submit([ReadFromStorage(3, digests_of(*range(32)), tuple(range(32)))])
    mover.clock.now_ns = start_ns + 1
    mover.submit([CancelPrefetch(2)])
    assert drain(mover) == [
        (start_ns + slice_ns, PagesRead(2, 32)),
        (start_ns + slice_ns, ReadDone(2)),
        (start_ns + 2 * slice_ns, PagesRead(3, 32)),
        (start_ns + 2 * slice_ns, ReadDone(3)),
    ]


def test_a_read_that_is_cancelled_before_its_turn_reads_nothing() -> None:
    mover = mover_of(storage_of(200))
    mover.submit([WriteToStorage(1, digests_of(*range(32)), tuple(range(32)))])
    drain(mover)
    mover.submit([ReadFromStorage(op, digests_of(*range(32)), tuple(range(32))) for op in (2, 3)])
    mover.submit([CancelPrefetch(3)])
    assert [event for _, event in drain(mover)] == [PagesRead(2, 32), ReadDone(2), ReadDone(3)]


def test_storage_serves_the_pages_of_all_replicas_one_after_the_other() -> None:
    """At 20 ns per page storage is slower than a link, which writes a page in 4 ns and reads one in 8 ns."""
    storage = storage_of(100, ns_per_page=20)
    first, second = mover_of(storage), mover_of(storage)
    first.submit([WriteToStorage(1, digests_of(*range(10)), tuple(range(10)))])
    second.submit([WriteToStorage(1, digests_of(*range(10, 15)), tuple(range(5)))])
    assert drain(first) == [(200, BackupDone(1, True))]
    assert drain(second) == [(300, BackupDone(1, True))], "behind the ten pages of the first"
    first.clock.now_ns = second.clock.now_ns = 1000
    second.submit([ReadFromStorage(2, digests_of(*range(10)), tuple(range(10)))])
    first.submit([WriteToStorage(2, digests_of(20), (0,)), QueryStorage(3, digests_of(0))])
    assert drain(second) == [(1200, PagesRead(2, 10)), (1200, ReadDone(2))]
    assert drain(first) == [(1010, QueryDone(3, 1)), (1220, BackupDone(2, True))], "queries move no pages"
    first.submit([WriteToStorage(4, digests_of(*range(10), 30), tuple(range(11)))])
    assert drain(first) == [(1240, BackupDone(4, True))], "ten of the eleven are there"


def test_a_link_may_be_slower_than_storage() -> None:
    mover = mover_of(storage_of(100, ns_per_page=2))
    mover.submit([WriteToStorage(1, digests_of(*range(10)), tuple(range(10)))])
    assert drain(mover) == [(10 + 40, BackupDone(1, True))]


def test_storage_serves_the_pages_of_a_cancelled_read_too() -> None:
    storage = storage_of(200, ns_per_page=20)
    first, second = mover_of(storage), mover_of(storage)
    first.submit([WriteToStorage(1, digests_of(*range(96)), tuple(range(96)))])
    drain(first)
    second.clock.now_ns = start_ns = first.clock.now_ns
    first.submit([ReadFromStorage(2, digests_of(*range(96)), tuple(range(96)))])
    first.clock.now_ns += 1
    first.submit([CancelPrefetch(2)])
    second.submit([ReadFromStorage(3, digests_of(0), (0,))])
    slice_ns = 32 * 20
    assert drain(first) == [(start_ns + slice_ns, PagesRead(2, 32)), (start_ns + slice_ns, ReadDone(2))]
    assert drain(second)[0] == (start_ns + 3 * slice_ns + 20, PagesRead(3, 1))


def test_a_forward_waits_for_the_loads_that_go_by_layer() -> None:
    mover = mover_of()
    assert mover.end_of_forward_ns(3200) == 3200
    mover.submit([CopyToDevice(1, tuple(range(2000)), tuple(range(2000)))])
    assert mover.end_of_forward_ns(3200) == 3200, "requests do not use these pages yet"
    drain(mover)
    now_ns = mover.clock.now_ns
    mover.submit([CopyToDevice(2, tuple(range(2000)), tuple(range(2000)), by_layer=True)])
    assert mover.end_of_forward_ns(3200) == now_ns + 4010 + 100, "the last of 32 layers is computed after the load"
    assert mover.end_of_forward_ns(32_000) == now_ns + 32_000, "all other layers were loaded in time"
    drain(mover)
    now_ns = mover.clock.now_ns
    assert mover.end_of_forward_ns(3200) == now_ns + 3200
    mover.submit([CopyToDevice(op, tuple(range(2000)), tuple(range(2000)), by_layer=True) for op in (3, 4)])
    assert mover.end_of_forward_ns(3200) == now_ns + 2 * 4010 + 100, "one load after the other"


def test_calls_count_what_was_begun_and_what_has_ended() -> None:
    mover = mover_of()
    mover.submit([ReleaseStorage()])
    assert mover.num_calls == 0
    mover.submit([CopyToHost(1, (0,), (0,))])
    drain(mover)
    assert mover.num_calls == 2
