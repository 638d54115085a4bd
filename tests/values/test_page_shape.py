"""A page shape computes its sizes and refuses impossible ones."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_components.values.page_shape import PageShape


@pytest.mark.parametrize(("layers", "width"), [(0, 1), (1, 0)])
def test_an_empty_page_is_refused(layers: int, width: int) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        PageShape(num_layers=layers, layer_page_bytes=width)


def test_sizes_follow_from_layers_and_parts() -> None:
    shape = PageShape(num_layers=3, layer_page_bytes=64, num_parts=2)
    assert (shape.page_bytes, shape.part_bytes) == (192, 32)


def test_parts_of_unequal_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer_page_bytes=65: cannot be divided into 2 parts"):
        PageShape(num_layers=3, layer_page_bytes=65, num_parts=2)
