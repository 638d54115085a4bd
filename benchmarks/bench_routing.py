"""Time one choice of a replica for a prompt of 128 blocks, next to Dynamo's selector.

Both hash 2,048 tokens into blocks, look the blocks up in the index of all replicas, compute the cost of each replica
from its cached blocks and its load, choose the lowest, count the request there, and end it. Both receive the tokens in
Python and return the choice there. Ours hashes with SHA-256, as SGLang's events do; Dynamo with XXH3 in Rust.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from benchmarks.measure import Goal, Measurement, Scale
from benchmarks.studies.dynamo_selector import DynamoSelector, has_dynamo_selector, open_dynamo_selector
from observability.routing import HashedPrompt, KvRouter
from scheduler_components import BlockStored
from scheduler_components.cache import hash_pages
from scheduler_components.values import LoadSnapshot

NAME = "routing"
_PAGE_SIZE = 16
_NUM_BLOCKS = 128
_TOKENS = list(range(_PAGE_SIZE * _NUM_BLOCKS))
_DEPTHS = tuple(_NUM_BLOCKS * eighth // 8 for eighth in range(1, 9))
"""Cached blocks of the prompt: one replica in eight has all of them."""

_GOALS = {64: Goal(400.0), 1_000: Goal(3_000.0)}
"""A prefill of the prompt takes some 100 ms, and a step of decoding 10: a pick should not show."""
_NOW_S = 1.0


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # the peer is a library
    """Time choices among 64 and 1,000 replicas, in turns with Dynamo's."""
    return [row for num_replicas in _GOALS for row in asyncio.run(_rows(num_replicas, scale))]


def make_router(num_replicas: int) -> KvRouter:
    """Return a router of replicas that hold parts of the prompt and have reported their loads."""
    router, hashes = KvRouter(page_size=_PAGE_SIZE), hash_pages(_TOKENS, _PAGE_SIZE)
    for replica in range(num_replicas):
        router.on_replica_up(replica, _NOW_S)
        depth = _DEPTHS[replica % len(_DEPTHS)]
        stored = BlockStored(hashes[:depth], None, (0,) * depth * _PAGE_SIZE, _PAGE_SIZE, None, "GPU")
        router.apply_events(replica, [stored], _NOW_S)
        load = LoadSnapshot(sequence=1, num_total_tokens=16 * replica, max_total_num_tokens=1 << 20)
        router.on_load_report(replica, load, _NOW_S)
    return router


async def _rows(num_replicas: int, scale: Scale) -> list[Measurement]:
    router, prompt = make_router(num_replicas), HashedPrompt(token_ids=_TOKENS, page_size=_PAGE_SIZE)
    prompt.hash_in(router.namespaces())

    def pick() -> None:
        chosen = router.route_tokens(_TOKENS, now_s=_NOW_S)
        assert chosen is not None
        router.finish(chosen)

    def pick_by_hashes() -> None:
        chosen = router.route_prompt(prompt, now_s=_NOW_S)
        assert chosen is not None
        router.finish(chosen)

    number = scale.of(400)
    us: dict[str, list[float]] = {"ours": [], "by hashes": [], "limit": [], "Dynamo": [], "Dynamo, not counted": []}
    if not has_dynamo_selector():
        for _ in range(2 * scale.turns):
            _time_ours(us, number, pick, pick_by_hashes)
        return _measurements(num_replicas, us)
    opened = open_dynamo_selector(_DEPTHS, num_workers=num_replicas, tokens=_TOKENS, page_size=_PAGE_SIZE)
    async with opened as selector:
        _check(router, await selector.overlaps(), await selector.pick())
        for _ in range(2 * scale.turns):
            _time_ours(us, number, pick, pick_by_hashes)
            await _time_dynamo(us, number, selector)
    return _measurements(num_replicas, us)


def _check(router: KvRouter, overlaps: dict[int, int], chosen: int) -> None:
    """Check that both know the same blocks, and that both choose a replica with the whole prompt."""
    names = list(overlaps)
    ours = router.overlaps(names, hash_pages(_TOKENS, _PAGE_SIZE), now_s=_NOW_S)
    if [device for device, _, _ in ours] != list(overlaps.values()):
        raise AssertionError("Dynamo's index does not hold the blocks that it received: it has changed")
    if overlaps[chosen] != _NUM_BLOCKS:
        raise AssertionError("Dynamo's selector does not choose by cached blocks: its defaults have changed")


def _time_ours(
    us: dict[str, list[float]], number: int, pick: Callable[[], None], by_hashes: Callable[[], None]
) -> None:
    for name, call in (("ours", pick), ("by hashes", by_hashes), ("limit", _hash)):
        begun_s = time.perf_counter()
        for _ in range(number):
            call()
        us[name].append((time.perf_counter() - begun_s) / number * 1e6)


def _hash() -> None:
    hash_pages(_TOKENS, _PAGE_SIZE)


async def _time_dynamo(us: dict[str, list[float]], number: int, selector: DynamoSelector) -> None:
    for name, call in (("Dynamo", selector.pick_and_finish), ("Dynamo, not counted", selector.pick)):
        begun_s = time.perf_counter()
        for _ in range(number):
            await call()
        us[name].append((time.perf_counter() - begun_s) / number * 1e6)


def _measurements(num_replicas: int, us: dict[str, list[float]]) -> list[Measurement]:
    what = f"one pick for {_NUM_BLOCKS} blocks of {_PAGE_SIZE} tokens, {num_replicas:,} replicas"
    compared = {name: us[name] for name in ("limit", "Dynamo", "Dynamo, not counted") if us[name]}
    return [
        Measurement(NAME, f"{what}, from tokens", "us", us["ours"], compared, _GOALS[num_replicas]),
        Measurement(NAME, f"{what}, from hashes", "us", us["by hashes"], {}, None),
    ]
