"""Compute one batch at a time: the port of a device, its batch, and a simulated device with a stated cost.

This module is below the scheduler. A device reads the members of ``DeviceRequest`` and knows no scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from scheduler_components._internal.validators import check_number
from scheduler_components.ports import LayerDoneCounter, NullLayerDoneCounter
from scheduler_components.quiesce import MemoryOccupation
from scheduler_components.values import ScheduledBatch, ScheduledChunk
from scheduler_components.waiting.held_request import RequestGrammar
from scheduler_components.waiting.thread_adapter_loader import AdapterStore, NullAdapterStore
from scheduler_components.weight_updater import WeightStore
from scheduler_engine.device.adapters import SimulatedAdapters
from scheduler_engine.device.sampling import SamplingParams, TokenLogprobs
from scheduler_engine.simulation import CostModel, SimulatedModel

if TYPE_CHECKING:
    from scheduler_components.hicache import TorchDeviceMemory
    from scheduler_engine.device.torch_model_parallel import ModelParallelGroup

__all__ = [
    "NUM_SIMULATED_LAYERS",
    "CostModel",
    "Device",
    "DeviceOutput",
    "DeviceRequest",
    "LayerwiseDevice",
    "RankCompute",
    "ScheduledBatch",
    "ScheduledChunk",
    "SimulatedDevice",
    "SimulatedModel",
]


NUM_SIMULATED_LAYERS = 2
"""Layers of a simulated device. More than one, so that tests see their order."""


class DeviceRequest(Protocol):
    """The members of a request that a device reads."""

    @property
    def rid(self) -> str:
        """Unique among the requests in flight."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt, then the generated tokens; u32."""
        ...

    @property
    def text_hash(self) -> int:
        """Hash of the prompt, and above temperature 0 also of seed and temperature."""
        ...

    @property
    def lora_id(self) -> int | None:
        """Number of the adapter that computes it; None for the base model."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """KV pages of positions 0 and up, as many as the batch needs."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """How to choose the next token."""
        ...

    @property
    def grammar(self) -> RequestGrammar | None:
        """Which tokens may follow; None if every token may. A simulated device has no logits and ignores it."""
        ...


class DeviceOutput(msgspec.Struct, frozen=True):
    """The result of one forward pass.

    Attributes:
        token_ids: the next token per chunk of the batch, in order. Ignore the token of a chunk that does not reach the
            end of its request's tokens.
        errors: one sentence per failed chunk, by its index in the batch. Ignore the token of a failed chunk.
        logprobs: per chunk whose request asked for them, by its index in the batch.
    """

    token_ids: tuple[int, ...] = ()
    errors: Mapping[int, str] = {}
    logprobs: Mapping[int, TokenLogprobs] = {}


class Device(Protocol):
    """Compute one batch at a time.

    Launch and wait are separate calls, so that the scheduler's thread encodes and sends its events while the device
    computes.
    """

    def launch(self, batch: ScheduledBatch[DeviceRequest]) -> None:
        """Start computing ``batch`` and return immediately."""
        ...

    def wait(self) -> DeviceOutput:
        """Wait for the launched batch and return its output.

        An exception fails the whole batch. The error of a single request belongs in ``DeviceOutput.errors``.
        """
        ...


class LayerwiseDevice(Device, Protocol):
    """A device that waits, layer by layer, for pages that are still being copied to it."""

    layer_counter: LayerDoneCounter
    """The device starts it when it launches a batch, and waits on it before each layer."""


@dataclass(slots=True, kw_only=True)
class SimulatedDevice:
    """Take the time of ``CostModel`` and return the tokens of ``SimulatedModel``, each with probability 1.

    Attributes:
        model: generates the tokens.
        cost: the duration of a forward pass.
        speed: divides the duration; 2.0 is a device twice as fast.
        clock, sleep: monotonic seconds, and a call that waits for some.
        layer_counter: the device waits on it before each of its ``NUM_SIMULATED_LAYERS`` layers.
        adapters: the loaded ones. A chunk whose adapter is not among them fails.

    Raises:
        ConfigError: ``speed`` is not a finite number above 0.
    """

    model: SimulatedModel = field(default_factory=SimulatedModel)
    cost: CostModel = field(default_factory=CostModel)
    speed: float = 1.0
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    layer_counter: LayerDoneCounter = field(default_factory=NullLayerDoneCounter)
    adapters: SimulatedAdapters = field(default_factory=SimulatedAdapters)
    _batch: ScheduledBatch[DeviceRequest] = field(default_factory=ScheduledBatch, init=False)
    _deadline_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        check_number("speed", self.speed, "is not a speed")

    def launch(self, batch: ScheduledBatch[DeviceRequest]) -> None:
        self._batch = batch
        self.layer_counter.start_batch()
        self._deadline_s = self.clock() + self.cost.batch_s(batch) / self.speed

    def wait(self) -> DeviceOutput:
        for layer in range(NUM_SIMULATED_LAYERS):
            self.layer_counter.wait_until(layer)
        left_s = self._deadline_s - self.clock()
        if left_s > 0:
            self.sleep(left_s)
        next_token, chunks, errors = self.model.next_token, self._batch.chunks, dict[int, str]()
        sources = [self._text_source(chunk.request, place, errors) for place, chunk in enumerate(chunks)]
        token_ids = tuple(next_token(source, chunk.end) for source, chunk in zip(sources, chunks, strict=True))
        logprobs = {
            place: TokenLogprobs(0.0, ((token_ids[place], 0.0),) if chunk.request.sampling.logprobs else ())
            for place, chunk in enumerate(chunks)
            if chunk.request.sampling.logprobs is not None
        }
        return DeviceOutput(token_ids, errors, logprobs)

    def _text_source(self, request: DeviceRequest, place: int, errors: dict[int, str]) -> str | int:
        """Return what the text of a request depends on. Add an error if its adapter is not loaded."""
        source = self.model.text_source(request)
        if request.lora_id is None:
            return source
        path = self.adapters.path_of(request.lora_id)
        if path is None:
            errors[place] = f"adapter {request.lora_id} is not loaded"
        return f"{source}/{path}"


@dataclass(slots=True, kw_only=True, frozen=True)
class RankCompute:
    """The device of one rank, and the ports through which control requests change it.

    Attributes:
        device: computes batches.
        weights: loads new weights.
        memory: releases and resumes device memory.
        pool: KV pages that the device computes into; None for a simulated device.
        groups: the ranks that hold the other shards of the model, and those that compute other rows of a prefill; empty
            for a simulated device.
        adapters: the adapters of the device.
    """

    device: LayerwiseDevice
    weights: WeightStore
    memory: MemoryOccupation
    pool: TorchDeviceMemory | None = None
    groups: tuple[ModelParallelGroup, ...] = ()
    adapters: AdapterStore = field(default_factory=NullAdapterStore)

    def close(self) -> None:
        """Leave the groups of ranks. Safe to call twice."""
        for group in self.groups:
            group.close()
