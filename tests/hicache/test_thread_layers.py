"""Layers that arrive: a forward waits for as much as it needs, and never for what does not come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from scheduler_components.hicache import COPIED, LayerArrivals, PageLoadError


class StreamedEnd:
    """A copy on a stream: queued, and perhaps not done."""

    def __init__(self) -> None:
        self.num_held = 0

    def is_done(self) -> bool:
        return False

    def hold_forward(self) -> None:
        self.num_held += 1


def test_nothing_on_its_way_is_no_wait() -> None:
    LayerArrivals(timeout_s=0).wait(5)


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
