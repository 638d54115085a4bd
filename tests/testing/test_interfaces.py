"""The page of a key in the checks of page stores."""

from __future__ import annotations

from scheduler_components.testing.interfaces import PAGE_BYTES, page_of


def test_pages_differ_and_have_every_byte_value() -> None:
    """A store that mixes up two keys, or that escapes a byte wrongly, returns another page."""
    pages = [page_of(key) for key in ("a", "b", "a0", "")]
    assert len(set(pages)) == len(pages)
    assert page_of("a") == page_of("a")
    for page in pages:
        assert len(page) == PAGE_BYTES
        assert set(page) == set(range(256))
