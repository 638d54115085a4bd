"""A page store against a dictionary, in every order of calls that Hypothesis finds.

A store with ``loses_pages = True`` may forget a page (that is a miss). No store may show another page, a page that was
deleted, or a hole inside a prefix that it claims to hold.

For a store of your own::

    class MyStoreMachine(PageStoreMachine):
        def open_store(self):
            return MyStore()

    TestMyStore = MyStoreMachine.TestCase
"""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from scheduler_components.ports import PageStore
from scheduler_components.testing.page_store_checks import page_of

__all__ = ["PageStoreMachine"]

_KEYS = st.lists(st.sampled_from(["a", "b", "c/d", "c-d", "../e"]), max_size=5)


class PageStoreMachine(RuleBasedStateMachine):
    """Subclass it and override ``open_store``."""

    loses_pages: ClassVar[bool] = False

    def open_store(self) -> PageStore:
        """Make an empty store under test."""
        raise TypeError(f"{type(self).__name__} does not say which store it drives: override open_store")

    def __init__(self) -> None:
        super().__init__()
        self.store = self.open_store()
        self.held: set[str] = set()

    @rule(keys=_KEYS)
    def set_pages(self, keys: list[str]) -> None:
        answers = self.store.batch_set(keys, [page_of(key) for key in keys])
        assert len(answers) == len(keys)
        assert self.loses_pages or all(answers), f"{keys}: {answers}"
        self.held.update(key for key, held in zip(keys, answers, strict=True) if held)

    @rule(keys=_KEYS)
    def get_pages(self, keys: list[str]) -> None:
        pages = self.store.batch_get(keys)
        assert len(pages) == len(keys)
        for key, page in zip(keys, pages, strict=True):
            assert page is None or key in self.held, f"{key!r} is not held, and a page came"
            assert page is None or bytes(page) == page_of(key), f"another page came under {key!r}"
            assert self.loses_pages or page is not None or key not in self.held, f"the page of {key!r} was lost"

    @rule(keys=_KEYS)
    def count_prefix(self, keys: list[str]) -> None:
        longest = next((at for at, key in enumerate(keys) if key not in self.held), len(keys))
        found = self.store.batch_exists(keys)
        assert 0 <= found <= longest, f"{found} of {keys} claimed, {longest} can be held"
        assert self.loses_pages or found == longest

    @rule(keys=_KEYS)
    def delete_pages(self, keys: list[str]) -> None:
        removed = self.store.delete(keys)
        assert removed <= len(self.held & set(keys))
        assert self.loses_pages or removed == len(self.held & set(keys))
        self.held.difference_update(keys)

    def teardown(self) -> None:
        self.store.close()
