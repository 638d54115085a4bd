"""The mover with a store that accepts only some pages, and with a cancelled read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from kit.page_stores import GatedPageStore

pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")

from scheduler_components import ParallelState
from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.hicache import (
    HostPool,
    KeySpace,
    MemoryPageStore,
    Placement,
    SimulatedDeviceMemory,
    ThreadPageMover,
)
from scheduler_components.ports import PageBytes
from scheduler_components.values.page_operations import (
    BackupDone,
    CancelPrefetch,
    IoEvent,
    PagesRead,
    ReadDone,
    ReadFromStorage,
    WriteToStorage,
)
from scheduler_components.values.page_shape import PageShape

pytestmark = pytest.mark.threads

SHAPE = PageShape(num_layers=1, layer_page_bytes=16)
NUM_PAGES = 96
DIGESTS = b"".join(at.to_bytes(DIGEST_BYTES, "big") for at in range(NUM_PAGES))
Eventually = Callable[[Callable[[], object]], None]


@pytest.fixture
def mover() -> Iterator[ThreadPageMover]:
    keys = KeySpace(
        model="m", dtype="u8", page_size=1, layout="page_first", placement=Placement(), parallel=ParallelState()
    )
    host = HostPool(SHAPE, NUM_PAGES)
    mover = ThreadPageMover(host=host, device=SimulatedDeviceMemory(SHAPE, 1), keys=keys)
    yield mover
    mover.close()


class SelectiveStore(MemoryPageStore):
    """Refuses the pages at these places of the whole write, and fails altogether after some."""

    def __init__(self, refused: set[int], num_until_failure: int = NUM_PAGES) -> None:
        super().__init__(1 << 20)
        self._refused = refused
        self._num_until_failure = num_until_failure
        self._num_seen = 0

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        if self._num_seen >= self._num_until_failure:
            raise OSError("full")
        held = super().batch_set(keys, pages)
        first, self._num_seen = self._num_seen, self._num_seen + len(keys)
        return [is_held and first + at not in self._refused for at, is_held in enumerate(held)]


@pytest.mark.parametrize(
    "store, is_ok",
    [
        (SelectiveStore(set()), True),
        (SelectiveStore({0}), False),
        (SelectiveStore({50}), False),
        (SelectiveStore({NUM_PAGES - 1}), False),
        (SelectiveStore(set(), num_until_failure=32), False),
    ],
)
def test_a_backup_succeeds_only_if_every_page_was_stored(
    mover: ThreadPageMover, eventually: Eventually, store: MemoryPageStore, is_ok: bool
) -> None:
    pages = mover.host.reserve(NUM_PAGES)
    for page in pages:
        mover.host.write(page, bytes(SHAPE.page_bytes))
    mover.host.commit(pages)
    mover.attach(store, deadline_s=10)
    mover.submit([WriteToStorage(1, DIGESTS, tuple(pages))])
    events: list[IoEvent] = []
    eventually(lambda: events.extend(mover.poll()) or events)
    assert events == [BackupDone(1, is_ok)]


def test_held_pages_are_not_written_again(mover: ThreadPageMover, eventually: Eventually) -> None:
    pages = mover.host.reserve(NUM_PAGES)
    for page in pages:
        mover.host.write(page, bytes(SHAPE.page_bytes))
    mover.host.commit(pages)
    events: list[IoEvent] = []
    for op, num_pages in ((1, 5), (2, 5), (3, NUM_PAGES), (4, NUM_PAGES)):
        if op == 2:
            mover.attach(MemoryPageStore(1 << 20), deadline_s=10)
        mover.submit([WriteToStorage(op, DIGESTS[: num_pages * DIGEST_BYTES], tuple(pages[:num_pages]))])
        eventually(lambda op=op: events.extend(mover.poll()) or len(events) == op)
    assert events == [BackupDone(1, False), BackupDone(2, True), BackupDone(3, True), BackupDone(4, True)]
    _, writes = mover.storage_stats()
    assert writes.pages_written == NUM_PAGES


def test_a_cancelled_read_ends_after_its_present_slice(mover: ThreadPageMover, eventually: Eventually) -> None:
    store = GatedPageStore("batch_get")
    pages = mover.host.reserve(NUM_PAGES)
    for page in pages:
        mover.host.write(page, bytes(SHAPE.page_bytes))
    mover.host.commit(pages)
    mover.attach(store, deadline_s=60)
    mover.submit([WriteToStorage(1, DIGESTS, tuple(pages))])
    events: list[IoEvent] = []
    eventually(lambda: events.extend(mover.poll()) or events)
    mover.host.release(pages)
    pages = mover.host.reserve(NUM_PAGES)
    mover.submit([ReadFromStorage(2, DIGESTS, tuple(pages))])
    assert store.entered.wait(60)
    mover.submit([CancelPrefetch(2)])
    store.gate.set()
    del events[:]
    eventually(lambda: events.extend(mover.poll()) or ReadDone(2) in events)
    [landed, _] = events
    assert isinstance(landed, PagesRead)
    assert 0 < landed.num_pages < NUM_PAGES
