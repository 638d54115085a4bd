"""Pages of keys and values in torch tensors: every byte comes back, whichever memory and layout it passes."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch", reason="needs torch: pip install scheduler-components[torch]")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.hicache import HostPool, SimulatedDeviceMemory, TorchDeviceMemory
from scheduler_components.hicache.memory import merged_runs
from scheduler_components.ports import DeviceMemory
from scheduler_components.values.page_shape import HostLayout, PageShape

pytestmark = pytest.mark.torch

NUM_PAGES = 8
SIZES = {"num_layers": 3, "num_pages": NUM_PAGES, "page_size": 4, "kv_heads": 2, "head_dim": 6}
LAYOUTS: tuple[HostLayout, ...] = ("page_first", "layer_first")


def filled(dtype: torch.dtype = torch.float32, seed: int = 7) -> TorchDeviceMemory:
    """A pool whose every number is its own."""
    memory = TorchDeviceMemory.allocate(**SIZES, dtype=dtype)
    random = torch.Generator().manual_seed(seed)
    for pool in memory.keys + memory.values:
        pool.copy_(torch.randn(pool.shape, generator=random))
    return memory


def rows(memory: TorchDeviceMemory, pages: list[int]) -> list[torch.Tensor]:
    return [pool[pages].clone() for pool in memory.keys + memory.values]


def are_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def to_host(host: HostPool, device: DeviceMemory, pages: list[int]) -> list[int]:
    host_pages = host.reserve(len(pages))
    assert host.copy_from_device(device, pages, host_pages).is_done()
    host.commit(host_pages)
    return host_pages


def to_device(host: HostPool, host_pages: list[int], device: DeviceMemory, pages: list[int]) -> None:
    assert host.copy_to_device(host_pages, device, pages).is_done()


@settings(deadline=None, max_examples=40)
@given(
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    sources=st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=NUM_PAGES, unique=True),
    data=st.data(),
)
def test_pages_survive_all_transfers_between_tiers(
    layouts: tuple[HostLayout, HostLayout], dtype: torch.dtype, sources: list[int], data: st.DataObject
) -> None:
    targets = data.draw(st.permutations(range(NUM_PAGES)))[: len(sources)]
    device, other = filled(dtype), filled(dtype, seed=8)
    untouched = [page for page in range(NUM_PAGES) if page not in targets]
    before = rows(other, untouched)
    written, read = (
        HostPool(device.shape, NUM_PAGES + 3, verify=True, layout=layout, buffer=device.host_buffer(NUM_PAGES + 3))
        for layout in layouts
    )

    host_pages = to_host(written, device, sources)
    stored = [bytes(written.read(page)) for page in host_pages]
    read.reserve(1)  # so that the pages have other numbers
    landed = read.reserve(len(stored))
    for page, content in zip(landed, stored, strict=True):
        read.write(page, content)
    read.commit(landed)
    assert [bytes(read.read(page)) for page in landed] == stored
    to_device(read, landed, other, targets)

    assert are_equal(rows(other, targets), rows(device, sources))
    assert are_equal(rows(other, untouched), before)


@settings(deadline=None)
@given(data=st.data(), length=st.integers(0, 12))
def test_merged_runs_are_the_pairs_in_their_order(data: st.DataObject, length: int) -> None:
    """Few pages, so that runs on one side alone come up."""
    first, second = (data.draw(st.permutations(range(12)))[:length] for _ in range(2))
    if data.draw(st.booleans()):
        first = list(range(length))
    runs = list(merged_runs(first, second))
    pairs = [
        pair
        for one, other in runs
        for pair in zip(range(one.start, one.stop), range(other.start, other.stop), strict=True)
    ]
    assert pairs == list(zip(first, second, strict=True))
    for (one, other), (next_one, next_other) in itertools.pairwise(runs):
        assert (one.stop, other.stop) != (next_one.start, next_other.start), "two copies where one would do"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stored_page_is_layer_after_layer_keys_before_values(layout: HostLayout) -> None:
    device = filled()
    host = HostPool(device.shape, 2, layout=layout)
    [page] = to_host(host, device, [5])
    parts = [part for layer in range(3) for part in (device.keys[layer][5], device.values[layer][5])]
    assert bytes(host.read(page)) == torch.cat([part.reshape(-1) for part in parts]).numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_simulated_and_torch_memory_store_the_same_bytes(layout: HostLayout) -> None:
    device = filled()
    host = HostPool(device.shape, 4, layout=layout)
    pages = to_host(host, device, [1, 2, 6])
    simulated = SimulatedDeviceMemory(device.shape, NUM_PAGES)
    to_device(host, pages, simulated, [4, 5, 0])
    assert [simulated.read(page) for page in (4, 5, 0)] == [bytes(host.read(page)) for page in pages]


def test_layers_arrive_one_after_the_other() -> None:
    source, target = filled(), filled(seed=8)
    host = HostPool(source.shape, 2)
    pages = to_host(host, source, [3])
    ends = host.copy_to_device_by_layer(pages, target, [6])
    for layer in range(3):
        assert not torch.equal(target.keys[layer][6], source.keys[layer][3])
        next(ends).wait_on_stream()
        assert torch.equal(target.keys[layer][6], source.keys[layer][3])
        assert torch.equal(target.values[layer][6], source.values[layer][3])
    assert list(ends) == []


def test_a_pool_begins_with_zeros_and_has_its_shape() -> None:
    memory = TorchDeviceMemory.allocate(**SIZES, dtype=torch.bfloat16)
    assert not any(pool.count_nonzero() for pool in memory.keys + memory.values)
    assert memory.shape == PageShape(num_layers=3, layer_page_bytes=2 * 4 * 2 * 6 * 2, num_parts=2)
    assert (memory.num_pages, memory.page_size, memory.num_bytes) == (NUM_PAGES, 4, 3 * 192 * NUM_PAGES)


@pytest.mark.parametrize("name", SIZES)
def test_an_empty_pool_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        TorchDeviceMemory.allocate(**{**SIZES, name: 0})


def test_a_pool_larger_than_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_pages=\d+: cannot be allocated"):
        TorchDeviceMemory.allocate(**{**SIZES, "num_pages": 1 << 44})
    with pytest.raises(ConfigError, match=r"host_tokens=\d+: cannot be allocated"):
        filled().host_buffer(1 << 44)


def test_copies_wait_for_the_forward_that_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with streams. Without it, a copy would read pages that the forward has not written yet."""

    class Stream:
        waited_for: object = None

        def wait_stream(self, other: object) -> None:
            self.waited_for = other

    memory, stream = filled(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"compute stream of {device}")
    memory.wait_for_compute_stream()
    memory._stream = stream  # type: ignore[assignment]
    memory.wait_for_compute_stream()
    assert stream.waited_for == f"compute stream of {memory.device}"
