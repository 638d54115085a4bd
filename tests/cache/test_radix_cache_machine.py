"""The kit's state machine for prefix caches drives the radix cache. Its hashes are also SGLang's chain."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from kit.searches import num_examples

from scheduler_components.cache import RadixCache
from scheduler_components.testing import PrefixCacheMachine


class RadixCacheMachine(PrefixCacheMachine):
    def open_cache(self, page_size: int, capacity_tokens: int, record: bool) -> RadixCache:
        return RadixCache(page_size=page_size, capacity_tokens=capacity_tokens, record=record)

    @invariant()
    def hashes_are_the_chain(self) -> None:
        assert self.ledger.num_off_chain == 0

    def teardown(self) -> None:
        super().teardown()
        assert self.ledger.num_chained >= len(self.ledger.hashes())


TestRadixCacheMachine = RadixCacheMachine.TestCase
TestRadixCacheMachine.settings = settings(max_examples=num_examples(1), stateful_step_count=60)
TestRadixCacheMachine = pytest.mark.soak(pytest.mark.timeout(600)(TestRadixCacheMachine))
