"""Host pages: every page in one place, all or nothing, and bytes that come back as they went."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_components import CacheIntegrityError, OutOfPagesError
from scheduler_components.hicache import CheckedPageStore, HostPool, MemoryPageStore, SimulatedDeviceMemory
from scheduler_components.values.page_shape import PageShape

SHAPE = PageShape(num_layers=3, layer_page_bytes=5)
NUM_PAGES = 6


def content_of(number: int) -> bytes:
    return bytes((number * 31 + at * 7) % 256 for at in range(SHAPE.page_bytes))


class HostPoolMachine(RuleBasedStateMachine):
    """Any order of moves: counts add up, and each committed page holds what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(SHAPE, NUM_PAGES, verify=True)
        self.device = SimulatedDeviceMemory(SHAPE, NUM_PAGES)
        self.in_flight: list[dict[int, bytes]] = []
        self.committed: dict[int, bytes] = {}
        self.number = 0

    @initialize()
    def fill_device(self) -> None:
        for page in range(NUM_PAGES):
            self.device.write(page, content_of(200 + page))

    @rule(num_pages=st.integers(0, NUM_PAGES + 1), from_device=st.booleans(), data=st.data())
    def reserve(self, num_pages: int, from_device: bool, data: st.DataObject) -> None:
        if num_pages > self.pool.num_free:
            with pytest.raises(OutOfPagesError):
                self.pool.reserve(num_pages)
            return
        pages = self.pool.reserve(num_pages)
        if from_device:
            sources = data.draw(st.lists(st.integers(0, NUM_PAGES - 1), min_size=num_pages, max_size=num_pages))
            self.pool.copy_from_device(self.device, sources, pages)
            self.in_flight.append({page: self.device.read(at) for page, at in zip(pages, sources, strict=True)})
            return
        written = {}
        for page in pages:
            self.number += 1
            written[page] = content_of(self.number)
            self.pool.write(page, written[page])
        self.in_flight.append(written)

    @precondition(lambda self: self.in_flight)
    @rule(agreed=st.booleans())
    def settle(self, agreed: bool) -> None:
        pages = self.in_flight.pop(0)
        if agreed:
            self.pool.commit(list(pages))
            self.committed |= pages
        else:
            self.pool.abort(list(pages))

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.committed)), unique=True))
        self.pool.release(pages)
        for page in pages:
            del self.committed[page]

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def copy_to_device(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.committed)), unique=True))
        targets = data.draw(st.permutations(range(NUM_PAGES)))[: len(pages)]
        untouched = {page: self.device.read(page) for page in range(NUM_PAGES) if page not in targets}
        self.pool.copy_to_device(pages, self.device, targets)
        assert [self.device.read(target) for target in targets] == [self.committed[page] for page in pages]
        assert {page: self.device.read(page) for page in untouched} == untouched

    @rule(page=st.integers(-1, NUM_PAGES))
    def wrong_pages_change_nothing(self, page: int) -> None:
        moves: list[Callable[[], object]] = []
        if not any(page in pages for pages in self.in_flight):
            moves += [
                lambda: self.pool.commit([page]),
                lambda: self.pool.abort([page]),
                lambda: self.pool.write(page, content_of(0)),
                lambda: self.pool.copy_from_device(self.device, [0], [page]),
            ]
        if page not in self.committed:
            moves += [
                lambda: self.pool.release([page]),
                lambda: self.pool.read(page),
                lambda: self.pool.copy_to_device([page], self.device, [0]),
            ]
        for move in moves:
            with pytest.raises(CacheIntegrityError):
                move()

    @invariant()
    def pages_are_where_they_should_be(self) -> None:
        num_in_flight = sum(map(len, self.in_flight))
        assert self.pool.num_reserved == num_in_flight
        assert self.pool.num_committed == len(self.committed)
        assert self.pool.num_free == NUM_PAGES - num_in_flight - len(self.committed)
        assert {page: bytes(self.pool.read(page)) for page in self.committed} == self.committed
        self.pool.check_integrity(list(self.committed))


HostPoolMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
test_host_pool = HostPoolMachine.TestCase


@settings(deadline=None, max_examples=60)
@given(layers=st.integers(1, 4), width=st.integers(1, 9), data=st.data())
def test_a_page_survives_device_host_storage_host_device(layers: int, width: int, data: st.DataObject) -> None:
    shape = PageShape(num_layers=layers, layer_page_bytes=width)
    contents = data.draw(
        st.lists(st.binary(min_size=shape.page_bytes, max_size=shape.page_bytes), min_size=3, max_size=3)
    )
    first, second = SimulatedDeviceMemory(shape, 4), SimulatedDeviceMemory(shape, 4)
    for page, content in enumerate(contents):
        first.write(page, content)
    writer, reader = HostPool(shape, 5, verify=True), HostPool(shape, 5, verify=True)
    store = CheckedPageStore(store=MemoryPageStore(1 << 20), page_bytes=shape.page_bytes)
    keys = ["a", "b", "c"]

    host = writer.reserve(3)
    writer.copy_from_device(first, [2, 0, 1], host)
    writer.commit(host)
    assert store.batch_set(keys, [writer.read(page) for page in host]) == [True] * 3

    reader.reserve(1)
    host = reader.reserve(3)
    for page, content in zip(host, store.batch_get(keys), strict=True):
        assert content is not None
        reader.write(page, content)
    reader.commit(host)
    reader.copy_to_device(host, second, [3, 1, 2])
    assert [second.read(page) for page in (1, 2, 3)] == [contents[0], contents[1], contents[2]]


def test_a_write_to_a_committed_page_is_detected() -> None:
    pool = HostPool(SHAPE, 2, verify=True)
    pages = pool.reserve(2)
    for page in pages:
        pool.write(page, content_of(page))
    memory = pool.view_reserved(pages[0])
    pool.commit(pages)
    memory[4] ^= 1  # a transfer that was not waited for
    for look in (lambda: pool.read(pages[0]), lambda: pool.check_integrity(pages)):
        with pytest.raises(CacheIntegrityError, match=f"page {pages[0]} has changed since it was committed"):
            look()
    assert bytes(pool.read(pages[1])) == content_of(pages[1])


def test_a_read_view_is_read_only() -> None:
    pool = HostPool(SHAPE, 1)
    [page] = pool.reserve(1)
    pool.commit([page])
    with pytest.raises(TypeError, match="read-only"):
        pool.read(page)[0] = 1


def test_wrong_lengths_are_refused() -> None:
    pool, device = HostPool(SHAPE, 2), SimulatedDeviceMemory(SHAPE, 2)
    pages = pool.reserve(2)
    with pytest.raises(CacheIntegrityError, match="1 device pages for 2 host pages"):
        pool.copy_from_device(device, [0], pages)
    with pytest.raises(CacheIntegrityError, match="3 bytes for a page of 15"):
        pool.write(pages[0], b"abc")
    pool.commit(pages)
    with pytest.raises(CacheIntegrityError, match="3 device pages for 2 host pages"):
        pool.copy_to_device(pages, device, [0, 1, 0])
    with pytest.raises(CacheIntegrityError, match="a device page is named twice"):
        pool.copy_to_device(pages, device, [0, 0])


@pytest.mark.parametrize("page", [-1, 2])
def test_device_pages_that_do_not_exist_are_refused(page: int) -> None:
    pool, device = HostPool(SHAPE, 2), SimulatedDeviceMemory(SHAPE, 2)
    pages = pool.reserve(1)
    with pytest.raises(CacheIntegrityError, match=f"device page {page} is not one of 0 to 1"):
        pool.copy_from_device(device, [page], pages)
    pool.commit(pages)
    with pytest.raises(CacheIntegrityError, match=f"device page {page} is not one of 0 to 1"):
        pool.copy_to_device(pages, device, [page])
