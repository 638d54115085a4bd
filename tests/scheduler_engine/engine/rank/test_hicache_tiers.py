"""The composed scheduler over tiers of torch memory: a request reads the keys and values of its own tokens, or none.

The device here computes no attention. It writes, for every position, numbers that follow from all tokens up to there,
and before it computes it reads those of all earlier positions. So a page that came back wrong, late, of another request
or of another run is found in the step that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore
from zlib import crc32

import pytest
from kit.reference_scheduler import drain

pytest.importorskip("torch", reason="needs torch: pip install scheduler-components[torch]")

import torch

from scheduler_components import ConfigError, ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.hicache import HiCachePolicy, LoadBackMode, TorchDeviceMemory
from scheduler_components.ports import CopyEvent, HostLayerView, LayerDoneCounter
from scheduler_components.values import FinishReason
from scheduler_components.values.page_shape import HostLayout
from scheduler_engine.device.device import DeviceOutput, DeviceRequest, ScheduledBatch
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import HiCacheConfig, SchedulerConfig, StorageChecksum
from scheduler_engine.engine.rank.hicache_tiers import make_torch_kv_memory, open_hicache_tiers
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.torch

PAGE_SIZE = 4
CONFIG = SchedulerConfig(page_size=PAGE_SIZE, kv_tokens=64, max_running_requests=4, chunk_tokens=16)
PROMPTS = [[chat * 1000 + at for at in range(41)] for chat in range(3)]


def pool(num_pages: int = CONFIG.kv_pages, dtype: torch.dtype = torch.float32) -> TorchDeviceMemory:
    return TorchDeviceMemory.allocate(
        num_layers=3, num_pages=num_pages, page_size=PAGE_SIZE, kv_heads=2, head_dim=4, dtype=dtype
    )


class ReadingDevice:
    """A ``Device`` that looks at what it reads.

    Attributes:
        num_read: earlier positions that it looked at.
        computed: released after each layer; for a copy that waits for it.
    """

    def __init__(self, memory: TorchDeviceMemory, layer_counter: LayerDoneCounter) -> None:
        self.memory = memory
        self.num_read = 0
        self.layer_counter = layer_counter
        self.computed = Semaphore(0)
        self._batch: ScheduledBatch[DeviceRequest] = ScheduledBatch()

    def launch(self, batch: ScheduledBatch[DeviceRequest]) -> None:
        self._batch = batch
        self.layer_counter.start_batch()

    def wait(self) -> DeviceOutput:
        for layer in range(len(self.memory.keys)):
            self.layer_counter.wait_until(layer)
            for chunk in self._batch.chunks:
                self._attend(layer, chunk.request, chunk.start, chunk.end)
            self.computed.release()
        return DeviceOutput(tuple(chunk.end % 100 for chunk in self._batch.chunks))

    def _attend(self, layer: int, request: DeviceRequest, start: int, end: int) -> None:
        tokens, pages = request.token_ids, request.pages
        for part, tensors in ((0, self.memory.keys), (1, self.memory.values)):
            for at in range(end):
                place = tensors[layer][pages[at // PAGE_SIZE], at % PAGE_SIZE]
                expected = number(tokens[: at + 1], layer, part)
                if at >= start:
                    place.fill_(expected)
                    continue
                self.num_read += 1
                assert place.eq(expected).all(), f"layer {layer} of position {at} of {request.rid} is another's"


def number(tokens: Sequence[int], layer: int, part: int) -> int:
    """A number that bfloat16 holds exactly."""
    return 1 + crc32(repr((list(tokens), layer, part)).encode()) % 255


class Run:
    """A scheduler over its tiers, and the device under it."""

    def __init__(self, scheduler: Scheduler, device: ReadingDevice) -> None:
        self.scheduler = scheduler
        self.device = device
        self._num_served = 0

    def serve(self, *prompts: Sequence[int]) -> None:
        """Compute one after the other and finish the copies of each: together, they do not fit into the next tier."""
        for prompt in prompts:
            self._num_served += 1
            rid = f"r{self._num_served}"
            drain(self.scheduler, EngineRequest(rid, prompt, SamplingLimits(max_new_tokens=3)))
        assert not self.scheduler.results.failures.total

    @property
    def hit_tokens(self) -> tuple[int, int, int]:
        """Tokens of prompts that were found: on the device, on the host, in storage."""
        stats = self.scheduler.tiers.stats()
        assert stats is not None
        return stats.device_hit_tokens, stats.host_hit_tokens, stats.storage_hit_tokens


@contextmanager
def opened(hicache: HiCacheConfig, *, model: str = "weights 1", dtype: torch.dtype = torch.float32) -> Iterator[Run]:
    memory, parallel = pool(dtype=dtype), ParallelState.trivial()
    tiers = open_hicache_tiers(
        make_torch_kv_memory(memory, model=model), hicache, CONFIG, parallel, groups=ParallelGroups()
    )
    device = ReadingDevice(memory, tiers.layer_counter)
    scheduler = Scheduler.compose(CONFIG, parallel, device, tiers=tiers)
    try:
        yield Run(scheduler, device)
        tiers.cache.check_integrity()
    finally:
        scheduler.close()


def with_files(
    folder: Path, layout: HostLayout = "page_first", *, checksum: StorageChecksum = "frame"
) -> HiCacheConfig:
    policy = HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1)
    return HiCacheConfig(
        host_tokens=256,
        host_layout=layout,
        storage="file",
        storage_path=str(folder),
        storage_checksum=checksum,
        storage_deadline_s=60,
        policy=policy,
    )


@pytest.mark.parametrize("load", ["whole", "by_layer"])
@pytest.mark.parametrize(("layout", "dtype"), [("page_first", torch.float32), ("layer_first", torch.bfloat16)], ids=str)
def test_pages_evicted_from_the_device_are_loaded_back_from_the_host(
    layout: HostLayout, dtype: torch.dtype, load: LoadBackMode
) -> None:
    config = HiCacheConfig(host_tokens=256, host_layout=layout, policy=HiCachePolicy(load=load))
    with opened(config, dtype=dtype) as run:
        run.serve(*PROMPTS)
        run.serve(PROMPTS[0])
        device, host, _ = run.hit_tokens
        assert device + host == 40
        assert host
        assert run.device.num_read


@pytest.mark.parametrize(("first", "second"), [("page_first", "layer_first"), ("layer_first", "page_first")])
def test_a_restarted_engine_reads_stored_pages_with_any_layout(
    tmp_path: Path, first: HostLayout, second: HostLayout
) -> None:
    with opened(with_files(tmp_path, first)) as run:
        run.serve(*PROMPTS)
    with opened(with_files(tmp_path, second)) as run:
        run.serve(*PROMPTS)
        assert run.hit_tokens == (0, 0, 3 * 40)


@pytest.mark.parametrize(("first", "second"), [("sidecar", "sidecar"), ("none", "none"), ("sidecar", "none")])
def test_a_restarted_engine_reads_pages_stored_without_copies(
    tmp_path: Path, first: StorageChecksum, second: StorageChecksum
) -> None:
    with opened(with_files(tmp_path, checksum=first)) as run:
        run.serve(*PROMPTS)
    with opened(with_files(tmp_path, checksum=second)) as run:
        run.serve(*PROMPTS)
        assert run.hit_tokens == (0, 0, 3 * 40)


@pytest.mark.parametrize(("first", "second"), [("frame", "none"), ("none", "frame"), ("none", "sidecar")])
def test_a_page_stored_with_another_checksum_kind_is_a_miss(
    tmp_path: Path, first: StorageChecksum, second: StorageChecksum
) -> None:
    with opened(with_files(tmp_path, checksum=first)) as run:
        run.serve(PROMPTS[0])
    with opened(with_files(tmp_path, checksum=second)) as run:
        run.serve(PROMPTS[0])
        assert run.hit_tokens == (0, 0, 0)
    with opened(with_files(tmp_path, checksum=second)) as run:
        run.serve(PROMPTS[0])
        assert run.hit_tokens == (0, 0, 40)  # pages of another checksum kind have other keys


def test_zero_copy_storage_needs_contiguous_pages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no contiguous pages, which storage_checksum='none' needs"):
        with_files(tmp_path, "layer_first", checksum="none")


@pytest.mark.parametrize("other", [{"model": "weights 2"}, {"dtype": torch.float16}], ids=str)
def test_pages_of_other_weights_and_types_are_not_read(tmp_path: Path, other: dict) -> None:
    """The types are of one size, so only the key distinguishes them."""
    other = {"dtype": torch.bfloat16, **other}
    with opened(with_files(tmp_path), dtype=torch.bfloat16) as run:
        run.serve(PROMPTS[0])
    with opened(with_files(tmp_path), **other) as run:
        run.serve(PROMPTS[0])
        assert run.hit_tokens == (0, 0, 0)


def test_a_memory_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="is 16 pages, but the KV memory has 15"):
        open_hicache_tiers(
            make_torch_kv_memory(pool(15), model="m"),
            HiCacheConfig(host_tokens=64),
            CONFIG,
            ParallelState.trivial(),
            groups=ParallelGroups(),
        )


BY_LAYER = HiCacheConfig(host_tokens=256, policy=HiCachePolicy(load="by_layer"))


def test_a_forward_computes_a_layer_while_the_next_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is copied after the one before it was computed, so a request that waits for all never runs."""
    with opened(BY_LAYER) as run:
        run.serve(*PROMPTS)
        assert not run.scheduler.cache.match_prefix(PROMPTS[0]).num_tokens
        copied: list[int] = []

        def copy_late(
            memory: TorchDeviceMemory,
            layer: int,
            layer_view: HostLayerView,
            host_pages: Sequence[int],
            pages: Sequence[int],
        ) -> CopyEvent:
            assert not layer or run.device.computed.acquire(timeout=20), "the forward waits for more than its layer"
            copied.append(layer)
            return copy(memory, layer, layer_view, host_pages, pages)

        copy = TorchDeviceMemory.copy_to_device
        monkeypatch.setattr(TorchDeviceMemory, "copy_to_device", copy_late)
        run.device.computed = Semaphore(0)
        run.serve(PROMPTS[0])
        assert copied == [0, 1, 2]
        assert run.hit_tokens == (0, 40, 0)


def test_a_load_that_fails_fails_the_requests_that_read_it_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(BY_LAYER) as run:
        run.serve(*PROMPTS)

        def fail_in_the_middle(
            memory: TorchDeviceMemory,
            layer: int,
            layer_view: HostLayerView,
            host_pages: Sequence[int],
            pages: Sequence[int],
        ) -> CopyEvent:
            if layer:
                raise MemoryError("no memory for a copy")
            return copy(memory, layer, layer_view, host_pages, pages)

        copy = TorchDeviceMemory.copy_to_device
        failed = EngineRequest("failed", PROMPTS[0], SamplingLimits(max_new_tokens=3))
        with monkeypatch.context() as broken:
            broken.setattr(TorchDeviceMemory, "copy_to_device", fail_in_the_middle)
            drain(run.scheduler, failed)
        assert failed.finish_reason == FinishReason.ERROR
        assert "failed while requests use its pages" in caplog.text
        run.scheduler.cache.check_integrity()
        assert not run.scheduler.cache.match_prefix(PROMPTS[0]).num_tokens
        drain(run.scheduler, EngineRequest("next", PROMPTS[0], SamplingLimits(max_new_tokens=3)))
        assert run.scheduler.results.failures.total == 1
        assert run.scheduler.cache.match_prefix(PROMPTS[0]).num_tokens == 40
