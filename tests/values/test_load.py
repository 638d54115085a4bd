"""The load of a scheduler in pages."""

from __future__ import annotations

import pytest

from scheduler_components.values import LoadSnapshot


@pytest.mark.parametrize(("tokens", "page_size", "num_pages"), [(64, 16, 4), (70, 16, 4), (0, 16, 0), (64, 0, 0)])
def test_the_pages_of_a_pool_are_whole(tokens: int, page_size: int, num_pages: int) -> None:
    """A report of an engine that does not say its page size has none."""
    assert LoadSnapshot(max_total_num_tokens=tokens, page_size=page_size).num_pages == num_pages
