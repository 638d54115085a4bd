"""The model of a simulated device: how long a batch takes, and which token follows."""

from __future__ import annotations

from typing import Protocol
from zlib import crc32

import attrs

from scheduler_components._internal.validators import number_validator
from scheduler_components.errors import ConfigError
from scheduler_components.values import BatchShape, ScheduledBatch

_cost = number_validator("is not a cost", or_zero=True, at_most=1e9)


@attrs.frozen(kw_only=True)
class CostModel:
    """The duration of a forward pass.

    The defaults are round first-principle numbers for an 8-billion-parameter model in 16 bits on one 80 GB
    accelerator (3.3 TB/s, 400 TFLOP/s of matrix products).

    Attributes:
        base_ms: reads 16 GB of weights once per batch of any size: 5 ms.
        prefill_us_per_token: 16 GFLOP per token: 40 us.
        decode_us_per_request: sampling and launch overhead per sequence: 20 us.
        context_us_per_1k_tokens: reads 131 KB of KV per attended position: 40 us per thousand.
        eager_ms: under DP attention, launches 300 kernels one by one, 10 us each, where a replica's batch fits no
            captured graph: 3 ms.

    Under DP attention the tokens of all replicas pass through the experts together, padded to the longest batch. Every
    replica waits for all others, so a step takes as long as its longest batch in every replica.
    """

    base_ms: float = attrs.field(default=5.0, validator=_cost)
    prefill_us_per_token: float = attrs.field(default=40.0, validator=_cost)
    decode_us_per_request: float = attrs.field(default=20.0, validator=_cost)
    context_us_per_1k_tokens: float = attrs.field(default=40.0, validator=_cost)
    eager_ms: float = attrs.field(default=3.0, validator=_cost)

    def batch_s(self, batch: ScheduledBatch[object]) -> float:
        """Return the seconds that ``batch`` takes at speed 1."""
        if batch.replicas:
            is_eager = not all(shape.can_run_graph for shape in batch.replicas)
            return max(map(self.shape_s, batch.replicas)) + is_eager * self.eager_ms * 1e-3
        return self.shape_s(batch)

    def shape_s(self, batch: ScheduledBatch[object] | BatchShape) -> float:
        """Return the seconds that a replica's part of a batch takes at speed 1."""
        return (
            self.base_ms * 1e-3
            + batch.num_prefill_tokens * self.prefill_us_per_token * 1e-6
            + batch.num_decode_tokens * self.decode_us_per_request * 1e-6
            + batch.num_context_tokens * self.context_us_per_1k_tokens * 1e-9
        )


class HashedRequest(Protocol):
    """A request, as ``SimulatedModel`` and variants of it read it."""

    @property
    def rid(self) -> str:
        """Unique among the requests in flight."""
        ...

    @property
    def text_hash(self) -> int:
        """Hash of the prompt, and above temperature 0 also of seed and temperature."""
        ...


@attrs.frozen(kw_only=True)
class SimulatedModel:
    """Generate each token as a hash of a text's source and the position, so that all ranks and a test agree on it.

    The source of a text is its prompt, and above temperature 0 also seed and temperature. So equal requests with equal
    seeds get equal texts, as from a real model, and other requests get others.

    Attributes:
        vocab_size: token ids are smaller.
        seed: a different seed gives different text.
        eos_token_id: the end-of-sequence token that the model emits from time to time; None for none.
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

    def text_source(self, request: HashedRequest) -> str | int:
        """Return what the text of a request depends on."""
        return request.text_hash

    def next_token(self, source: str | int, position: int) -> int:
        """Return the token at ``position`` of the text of ``source``; position 0 is the first token of its prompt."""
        draw = crc32(f"{self.seed}/{position}/{source}".encode())
        if self.eos_token_id is not None and draw % self.mean_output_tokens == 0:
            return self.eos_token_id
        return draw // self.mean_output_tokens % self.vocab_size
