"""The device: computes one batch at a time. Its port, its batch, and a simulated one with a stated cost.

The device stands below the engine: of a request it reads what ``DeviceRequest`` says, and knows no scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from zlib import crc32

import attrs
import msgspec

from scheduler_components import ConfigError
from scheduler_components.dp_attn import BatchShape
from scheduler_components.ports import LayerDoneCounter, NullLayerDoneCounter
from scheduler_components.reference.device.sampling import SamplingParams, TokenLogprobs
from scheduler_components.validators import check_number, number_validator

__all__ = [
    "NUM_SIMULATED_LAYERS",
    "CostModel",
    "Device",
    "DeviceOutput",
    "DeviceRequest",
    "LayerwiseDevice",
    "ScheduledBatch",
    "ScheduledChunk",
    "SimulatedDevice",
    "SimulatedModel",
]


NUM_SIMULATED_LAYERS = 2
"""Layers of a simulated device: more than one, so that their order can be seen."""


class DeviceRequest(Protocol):
    """What a device reads of a request."""

    @property
    def rid(self) -> str:
        """Unique among the requests in flight."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt, then what was generated; u32."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """KV pages of the positions from 0 on, as many as the batch needs."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """How its next token is chosen."""
        ...


RequestT_co = TypeVar("RequestT_co", bound=DeviceRequest, covariant=True)
"""The scheduler's own class of requests, which comes back to it with each result."""


class ScheduledChunk(msgspec.Struct, Generic[RequestT_co], frozen=True):
    """Positions ``start`` to ``end`` of one request, to go through the device in this step.

    Attributes:
        request: whose tokens they are; ``request.pages`` covers ``end`` positions.
        start, end: half-open range of positions in ``request.token_ids``.
        is_prefill: False for the one new position of a decode.
    """

    request: RequestT_co
    start: int
    end: int
    is_prefill: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class ScheduledBatch(msgspec.Struct, Generic[RequestT_co], frozen=True):
    """What one forward pass computes: decodes and prefill chunks, mixed, in order of arrival.

    Attributes:
        works: at most one entry per request.
        num_prefill_tokens, num_decode_tokens: positions computed, by kind.
        num_context_tokens: positions whose KV is read: the sum of all ``end``.
        num_admitted, num_retracted: requests that got and lost their pages while the batch was made.
        replicas: under DP attention, the shapes of all replicas' batches, this one's among them; none otherwise.
    """

    works: tuple[ScheduledChunk[RequestT_co], ...] = ()
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_context_tokens: int = 0
    num_admitted: int = 0
    num_retracted: int = 0
    replicas: tuple[BatchShape, ...] = ()

    @property
    def has_work(self) -> bool:
        """The device takes this step: something is computed, here or in another replica."""
        return bool(self.works) or any(shape.num_tokens for shape in self.replicas)


class DeviceOutput(msgspec.Struct, frozen=True):
    """What one forward pass gave.

    Attributes:
        token_ids: the next token of each work of the batch, in order. The token after a chunk that does not reach the
            end of its request's tokens means nothing.
        errors: why a work has no result, in one sentence, by its place in the batch; its token means nothing.
        logprobs: of the tokens whose request asked for them, by place in the batch.
    """

    token_ids: tuple[int, ...] = ()
    errors: Mapping[int, str] = {}
    logprobs: Mapping[int, TokenLogprobs] = {}


class Device(Protocol):
    """Computes one batch at a time.

    Launch and wait are two calls, so that the scheduler's thread can encode and send its events while the device
    computes.
    """

    def launch(self, batch: ScheduledBatch[DeviceRequest]) -> None:
        """Start computing ``batch``; returns at once."""
        ...

    def wait(self) -> DeviceOutput:
        """Block until the launched batch is done, and return what came out.

        What is raised fails the whole batch; what concerns one request alone belongs into ``DeviceOutput.errors``.
        """
        ...


class LayerwiseDevice(Device, Protocol):
    """A device that waits for pages which are on their way, layer by layer."""

    layer_counter: LayerDoneCounter
    """Begun when a batch is launched, and waited at before each layer."""


@attrs.frozen(kw_only=True)
class CostModel:
    """Seconds that a forward pass takes.

    The defaults are round first-principle numbers of an 8-billion-parameter model in 16 bits on one 80 GB
    accelerator (3.3 TB/s, 400 TFLOP/s of matrix products):

    Attributes:
        base_ms: reading 16 GB of weights once, whatever the batch: 5 ms.
        prefill_us_per_token: 16 GFLOP per token: 40 us.
        decode_us_per_request: sampling and launch overhead of one more sequence: 20 us.
        context_us_per_1k_tokens: reading 131 KB of KV for each position attended to: 40 us per thousand.
        eager_ms: under DP attention, launching 300 kernels one by one where a replica's batch fits no captured graph,
            10 us each: 3 ms.

    Under DP attention all replicas' tokens go through the experts together, padded to the longest batch, and nobody
    goes on before all have come: a step takes as long as the longest of its batches, in every replica.
    """

    base_ms: float = attrs.field(default=5.0, validator=number_validator("is not a cost", or_zero=True))
    prefill_us_per_token: float = attrs.field(default=40.0, validator=number_validator("is not a cost", or_zero=True))
    decode_us_per_request: float = attrs.field(default=20.0, validator=number_validator("is not a cost", or_zero=True))
    context_us_per_1k_tokens: float = attrs.field(
        default=40.0, validator=number_validator("is not a cost", or_zero=True)
    )

    eager_ms: float = attrs.field(default=3.0, validator=number_validator("is not a cost", or_zero=True))

    def batch_s(self, batch: ScheduledBatch[DeviceRequest]) -> float:
        """Seconds for ``batch`` at speed 1."""
        if batch.replicas:
            is_eager = not all(shape.can_run_graph for shape in batch.replicas)
            return max(map(self._shape_s, batch.replicas)) + is_eager * self.eager_ms * 1e-3
        return self._shape_s(batch)

    def _shape_s(self, batch: ScheduledBatch[DeviceRequest] | BatchShape) -> float:
        return (
            self.base_ms * 1e-3
            + batch.num_prefill_tokens * self.prefill_us_per_token * 1e-6
            + batch.num_decode_tokens * self.decode_us_per_request * 1e-6
            + batch.num_context_tokens * self.context_us_per_1k_tokens * 1e-9
        )


@attrs.frozen(kw_only=True)
class SimulatedModel:
    """Which tokens come out: a hash of seed, request id and position, so all ranks and a test find the same.

    Attributes:
        vocab_size: ids are below it.
        seed: another seed gives another text.
        eos_token_id: emitted now and then when given, otherwise never on purpose.
        mean_output_tokens: mean distance between end-of-sequence tokens.
    """

    vocab_size: int = 32_000
    seed: int = 0
    eos_token_id: int | None = None
    mean_output_tokens: int = 256

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.vocab_size <= 2**32:
            raise ConfigError("vocab_size", self.vocab_size, "is not a vocabulary of u32 ids", "give 1 to 2**32")
        if self.mean_output_tokens < 1:
            raise ConfigError("mean_output_tokens", self.mean_output_tokens, "is not a length", "give at least 1")

    def next_token(self, rid: str, position: int) -> int:
        """The token at ``position`` of request ``rid`` (0 is the first token of its prompt)."""
        draw = crc32(f"{self.seed}/{position}/{rid}".encode())
        if self.eos_token_id is not None and draw % self.mean_output_tokens == 0:
            return self.eos_token_id
        return draw // self.mean_output_tokens % self.vocab_size


@dataclass(slots=True, kw_only=True)
class SimulatedDevice:
    """Takes the time of ``CostModel`` and answers with the tokens of ``SimulatedModel``, of which it is certain.

    Attributes:
        model: the tokens.
        cost: the time.
        speed: divides the time; 2.0 is a device twice as fast.
        clock, sleep: monotonic seconds and how to let them pass.
        layer_counter: where it waits for pages that are on their way, before each of its ``NUM_SIMULATED_LAYERS``.

    Raises:
        ConfigError: ``speed`` is not a finite number above 0.
    """

    model: SimulatedModel = field(default_factory=SimulatedModel)
    cost: CostModel = field(default_factory=CostModel)
    speed: float = 1.0
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    layer_counter: LayerDoneCounter = field(default_factory=NullLayerDoneCounter)
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
        next_token, works = self.model.next_token, self._batch.works
        token_ids = tuple(next_token(work.request.rid, work.end) for work in works)
        logprobs = {
            place: TokenLogprobs(0.0, ((token_ids[place], 0.0),) if work.request.sampling.logprobs else ())
            for place, work in enumerate(works)
            if work.request.sampling.logprobs is not None
        }
        return DeviceOutput(token_ids, logprobs=logprobs)
