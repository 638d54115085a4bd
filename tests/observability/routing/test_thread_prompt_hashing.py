"""``hash_prompt``: without the router's lock, and off the event loop for a long prompt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from observability.kv_stream import FairRLock
from observability.routing import HashedPrompt, KvRouter, hashed_prompt
from observability.routing.thread_prompt_hashing import hash_prompt
from scheduler_components.cache import DEFAULT_NAMESPACE

pytestmark = pytest.mark.threads


@pytest.mark.parametrize(("num_tokens", "is_on_loop"), [(2**14, True), (2**14 + 1, False)])
def test_the_lock_is_free_and_only_a_short_prompt_is_hashed_on_the_loop(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, is_on_loop: bool
) -> None:
    lock, hash_pages, threads = FairRLock(), hashed_prompt.hash_pages, list[int]()

    def watched(tokens: Sequence[int], page_size: int, seed: bytes) -> tuple[int, ...]:
        threads.append(threading.get_ident())
        assert lock._holder is None
        return hash_pages(tokens, page_size, seed)

    monkeypatch.setattr(hashed_prompt, "hash_pages", watched)
    router = KvRouter(page_size=16)
    router.on_replica_up(0, 0.0)
    prompt = HashedPrompt(token_ids=range(num_tokens), page_size=16)
    asyncio.run(hash_prompt(prompt, router, lock))
    assert [each == threading.get_ident() for each in threads] == [is_on_loop]
    assert len(prompt.hashes_in(DEFAULT_NAMESPACE)) == num_tokens // 16
