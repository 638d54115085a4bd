"""Pages hold whole tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components.scheduling.request_kv_cache import pages_for

checked = settings(deadline=None, max_examples=num_examples(4))


sizes = st.integers(1, 40)


@pytest.mark.soak
@checked
@given(st.integers(0, 500), sizes)
def test_pages_hold_their_tokens_and_one_page_fewer_does_not(num_tokens: int, page_size: int) -> None:
    num_pages = pages_for(num_tokens, page_size)
    assert num_pages * page_size >= num_tokens
    assert (num_pages - 1) * page_size < num_tokens
