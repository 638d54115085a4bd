"""Layers that arrive: a forward waits for as much as it needs, and never for what does not come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")

from scheduler_components import ParallelState
from scheduler_components.errors import LoadBackError
from scheduler_components.hicache import (
    HostPool,
    KeySpace,
    Placement,
    SimulatedDeviceMemory,
    ThreadLayerDoneCounter,
    ThreadPageMover,
)
from scheduler_components.ports import CopyEvent, HostLayerView, NullCopyEvent
from scheduler_components.values.page_operations import CopyToDevice, CopyToHost, IoEvent, LoadBackDone, WriteDone
from scheduler_components.values.page_shape import PageShape

pytestmark = pytest.mark.threads


class StreamedCopyEvent:
    """A copy on a stream: queued, and perhaps not done."""

    def __init__(self) -> None:
        self.num_held = 0
        self.has_ended = False

    def is_done(self) -> bool:
        return self.has_ended

    def wait_on_stream(self) -> None:
        self.num_held += 1


def test_without_a_load_no_forward_waits() -> None:
    ThreadLayerDoneCounter(timeout_s=0).wait_until(5)


def test_a_failed_load_fails_forwards_until_it_is_discarded() -> None:
    layer_counter = ThreadLayerDoneCounter(timeout_s=0)
    layer_counter.start_load_back(1)
    layer_counter.fail_load_back(1)
    layer_counter.finish_load_back(1)
    for _ in range(2):
        with pytest.raises(LoadBackError, match="load 1: failed while requests use its pages"):
            layer_counter.wait_until(0)
    layer_counter.discard_load_back(1)
    layer_counter.wait_until(0)
    layer_counter.start_load_back(1)  # the number is free again
    layer_counter.complete_layer(1, NullCopyEvent())
    layer_counter.wait_until(0)


def test_a_forward_waits_for_each_layer_of_every_load() -> None:
    layer_counter = ThreadLayerDoneCounter()
    order = []

    def forward() -> None:
        for layer in range(2):
            layer_counter.wait_until(layer)
            order.append(f"computed {layer}")

    layer_counter.start_load_back(1)
    layer_counter.start_load_back(2)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(forward)
        for op in (1, 2):
            assert not order
            layer_counter.complete_layer(op, NullCopyEvent())
        while not order:
            assert not done.done()
        assert order == ["computed 0"]
        order.append("copied 1")
        layer_counter.complete_layer(2, NullCopyEvent())
        layer_counter.complete_layer(1, NullCopyEvent())
        done.result(30)
    assert order == ["computed 0", "copied 1", "computed 1"]


def test_the_stream_waits_instead_of_the_thread() -> None:
    layer_counter, end = ThreadLayerDoneCounter(), StreamedCopyEvent()
    layer_counter.start_load_back(1)
    layer_counter.complete_layer(1, end)
    layer_counter.wait_until(0)
    assert end.num_held == 1


def test_no_forward_waits_for_a_finished_load() -> None:
    layer_counter, end = ThreadLayerDoneCounter(timeout_s=0), StreamedCopyEvent()
    layer_counter.start_load_back(1)
    layer_counter.complete_layer(1, end)
    layer_counter.finish_load_back(1)
    layer_counter.wait_until(7)
    assert end.num_held == 0


def test_a_load_that_no_forward_waits_for_fails_none() -> None:
    layer_counter = ThreadLayerDoneCounter(timeout_s=0)
    layer_counter.fail_load_back(3)
    layer_counter.finish_load_back(3)
    layer_counter.wait_until(0)


def test_waiting_is_bounded_and_names_load_and_layer() -> None:
    layer_counter = ThreadLayerDoneCounter(timeout_s=0.01)
    layer_counter.start_load_back(4)
    layer_counter.complete_layer(4, NullCopyEvent())
    with pytest.raises(LoadBackError, match=r"load 4: layer 1 was not copied within 0\.01 s"):
        layer_counter.wait_until(1)


class StreamedMemory(SimulatedDeviceMemory):
    """A device with a stream: its copies end when the test says so."""

    def __init__(self, shape: PageShape, num_pages: int) -> None:
        super().__init__(shape, num_pages)
        self.ends: list[StreamedCopyEvent] = []
        self.order: list[str] = []

    def wait_for_compute_stream(self) -> None:
        self.order.append("fence")

    def copy_to_host(
        self, layer: int, pages: Sequence[int], layer_view: HostLayerView, host_pages: Sequence[int]
    ) -> CopyEvent:
        super().copy_to_host(layer, pages, layer_view, host_pages)
        return self._end("to host")

    def copy_to_device(
        self, layer: int, layer_view: HostLayerView, host_pages: Sequence[int], pages: Sequence[int]
    ) -> CopyEvent:
        super().copy_to_device(layer, layer_view, host_pages, pages)
        return self._end("to device")

    def _end(self, copied: str) -> StreamedCopyEvent:
        self.order.append(copied)
        self.ends.append(StreamedCopyEvent())
        return self.ends[-1]


def mover_of_streams(*, num_layers: int) -> tuple[ThreadPageMover, StreamedMemory, tuple[int, ...]]:
    """A mover, the device whose copies end when the test says so, and two reserved pages of its host."""
    shape = PageShape(num_layers=num_layers, layer_page_bytes=8)
    keys = KeySpace(model="m", dtype="u8", page_size=1, layout="l", placement=Placement(), parallel=ParallelState())
    host, device = HostPool(shape, 4), StreamedMemory(shape, 4)
    return ThreadPageMover(host=host, device=device, keys=keys), device, tuple(host.reserve(2))


def test_a_copy_on_a_stream_is_reported_when_its_event_is_done(
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
    mover.layer_counter.wait_until(0)  # returns immediately: the stream waits, not this thread
    mover.layer_counter.wait_until(1)
    assert [end.num_held for end in device.ends[2:]] == [1, 1]
    mover.wait(0.01)
    assert list(mover.poll()) == []
    assert mover.load_back_budget_pages == mover.max_load_back_pages - 2
    device.ends[2].has_ended = device.ends[3].has_ended = True
    events.clear()
    eventually(lambda: events.extend(mover.poll()) or events)
    assert events == [LoadBackDone(2, True)]
    assert mover.load_back_budget_pages == mover.max_load_back_pages
    assert device.order == ["fence", "to host", "to host", "fence", "to device", "to device"]
    mover.close()


def test_a_copy_that_ends_before_an_earlier_one_is_reported_immediately(
    eventually: Callable[[Callable[[], object]], None],
) -> None:
    mover, device, pages = mover_of_streams(num_layers=1)
    events: list[IoEvent] = []
    mover.submit([CopyToHost(1, (0,), pages[:1]), CopyToHost(2, (1,), pages[1:])])
    eventually(lambda: len(device.ends) == 2)
    for later_first, expected in ((1, [WriteDone(2, True)]), (0, [WriteDone(2, True), WriteDone(1, True)])):
        device.ends[later_first].has_ended = True
        eventually(lambda expected=expected: events.extend(mover.poll()) or len(events) == len(expected))
        assert events == expected
    mover.host.commit(pages)
    mover.close()
