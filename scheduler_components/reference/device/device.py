"""The device: what computes a batch. A port, and a simulated one with a stated cost model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol
from zlib import crc32

import attrs

from scheduler_components import ConfigError
from scheduler_components.reference.device.request import ScheduledBatch

__all__ = [
    "CostModel",
    "Device",
    "SimulatedDevice",
    "SimulatedModel",
]


class Device(Protocol):
    """Computes one batch at a time.

    Launch and wait are apart so that the scheduler's thread can do other work (encode and send its events) while
    the device computes.
    """

    def launch(self, batch: ScheduledBatch) -> None:
        """Start computing ``batch``; returns at once."""
        ...

    def wait(self) -> tuple[int, ...]:
        """Block until the launched batch is done; the next token of each of its works, in order.

        The token after a chunk that does not reach the end of its request's tokens means nothing.
        """
        ...


def _not_negative(_: CostModel, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0.0 <= value < float("inf"):
        raise ConfigError(attribute.name, value, "is not a cost", "give a finite number of at least 0")


@attrs.frozen(kw_only=True)
class CostModel:
    """Seconds that a forward pass takes.

    The defaults are round first-principle numbers of an 8-billion-parameter model in 16 bits on one 80 GB
    accelerator (3.3 TB/s, 400 TFLOP/s of matrix products):

    Attributes:
        base_ms: reading 16 GB of weights once, whatever the batch: 5 ms.
        prefill_us_per_token: 16 GFLOP a token: 40 us.
        decode_us_per_request: sampling and launch overhead of one more sequence: 20 us.
        context_us_per_1k_tokens: reading 131 KB of KV for each position attended to: 40 us a thousand.
    """

    base_ms: float = attrs.field(default=5.0, validator=_not_negative)
    prefill_us_per_token: float = attrs.field(default=40.0, validator=_not_negative)
    decode_us_per_request: float = attrs.field(default=20.0, validator=_not_negative)
    context_us_per_1k_tokens: float = attrs.field(default=40.0, validator=_not_negative)

    def batch_s(self, batch: ScheduledBatch) -> float:
        """Seconds for ``batch`` at speed 1."""
        return (
            self.base_ms * 1e-3
            + batch.num_prefill_tokens * self.prefill_us_per_token * 1e-6
            + batch.num_decode_tokens * self.decode_us_per_request * 1e-6
            + batch.num_context_tokens * self.context_us_per_1k_tokens * 1e-9
        )


@attrs.frozen(kw_only=True)
class SimulatedModel:
    """Which tokens come out: a hash of seed, request id and position, so all ranks agree and a test can foretell.

    Attributes:
        vocab_size: ids are below it.
        seed: another seed, another text.
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


class SimulatedDevice:
    """Takes the time of ``CostModel`` and answers with the tokens of ``SimulatedModel``.

    Args:
        model: the tokens.
        cost: the time.
        speed: divides the time; 2.0 is a device twice as fast.
        clock, sleep: monotonic seconds and how to let them pass.
    """

    __slots__ = ("_batch", "_clock", "_cost", "_deadline_s", "_model", "_sleep", "_speed")

    def __init__(
        self,
        model: SimulatedModel | None = None,
        cost: CostModel | None = None,
        *,
        speed: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0.0 < speed < float("inf"):
            raise ConfigError("speed", speed, "is not a speed", "give a finite number above 0")
        self._model = model if model is not None else SimulatedModel()
        self._cost = cost if cost is not None else CostModel()
        self._speed = speed
        self._clock = clock
        self._sleep = sleep
        self._batch = ScheduledBatch()
        self._deadline_s = 0.0

    def launch(self, batch: ScheduledBatch) -> None:
        self._batch = batch
        self._deadline_s = self._clock() + self._cost.batch_s(batch) / self._speed

    def wait(self) -> tuple[int, ...]:
        left_s = self._deadline_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        next_token = self._model.next_token
        return tuple(next_token(work.request.rid, work.end) for work in self._batch.works)
