"""Hash a prompt for a router that has a lock, in a program with an event loop."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

from observability.routing.hashed_prompt import HashedPrompt
from observability.routing.kv_router import KvRouter

__all__ = ["hash_prompt"]

_MAX_LOOP_TOKENS = 2**14
"""Hashing a longer prompt takes more than half a millisecond."""


async def hash_prompt(
    prompt: HashedPrompt, router: KvRouter, lock: AbstractContextManager[object], *, lora: str | None = None
) -> None:
    """Hash a prompt in the namespaces of a router's replicas, without the router's lock.

    A long prompt is hashed in a thread.

    Args:
        prompt: is hashed.
        router: names the namespaces.
        lock: of the router.
        lora: name of the prompt's adapter.
    """
    with lock:
        namespaces = tuple(router.namespaces(lora=lora))
    if len(prompt.token_ids) <= _MAX_LOOP_TOKENS:
        prompt.hash_in(namespaces)
    else:
        await asyncio.to_thread(prompt.hash_in, namespaces)
