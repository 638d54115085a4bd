"""The fake devices answer by their script, or from the pages that they are given."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components.testing import PagedModel, next_token
from scheduler_components.testing.fake_device import InstantDevice


def test_an_instant_device_computes_or_answers_by_its_script() -> None:
    device: InstantDevice[int, int] = InstantDevice(lambda batch: batch + 1)
    device.scripted = [7, ValueError("out of memory")]
    device.launch(1)
    assert device.wait() == 7
    with pytest.raises(ValueError, match="out of memory"):
        device.wait()
    assert (device.wait(), device.launched) == (2, [1])


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=20), data=st.data())
def test_a_paged_model_answers_from_its_pages(tokens: list[int], data: st.DataObject) -> None:
    model, pages = PagedModel(page_size=3), list(range(7, 0, -1))
    computed = 0
    while computed < len(tokens):
        end = data.draw(st.integers(computed + 1, len(tokens)))
        token = model.forward(tokens[:end], pages, computed)
        computed = end
    assert token == next_token(tokens)
    # Another request computes into one of its pages, or it gets a page that was never computed.
    place = data.draw(st.integers(0, (len(tokens) - 2) // 3))
    if data.draw(st.booleans()):
        model.forward([tokens[place * 3] ^ 1], [pages[place]], 0)
    else:
        pages[place] = 99
    assert model.forward(tokens, pages, len(tokens) - 1) != next_token(tokens)
    with pytest.raises(IndexError):
        model.forward(tokens, [], 0)
    with pytest.raises(ValueError, match="leave the last one out"):
        model.forward(tokens, pages, len(tokens))
