"""The hierarchical cache over real memory, threads and stores: pages come back byte for byte, or not at all.

Properties:
- what is loaded back on the device, from the host or from storage, is what was computed there;
- every instruction is answered once, with a store that fails, stalls or lies too;
- attaching and detaching a store, at any time, on some ranks first, is no error and loses no page of the tree;
- closing ends the threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.page_stores import GatedPageStore

pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")

from scheduler_components import CacheIntegrityError, ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.errors import StorageError
from scheduler_components.events import Tier
from scheduler_components.hicache import (
    CheckedPageStore,
    HiCachePolicy,
    HiCacheStepper,
    HiRadixCache,
    HostPool,
    KeySpace,
    MemoryPageStore,
    Placement,
    SimulatedDeviceMemory,
    ThreadPageMover,
    open_file_page_store,
)
from scheduler_components.ports import PageBytes, PageStore
from scheduler_components.values.page_operations import (
    BackupDone,
    CopyToDevice,
    CopyToHost,
    Instruction,
    IoEvent,
    LoadBackDone,
    QueryDone,
    QueryStorage,
    ReadDone,
    ReadFromStorage,
    WriteDone,
    WriteToStorage,
)
from scheduler_components.values.page_shape import PageShape
from scheduler_engine.engine.rank.hicache_tiers import SimulatedKvPages

pytestmark = pytest.mark.threads

SHAPE = PageShape(num_layers=3, layer_page_bytes=64)
PAGE_SIZE = 4
Eventually = Callable[[Callable[[], object]], None]


class ThreadedRank:
    """One rank over a real mover, with eight device pages."""

    def __init__(self, mover: ThreadPageMover, num_host_pages: int, policy: HiCachePolicy) -> None:
        self.mover = mover
        self.kv = SimulatedKvPages(device=mover.device, slice_index=1)
        self.cache = HiRadixCache(
            page_size=PAGE_SIZE,
            capacity_tokens=8 * PAGE_SIZE,
            host=mover.host,
            num_host_pages=num_host_pages,
            policy=policy,
            page_hook=self.kv,
        )
        self.stepper = HiCacheStepper(cache=self.cache, groups=ParallelGroups(), mover=mover)

    def step(self) -> bool:
        """True when nothing is under way any more."""
        self.stepper.step()
        self.mover.wait(0.01)
        return not self.cache.num_operations

    def compute(self, chat: int, num_pages: int) -> None:
        """Serve a prompt of a chat without looking what is cached."""
        self.cache.insert(prompt(chat, num_pages), self.cache.allocate(num_pages))

    def prepared(self, rid: str, chat: int, num_pages: int) -> bool:
        self.step()
        return self.cache.prefetch_queue.is_done(rid, prompt(chat, num_pages))

    def cached_pages(self, chat: int, num_pages: int) -> int:
        return len(self.cache.match_prefix(prompt(chat, num_pages)).pages)


def prompt(chat: int, num_pages: int) -> list[int]:
    return [chat * 1000 + at for at in range(num_pages * PAGE_SIZE)]


@contextmanager
def opened(num_host_pages: int = 64, prefetch: str = "wait_complete") -> Iterator[ThreadedRank]:
    keys = KeySpace(
        model="m",
        dtype="u8",
        page_size=PAGE_SIZE,
        layout="page_first",
        placement=Placement(),
        parallel=ParallelState.from_tp_rank(0, tp_size=1),
    )
    host = HostPool(SHAPE, num_host_pages, verify=True)
    mover = ThreadPageMover(host=host, device=SimulatedDeviceMemory(SHAPE, 8), keys=keys, max_load_back_pages=3)
    rank = ThreadedRank(mover, num_host_pages, HiCachePolicy(prefetch=prefetch, prefetch_threshold_pages=1))
    try:
        yield rank
        rank.cache.check_integrity()
    finally:
        rank.stepper.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("page")]


def test_pages_that_the_device_evicted_come_back_from_the_host(eventually: Eventually) -> None:
    with opened() as rank:
        for chat in range(4):
            rank.compute(chat, 6)
            eventually(rank.step)
        assert rank.cached_pages(0, 6) == 0
        eventually(lambda: rank.prepared("r", 0, 6))  # at most three pages at a time have room
        assert rank.cached_pages(0, 6) == 6
        assert rank.cache.stats().pages_loaded == 6


def test_a_page_loaded_with_other_bytes_is_an_error(eventually: Eventually) -> None:
    with opened() as rank:
        rank.compute(0, 4)
        eventually(rank.step)
        pages = rank.cache.match_prefix(prompt(0, 4)).pages
        match = rank.cache.match_prefix(prompt(0, 4))
        rank.mover.device.layers[:, pages[0]] += 1
        with pytest.raises(CacheIntegrityError, match="do not hold their content after a load"):
            rank.kv.on_loaded_back(bytes(match.node.digests), pages)


def test_pages_outlive_the_cache_in_storage(tmp_path: Path, eventually: Eventually) -> None:
    def make() -> PageStore:
        return open_file_page_store(tmp_path, capacity_bytes=1 << 20)

    with opened() as rank:
        rank.mover.attach(make(), deadline_s=10)
        rank.step()
        rank.compute(0, 7)
        eventually(rank.step)
        assert rank.cache.num_pages_on(Tier.STORAGE) == 7
    with opened() as rank:
        rank.mover.attach(make(), deadline_s=10)
        rank.step()
        rank.cache.prefetch_queue.start("r", prompt(0, 8))
        eventually(lambda: rank.prepared("r", 0, 8))
        assert rank.cached_pages(0, 8) == 7
        stats = rank.cache.stats()
        assert (stats.pages_prefetched, stats.pages_loaded) == (7, 7)
        rank.cache.prefetch_queue.record_admission("r", prompt_tokens=33, cached_tokens=7 * PAGE_SIZE)
        assert rank.cache.stats().storage_hit_tokens == 7 * PAGE_SIZE


class WrongPagesStore:
    """Holds every key, and returns wrong pages."""

    def __init__(self, answer: Callable[[], PageBytes | None]) -> None:
        self._answer = answer

    def batch_exists(self, keys: Sequence[str]) -> int:
        return len(keys)

    def batch_get(self, keys: Sequence[str]) -> list[PageBytes | None]:
        return [self._answer() for _ in keys]

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        raise OSError("full")

    def delete(self, keys: Sequence[str]) -> int:
        return 0

    def close(self) -> None:
        raise OSError("away")


def test_a_stalled_store_delays_no_step_beyond_its_deadline(eventually: Eventually) -> None:
    released = threading.Event()

    class Stalled(WrongPagesStore):
        def batch_exists(self, keys: Sequence[str]) -> int:
            released.wait()
            return len(keys)

    with opened() as rank:
        rank.mover.attach(Stalled(lambda: None), deadline_s=0.05)
        rank.step()
        rank.cache.prefetch_queue.start("r", prompt(0, 6))
        rank.compute(1, 2)
        eventually(lambda: rank.prepared("r", 0, 6))
        reads, _ = rank.mover.storage_stats()
        assert reads.stalls >= 1
        released.set()


def test_a_store_is_attached_and_detached_at_run_time(eventually: Eventually) -> None:
    with opened() as rank:
        for _ in range(2):
            rank.mover.attach(MemoryPageStore(1 << 20), deadline_s=10)
            with pytest.raises(StorageError, match="detach it"):
                rank.mover.attach(MemoryPageStore(1), deadline_s=10)
            rank.step()
            rank.cache.clear()
            rank.compute(0, 6)
            eventually(rank.step)
            assert rank.cache.num_pages_on(Tier.STORAGE) == 6
            rank.cache.prefetch_queue.start("r", prompt(1, 6))
            rank.mover.detach()
            eventually(rank.step)
            assert rank.cache.num_pages_on(Tier.STORAGE) == 0
            assert rank.cache.num_pages_on(Tier.HOST) == 6
            rank.cache.prefetch_queue.cancel("r")


@pytest.mark.parametrize(
    "instruction, answer",
    [
        (CopyToHost(1, (0,), (5,)), WriteDone(1, False)),
        (CopyToDevice(1, (5,), (0,)), LoadBackDone(1, False)),
        (WriteToStorage(1, bytes([1]) * 32, (5,)), BackupDone(1, False)),
        (QueryStorage(1, b"short"), QueryDone(1, 0)),
        (ReadFromStorage(1, bytes(32), (5,)), ReadDone(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_work_that_raises_is_answered_and_logged(
    instruction: Instruction, answer: IoEvent, caplog: pytest.LogCaptureFixture
) -> None:
    """Page 5 is free. The agreed way of failures is for all ranks; an error that ends one is not."""
    with opened() as rank:
        store = MemoryPageStore(1 << 20)
        rank.mover.attach(store, deadline_s=10)
        CheckedPageStore(store=store, page_bytes=SHAPE.page_bytes).batch_set(
            [rank.mover.keys.key(bytes(32))], [bytes(SHAPE.page_bytes)]
        )
        rank.mover.submit([instruction])
        rank.mover.wait(30.0)
        assert rank.mover.poll() == [answer]
        assert "failed; repeats are counted" in caplog.text


def test_a_copy_that_raises_fails_and_the_rank_continues(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as rank:
        with monkeypatch.context() as broken:
            broken.setattr(HostPool, "copy_from_device", _raise_memory_error)
            rank.compute(0, 4)
            eventually(rank.step)
        assert rank.cache.stats().pages_not_written == 4
        rank.compute(0, 4)
        eventually(rank.step)
        assert rank.cache.num_pages_on(Tier.HOST) == 4
        rank.cache.evict(4)
        with monkeypatch.context() as broken:
            broken.setattr(HostPool, "copy_to_device_by_layer", _raise_memory_error)
            eventually(lambda: rank.prepared("r", 0, 4))
        assert rank.cached_pages(0, 4) == 0
        eventually(lambda: rank.prepared("s", 0, 4))
        assert rank.cached_pages(0, 4) == 4


def _raise_memory_error(*_: object) -> None:
    raise MemoryError("no memory for a copy")


def test_aborted_prefetches_do_not_delay_others(eventually: Eventually) -> None:
    """Storage is never asked for them, but for the one that it is at work on."""
    with opened(prefetch="wait_complete") as rank:
        store = GatedPageStore("batch_exists", "close")
        rank.mover.attach(store, deadline_s=30)
        rank.step()
        for chat in range(12):
            rank.cache.prefetch_queue.start(f"aborted {chat}", prompt(chat, 6))
        rank.step()
        assert store.entered.wait(30)
        for chat in range(12):
            rank.cache.prefetch_queue.cancel(f"aborted {chat}")
        rank.cache.prefetch_queue.start("living", prompt(99, 6))
        rank.step()
        store.gate.set()
        eventually(lambda: rank.prepared("living", 99, 6))
        assert len(store.queries) == 2
        eventually(rank.step)


def test_best_effort_never_waits_for_storage() -> None:
    with opened(prefetch="best_effort") as rank:
        store = GatedPageStore("batch_exists", "close")
        rank.mover.attach(store, deadline_s=30)
        rank.step()
        for chat in range(12):
            rank.cache.prefetch_queue.start(f"r{chat}", prompt(chat, 6))
        rank.step()
        assert store.entered.wait(30)
        assert all(rank.cache.prefetch_queue.is_done(f"r{chat}", prompt(chat, 6)) for chat in reversed(range(12)))
        store.gate.set()


def test_a_step_does_not_wait_for_a_store_that_is_closed(eventually: Eventually) -> None:
    """The store closes when the test allows it, after the steps."""
    with opened() as rank:
        store = GatedPageStore("batch_exists", "close")
        rank.mover.attach(store, deadline_s=30)
        rank.step()
        rank.mover.detach()
        rank.step()
        rank.step()
        assert not store.closed.is_set()
        rank.mover.attach(MemoryPageStore(1 << 20), deadline_s=10)
        store.gate.set()
        assert store.closed.wait(30)
        rank.step()
        rank.compute(0, 6)
        eventually(rank.step)
        assert rank.cache.num_pages_on(Tier.STORAGE) == 6
