"""What comes from a cache gives the text of transformers' ``generate`` with equal weights, in float32.

Each test says what happened on the way, so that none passes because nothing did. Cached pages are compared as well,
with the keys and values that transformers computes for their tokens. ``test_torch_device_machine.py`` has chunks,
preemptions, evictions and aborts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.model_bench import PAGE_SIZE, PROMPTS, SYSTEMS, LastMomentMover, ModelBench, Tiers, open_threads

from scheduler_components.hicache import HiCachePolicy, MemoryPageStore, open_file_page_store
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_components.values import FinishReason
from scheduler_engine.device.sampling import SamplingParams

pytestmark = pytest.mark.model


@pytest.fixture
def open_bench(paged_model: Any, judge: GreedyTextVerifier) -> Iterator[Callable[..., ModelBench]]:
    """``open_bench(tiers=None, **sizes)``; closed after the test, when the pages of all are judged once more."""
    opened: list[ModelBench] = []

    def make(tiers: Tiers | None = None, **sizes: Any) -> ModelBench:
        opened.append(ModelBench(paged_model, judge, tiers=tiers, **sizes))
        return opened[-1]

    yield make
    for bench in opened:
        bench.verify_texts()
        bench.judge_pages()
        bench.scheduler.cache.check_integrity()
        bench.close()


def test_requests_alone_and_together_have_the_same_text(open_bench: Callable[..., ModelBench]) -> None:
    """Each alone in an empty cache, then all together."""
    bench = open_bench(kv_tokens=256, max_running_requests=8)
    for prompt in PROMPTS[:4]:
        bench.run(prompt)
        bench.scheduler.clear_cache()
    together = bench.run(*PROMPTS[:6])
    assert all(request.num_cached_prompt_tokens == 0 for request in together[:1])


def test_a_shared_prefix_is_read_and_not_computed(open_bench: Callable[..., ModelBench]) -> None:
    bench = open_bench(kv_tokens=256)
    bench.run(PROMPTS[0])
    (second,) = bench.run(PROMPTS[1])
    assert second.num_cached_prompt_tokens == 16, "a beginning of 18 tokens is shared, four pages of it"
    assert bench.judge_pages() > 4


def test_the_same_prompt_again_computes_its_last_token_alone(open_bench: Callable[..., ModelBench]) -> None:
    """A prompt that ends with a page, and whose answer is cached with it."""
    prompt = PROMPTS[2][:20]
    bench = open_bench(kv_tokens=256)
    bench.run(prompt)
    (again,) = bench.run(prompt)
    assert again.num_cached_prompt_tokens == 16, "the page of the last token is computed again: it gives the next one"
    longer = (*prompt, *again.output_ids)
    (follow_up,) = bench.run((*longer, 33, 44))
    assert follow_up.num_cached_prompt_tokens == 24


def test_a_stop_token_ends_the_text_where_generate_ends_it(
    open_bench: Callable[..., ModelBench], judge: GreedyTextVerifier
) -> None:
    bench = open_bench()
    stop = judge.text(PROMPTS[0], 8).token_ids[3]
    request = bench.submit(PROMPTS[0], 8, stop=(stop,))
    bench.drain()
    assert request.finish_reason is FinishReason.STOP


def test_pages_are_loaded_from_the_host(open_bench: Callable[..., ModelBench]) -> None:
    """Six prompts in a circle over a device that holds two of them, and a host that holds all."""
    bench = open_bench(Tiers(host_pages=80), max_running_requests=2)
    for _ in range(3):
        bench.run(*PROMPTS[:18:3])
    stats = bench.tier_stats()
    assert stats.host_hit_tokens > 150
    assert stats.pages_loaded > 40


@pytest.mark.parametrize("make_mover", [LastMomentMover, open_threads])
def test_a_forward_waits_for_the_layers_of_pages_being_loaded(
    open_bench: Callable[..., ModelBench], make_mover: Any
) -> None:
    """Requests run while their pages come from the host, layer by layer."""
    policy = HiCachePolicy(load="by_layer", prefetch="wait_complete")
    tiers = Tiers(host_pages=80, store=MemoryPageStore(1 << 24), policy=policy, make_mover=make_mover)
    bench = open_bench(tiers, max_running_requests=2)
    for _ in range(2):
        bench.run(*PROMPTS[:18:3])
    assert bench.tier_stats().host_hit_tokens > 0


def test_pages_are_loaded_from_storage(open_bench: Callable[..., ModelBench]) -> None:
    """The host is smaller than the circle, too."""
    bench = open_bench(Tiers(host_pages=20, store=MemoryPageStore(1 << 24)), max_running_requests=2)
    for _ in range(2):
        for at in range(0, 18, 2):
            bench.run(*PROMPTS[at : at + 2])
    stats = bench.tier_stats()
    assert stats.storage_hit_tokens > 50
    assert stats.pages_prefetched > 10


@pytest.mark.parametrize("make_mover", [LastMomentMover, open_threads])
def test_pages_are_loaded_from_files_after_a_restart(
    open_bench: Callable[..., ModelBench], tmp_path: Path, make_mover: Any
) -> None:
    """Device and host begin empty; the files are all that is left, and the text is the same."""

    def store() -> Any:
        return open_file_page_store(tmp_path / "pages", capacity_bytes=1 << 24)

    first = open_bench(Tiers(host_pages=40, store=store(), make_mover=make_mover), max_running_requests=2)
    before = first.run(*PROMPTS[::3])
    while first.scheduler.tiers.num_operations:
        first.step()
    first.close()
    second = open_bench(Tiers(host_pages=40, store=store(), make_mover=make_mover), max_running_requests=2)
    second.step()  # the ranks agree that all have storage
    after = second.run(*PROMPTS[::3])
    assert second.tier_stats().storage_hit_tokens > 0
    assert [request.output_ids for request in after] == [request.output_ids for request in before]


def test_logits_of_a_cached_prefix_are_those_of_an_uncached_one(
    open_bench: Callable[..., ModelBench], judge: GreedyTextVerifier
) -> None:
    """Logits, not only their order: as log probabilities of the twenty best, at every token."""
    asked = SamplingParams(logprobs=20)
    bench = open_bench(Tiers(host_pages=80), max_running_requests=2)
    cold = bench.submit(PROMPTS[5], 6, sampling=asked)
    bench.drain()
    hit = bench.submit(PROMPTS[5], 6, sampling=asked)
    bench.drain()
    bench.run(*PROMPTS[9:])  # takes the device's pages
    loaded = bench.submit(PROMPTS[5], 6, sampling=asked)
    bench.drain()
    assert cold.num_cached_prompt_tokens == 0
    assert hit.num_cached_prompt_tokens == loaded.num_cached_prompt_tokens > 0
    assert bench.tier_stats().host_hit_tokens > 0
    right = judge.logits((*PROMPTS[5], *cold.output_ids)).log_softmax(-1)[len(PROMPTS[5]) - 1 :]
    for request in (cold, hit, loaded):
        assert request.logprobs is not None
        assert len(request.logprobs) == 6
        for place, reported in enumerate(request.logprobs):
            for token, logprob in reported.top:
                assert abs(logprob - float(right[place, token])) <= judge.noise


def test_prefixes_are_shared_as_in_the_prompts() -> None:
    """What the tests above rely on."""
    assert {len(prompt) for prompt in PROMPTS} <= set(range(14, 30))
    assert len(set(PROMPTS)) == 18
    assert [len(system) % PAGE_SIZE for system in SYSTEMS] == [0, 1, 3]


def test_a_changed_page_is_found(
    open_bench: Callable[..., ModelBench], paged_model: Any, judge: GreedyTextVerifier
) -> None:
    """The bench finds one changed number of one key of one cached page."""
    bench = ModelBench(paged_model, judge, kv_tokens=256)
    bench.run(PROMPTS[0])
    match = bench.scheduler.cache.match_prefix(PROMPTS[0])
    with torch.no_grad():
        bench.pool.keys[1][match.pages[2], 1, 0, 3] += 2 * judge.noise
    with pytest.raises(Exception, match="layer 1 hold something else"):
        bench.judge_pages()
