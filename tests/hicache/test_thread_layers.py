"""Layers that arrive: a forward waits for as much as it needs, and never for what does not come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")

from scheduler_components import ParallelState
from scheduler_components.hicache import (
    COPIED,
    CopyEnd,
    HostPlane,
    HostPool,
    KeySpace,
    LayerArrivals,
    PageLoadError,
    PageShape,
    Placement,
    SimulatedDeviceMemory,
    ThreadPageMover,
)
from scheduler_components.page_operations import CopyToDevice, CopyToHost, IoEvent, LoadDone, WriteDone


class StreamedEnd:
    """A copy on a stream: queued, and perhaps not done."""

    def __init__(self) -> None:
        self.num_held = 0
        self.has_ended = False

    def is_done(self) -> bool:
        return self.has_ended

    def hold_forward(self) -> None:
        self.num_held += 1


def test_nothing_on_its_way_is_no_wait() -> None:
    LayerArrivals(timeout_s=0).wait(5)


def test_a_failed_load_that_is_forgotten_fails_no_forward_any_more() -> None:
    arrivals = LayerArrivals(timeout_s=0)
    arrivals.begin(1)
    arrivals.fail(1)
    arrivals.end(1)
    with pytest.raises(PageLoadError, match="failed"):
        arrivals.wait(0)
    arrivals.forget(1)
    arrivals.wait(0)
    arrivals.begin(1)  # the number is free again
    arrivals.landed(1, COPIED)
    arrivals.wait(0)


def test_each_layer_is_waited_for_of_every_load() -> None:
    arrivals = LayerArrivals()
    order = []

    def forward() -> None:
        for layer in range(2):
            arrivals.wait(layer)
            order.append(f"computed {layer}")

    arrivals.begin(1)
    arrivals.begin(2)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(forward)
        for op in (1, 2):
            assert not order
            arrivals.landed(op, COPIED)
        while not order:
            assert not done.done()
        assert order == ["computed 0"]
        order.append("copied 1")
        arrivals.landed(2, COPIED)
        arrivals.landed(1, COPIED)
        done.result(30)
    assert order == ["computed 0", "copied 1", "computed 1"]


def test_a_stream_is_held_and_not_the_thread() -> None:
    arrivals, end = LayerArrivals(), StreamedEnd()
    arrivals.begin(1)
    arrivals.landed(1, end)
    arrivals.wait(0)
    assert end.num_held == 1


def test_what_is_all_there_is_waited_for_no_more() -> None:
    arrivals, end = LayerArrivals(timeout_s=0), StreamedEnd()
    arrivals.begin(1)
    arrivals.landed(1, end)
    arrivals.end(1)
    arrivals.wait(7)
    assert end.num_held == 0


def test_a_failed_load_fails_forwards_until_it_is_forgotten() -> None:
    arrivals = LayerArrivals(timeout_s=0)
    arrivals.begin(1)
    arrivals.landed(1, COPIED)
    arrivals.fail(1)
    arrivals.end(1)
    for _ in range(2):
        with pytest.raises(PageLoadError, match="load 1: failed, and requests read its pages already"):
            arrivals.wait(0)
    arrivals.forget(1)
    arrivals.wait(0)


def test_a_load_that_no_forward_waits_for_fails_none() -> None:
    arrivals = LayerArrivals(timeout_s=0)
    arrivals.fail(3)
    arrivals.end(3)
    arrivals.wait(0)


def test_waiting_is_bounded_and_names_load_and_layer() -> None:
    arrivals = LayerArrivals(timeout_s=0.01)
    arrivals.begin(4)
    arrivals.landed(4, COPIED)
    with pytest.raises(PageLoadError, match=r"load 4: layer 1 has not come within 0\.01 s"):
        arrivals.wait(1)


class StreamedMemory(SimulatedDeviceMemory):
    """A device with a stream: its copies end when the test says so."""

    def __init__(self, shape: PageShape, num_pages: int) -> None:
        super().__init__(shape, num_pages)
        self.ends: list[StreamedEnd] = []
        self.order: list[str] = []

    def fence(self) -> None:
        self.order.append("fence")

    def copy_to_host(self, layer: int, pages: Sequence[int], plane: HostPlane, host_pages: Sequence[int]) -> CopyEnd:
        super().copy_to_host(layer, pages, plane, host_pages)
        return self._end("to host")

    def copy_to_device(self, layer: int, plane: HostPlane, host_pages: Sequence[int], pages: Sequence[int]) -> CopyEnd:
        super().copy_to_device(layer, plane, host_pages, pages)
        return self._end("to device")

    def _end(self, copied: str) -> StreamedEnd:
        self.order.append(copied)
        self.ends.append(StreamedEnd())
        return self.ends[-1]


def mover_of_streams(*, num_layers: int) -> tuple[ThreadPageMover, StreamedMemory, tuple[int, ...]]:
    """A mover, the device whose copies end when the test says so, and two reserved pages of its host."""
    shape = PageShape(num_layers=num_layers, layer_page_bytes=8)
    keys = KeySpace(model="m", dtype="u8", page_size=1, layout="l", placement=Placement(), parallel=ParallelState())
    host, device = HostPool(shape, 4), StreamedMemory(shape, 4)
    return ThreadPageMover(host=host, device=device, keys=keys), device, tuple(host.reserve(2))


def test_a_copy_on_a_stream_is_told_when_the_stream_is_there(
    eventually: Callable[[Callable[[], object]], None],
) -> None:
    mover, device, pages = mover_of_streams(num_layers=2)
    events: list[IoEvent] = []

    mover.submit([CopyToHost(1, (0, 1), pages)])
    eventually(lambda: len(device.ends) == 2)
    device.ends[0].has_ended = True  # one layer of two
    mover.wait(0.01)
    assert list(mover.poll()) == []
    device.ends[1].has_ended = True
    eventually(lambda: events.extend(mover.poll()) or events)
    assert events == [WriteDone(1, True)]
    mover.host.commit(pages)

    mover.submit([CopyToDevice(2, pages, (2, 3), by_layer=True)])
    mover.arrivals.wait(0)  # at once: the stream is held, not this thread
    mover.arrivals.wait(1)
    assert [end.num_held for end in device.ends[2:]] == [1, 1]
    mover.wait(0.01)
    assert list(mover.poll()) == []
    assert mover.load_room_pages == mover.max_load_pages - 2
    device.ends[2].has_ended = device.ends[3].has_ended = True
    events.clear()
    eventually(lambda: events.extend(mover.poll()) or events)
    assert events == [LoadDone(2, True)]
    assert mover.load_room_pages == mover.max_load_pages
    assert device.order == ["fence", "to host", "to host", "fence", "to device", "to device"]
    mover.close()


def test_a_copy_that_ends_before_an_earlier_one_is_told_at_once(
    eventually: Callable[[Callable[[], object]], None],
) -> None:
    mover, device, pages = mover_of_streams(num_layers=1)
    events: list[IoEvent] = []
    mover.submit([CopyToHost(1, (0,), pages[:1]), CopyToHost(2, (1,), pages[1:])])
    eventually(lambda: len(device.ends) == 2)
    for later_first, told in ((1, [WriteDone(2, True)]), (0, [WriteDone(2, True), WriteDone(1, True)])):
        device.ends[later_first].has_ended = True
        eventually(lambda told=told: events.extend(mover.poll()) or len(events) == len(told))
        assert events == told
    mover.host.commit(pages)
    mover.close()
