"""Pages that a store reads and writes in the host's own memory: every byte as it was, or a miss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.page_stores import GatedPageStore

pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")

from scheduler_components import ConfigError, ParallelState
from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.hicache import (
    ZERO_COPY_LAYOUT,
    HostPool,
    KeySpace,
    MemoryPageStore,
    Placement,
    SimulatedDeviceMemory,
    ThreadPageMover,
    open_file_page_store,
)
from scheduler_components.hicache.storage_backend import ZeroCopyBackend
from scheduler_components.ports import PageBytes, ZeroCopyPageStore
from scheduler_components.testing import IN_PLACE_STORE_CHECKS
from scheduler_components.values.page_operations import (
    BackupDone,
    IoEvent,
    PagesRead,
    ReadDone,
    ReadFromStorage,
    WriteToStorage,
)
from scheduler_components.values.page_shape import PageShape

SHAPE = PageShape(num_layers=2, layer_page_bytes=32)
NUM_PAGES = 40  # more than one slice of a read or write
DIGESTS = b"".join(at.to_bytes(DIGEST_BYTES, "big") for at in range(NUM_PAGES))
Eventually = Callable[[Callable[[], object]], None]


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ZeroCopyPageStore]:
    opened: ZeroCopyPageStore = (
        MemoryPageStore(1 << 20)
        if request.param == "memory"
        else open_file_page_store(tmp_path / "pages", capacity_bytes=1 << 20)
    )
    yield opened
    opened.close()


@pytest.mark.parametrize("check", IN_PLACE_STORE_CHECKS)
def test_zero_copy_stores_pass_the_checks(
    store: ZeroCopyPageStore, check: Callable[[ZeroCopyPageStore, str], None]
) -> None:
    check(store, "key ")


class StoringMover:
    """The mover of one rank over a store, and its events."""

    def __init__(
        self, store: ZeroCopyPageStore, eventually: Eventually, *, has_checksums: bool, deadline_s: float = 30
    ) -> None:
        keys = KeySpace(
            model="m", dtype="u8", page_size=1, layout=ZERO_COPY_LAYOUT, placement=Placement(), parallel=ParallelState()
        )
        self.host = HostPool(SHAPE, NUM_PAGES, verify=True)
        self.mover = ThreadPageMover(host=self.host, device=SimulatedDeviceMemory(SHAPE, 1), keys=keys)
        self.mover.attach_zero_copy(store, deadline_s=deadline_s, has_checksums=has_checksums)
        self.events: list[IoEvent] = []
        self._eventually = eventually

    def key(self, at: int) -> str:
        return self.mover.keys.key(DIGESTS[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES])

    def write(self) -> bool:
        """Store pages that this rank fills."""
        pages = self.host.reserve(NUM_PAGES)
        for at, page in enumerate(pages):
            self.host.write(page, content_of(at))
        self.host.commit(pages)
        self.mover.submit([WriteToStorage(1, DIGESTS, tuple(pages))])
        self._until(BackupDone)
        self.host.release(pages)
        [done] = [event for event in self.events if isinstance(event, BackupDone)]
        return done.is_ok

    def read(self) -> int:
        """Return how many pages landed, after a look at them."""
        pages = self.host.reserve(NUM_PAGES)
        self.mover.submit([ReadFromStorage(2, DIGESTS, tuple(pages))])
        self._until(ReadDone)
        num_read = max(event.num_pages for event in self.events if isinstance(event, PagesRead))
        self.host.commit(pages)
        assert [bytes(self.host.read(page)) for page in pages[:num_read]] == list(map(content_of, range(num_read)))
        self.host.release(pages)
        return num_read

    def _until(self, kind: type[IoEvent]) -> None:
        self.events.clear()
        self._eventually(
            lambda: self.events.extend(self.mover.poll()) or any(isinstance(event, kind) for event in self.events)
        )


MakeRank = Callable[..., StoringMover]


@pytest.fixture
def make_rank(eventually: Eventually) -> Iterator[MakeRank]:
    """``make_rank(store, has_checksums=..., deadline_s=30)``; all are closed after the test."""
    made: list[StoringMover] = []

    def make(store: ZeroCopyPageStore, **options: Any) -> StoringMover:
        made.append(StoringMover(store, eventually, **options))
        return made[-1]

    yield make
    for rank in made:
        rank.mover.close()
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("page")])


def content_of(at: int) -> bytes:
    return bytes((at * 31 + place * 7) % 256 for place in range(SHAPE.page_bytes))


@pytest.mark.parametrize("has_checksums", [False, True])
def test_pages_are_written_and_read_without_a_copy(
    store: ZeroCopyPageStore, make_rank: MakeRank, has_checksums: bool
) -> None:
    rank = make_rank(store, has_checksums=has_checksums)
    assert rank.write()
    assert store.batch_get([rank.key(7)]) == [content_of(7)]  # a page has no header
    assert rank.read() == NUM_PAGES
    reads, writes = rank.mover.storage_stats()
    assert (reads.pages_hit, writes.pages_written) == (NUM_PAGES, NUM_PAGES)


def test_the_host_memory_is_registered_with_the_store(make_rank: MakeRank) -> None:
    class RecordingStore(MemoryPageStore):
        memory = memoryview(b"")

        def register(self, memory: memoryview) -> None:
            self.memory = memory

    store = RecordingStore(1 << 20)
    rank = make_rank(store, has_checksums=False)
    assert store.memory.nbytes == NUM_PAGES * SHAPE.page_bytes
    (page,) = rank.host.reserve(1)
    rank.host.write(page, content_of(3))
    assert content_of(3) in bytes(store.memory)


def test_pages_without_checksums_get_them_when_they_are_written_again(make_rank: MakeRank) -> None:
    store = MemoryPageStore(1 << 20)
    for has_checksums in (False, True):
        rank = make_rank(store, has_checksums=has_checksums)
        assert rank.write()
    assert rank.read() == NUM_PAGES


def damaged(page: bytes) -> bytes:
    return bytes([page[0] ^ 1]) + page[1:]


@pytest.mark.parametrize("damage", ["changed", "torn", "swapped", "all swapped", "no checksum"])
def test_a_checksum_detects_a_damaged_page(make_rank: MakeRank, damage: str) -> None:
    store = MemoryPageStore(1 << 20)
    rank = make_rank(store, has_checksums=True)
    rank.write()
    key = rank.key(34)
    if damage == "no checksum":
        store.delete([f"{key}.sum"])
    else:
        other = {"changed": damaged(content_of(34)), "torn": content_of(34)[:-1]}
        store.delete([key])
        store.batch_set([key], [other.get(damage, content_of(35))])
        if damage == "all swapped":  # the store answers with another key's page, and its checksum
            store.delete([f"{key}.sum"])
            store.batch_set([f"{key}.sum"], [store.batch_get([f"{rank.key(35)}.sum"])[0] or b""])
    assert rank.read() == 34
    assert store.batch_exists([key]) == store.batch_exists([f"{key}.sum"]) == 0  # so that it is written again
    reads, _ = rank.mover.storage_stats()
    assert (reads.pages_hit, reads.pages_corrupt) == (NUM_PAGES - 1, 1)


def test_a_page_stays_reserved_while_storage_writes_to_it(make_rank: MakeRank, eventually: Eventually) -> None:
    """Also long after the deadline, because the store could write into a page of another request."""
    store = GatedPageStore("batch_get_into")
    rank = make_rank(store, has_checksums=False, deadline_s=0.001)
    pages = rank.host.reserve(NUM_PAGES)
    rank.mover.submit([ReadFromStorage(2, DIGESTS, tuple(pages))])
    assert store.entered.wait(30)
    rank.mover.wait(0.05)
    assert rank.mover.poll() == []
    store.gate.set()
    eventually(lambda: rank.events.extend(rank.mover.poll()) or ReadDone(2) in rank.events)


class WrongReportStore(MemoryPageStore):
    """Reports wrong results of reads and writes in place."""

    def __init__(self, answer: Callable[[], Sequence[bool]]) -> None:
        super().__init__(1 << 20)
        self._answer = answer

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[memoryview]) -> Sequence[bool]:  # type: ignore[override]
        return self._answer()

    def batch_put_from(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> Sequence[bool]:  # type: ignore[override]
        return self._answer()


def _fail() -> Sequence[bool]:
    raise OSError("away")


@pytest.mark.parametrize("answer", [_fail, lambda: [True], list], ids=["raises", "half", "nothing"])
@pytest.mark.parametrize("has_checksums", [False, True])
def test_a_bad_store_is_a_miss(make_rank: MakeRank, answer: Callable[[], Sequence[bool]], has_checksums: bool) -> None:
    rank = make_rank(WrongReportStore(answer), has_checksums=has_checksums)
    assert not rank.write()
    assert rank.read() == 0


def three_pages(store: MemoryPageStore, *, has_checksums: bool) -> tuple[ZeroCopyBackend, list[int]]:
    host = HostPool(SHAPE, 3, verify=True)
    pages = host.reserve(3)
    for at, page in enumerate(pages):
        host.write(page, content_of(at))
    host.commit(pages)
    return ZeroCopyBackend(host=host, store=store, has_checksums=has_checksums), list(pages)


KEYS = ("a", "b", "c")


@pytest.mark.parametrize("has_checksums", [False, True])
def test_a_page_is_held_only_together_with_its_checksum(has_checksums: bool) -> None:
    store = MemoryPageStore(1 << 20)
    stored, pages = three_pages(store, has_checksums=has_checksums)
    assert stored.exists(KEYS) == 0
    assert stored.write(KEYS[:2], pages[:2])
    assert stored.exists(KEYS) == 2
    store.delete(["b.sum"])
    assert stored.exists(KEYS) == (1 if has_checksums else 2)
    store.delete(["a"])
    assert stored.exists(KEYS) == 0


def test_a_refused_write_is_reported_and_counted() -> None:
    class Full(MemoryPageStore):
        refused = ".sum"

        def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
            return [not key.endswith(self.refused) for key in keys]

    store = Full(1 << 20)
    stored, pages = three_pages(store, has_checksums=True)
    assert not stored.write(KEYS, pages)
    assert (stored.stats().pages_written, stored.stats().pages_refused) == (0, 3)
    store.refused = "b"
    assert not stored.write(KEYS, pages)
    assert (stored.stats().pages_written, stored.stats().pages_refused) == (2, 4)


@pytest.mark.parametrize("operation", ["batch_set", "batch_put_from", "batch_get", "batch_get_into", "batch_exists"])
def test_an_error_of_the_store_names_the_operation(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    class Open(MemoryPageStore):
        """Its operations can be replaced."""

    store = Open(1 << 20)
    stored, pages = three_pages(store, has_checksums=True)
    assert stored.write(KEYS, pages)

    def fail(*_: object) -> None:
        raise OSError("away")

    monkeypatch.setattr(store, operation, fail)
    if operation in ("batch_set", "batch_put_from"):
        assert not stored.write(KEYS, pages)
    elif operation == "batch_exists":
        assert stored.exists(KEYS) == 0
    else:
        stored.host.release(pages)
        assert stored.read(KEYS, stored.host.reserve(3)) == 0
        monkeypatch.undo()
        assert stored.exists(KEYS) == 3  # it has not lost its pages
    assert operation in str(stored.stats().last_problem)


def test_zero_copy_refuses_layer_first() -> None:
    keys = KeySpace(
        model="m", dtype="u8", page_size=1, layout=ZERO_COPY_LAYOUT, placement=Placement(), parallel=ParallelState()
    )
    host = HostPool(SHAPE, 2, layout="layer_first")
    mover = ThreadPageMover(host=host, device=SimulatedDeviceMemory(SHAPE, 1), keys=keys)
    with pytest.raises(ConfigError, match="host_layout='layer_first': does not work with a zero-copy store"):
        mover.attach_zero_copy(MemoryPageStore(1), deadline_s=1, has_checksums=False)
