"""The load gauge: one msgpack array per sample on the wire, and the newest sample of each rank at a dispatcher.

Source: SGLang 0.5.23, ``LoadStat`` of its load publisher, and sgl-router, its reader: the tag and the first five
fields are fixed, the next five go together, and whatever follows is skipped by readers that do not know it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.values import LoadSnapshot

__all__ = [
    "LOAD_TOPIC",
    "MAX_LOAD_STAT_BYTES",
    "LoadStat",
    "decode_load_stat",
    "encode_load_stat",
    "to_load_stat",
    "LoadSample",
    "LoadView",
    "LOAD_HEARTBEAT_S",
]

LOAD_TOPIC = b"load"
"""First frame of every sample."""

MAX_LOAD_STAT_BYTES = 8 * 1024
"""A sample has some 100 bytes, and up to 5 KiB with the watermarks of 64 dispatchers with long names."""

_MAX_COUNT = 2**64 - 1


class LoadStat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="LoadStat"):
    """One sample. ``num_tokens`` are KV tokens in use; names and order are SGLang's up to ``total_prefill_busy_us``.

    Attributes:
        sequence: number of the sample in its publisher's epoch, contiguous from 0; also the message's second frame.
        timestamp: the publisher's wall clock, seconds, when the counts were read.
        epoch: random number of the publisher's epoch: a sequence says nothing beside one of another epoch.
        dispatched_watermarks: as in ``LoadSnapshot``.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    max_total_num_tokens: int
    attn_dp_rank: int | None
    num_waiting_uncached_tokens: int = 0
    num_total_tokens: int = 0
    max_running_requests: int = 0
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0
    sequence: int = 0
    timestamp: float = 0.0
    epoch: int = 0
    dispatched_watermarks: tuple[tuple[str, int], ...] = ()


_COUNTS = tuple(
    field.name for field in msgspec.structs.fields(LoadStat) if field.name not in ("timestamp", "dispatched_watermarks")
)

encode_load_stat = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LoadStat).decode


def to_load_stat(load: LoadSnapshot, *, sequence: int, epoch: int) -> LoadStat:
    """Put a snapshot in the gauge's form, as sample ``sequence``. Counts below 0, which no reader takes, become 0."""
    return LoadStat(
        max(0, load.num_running_reqs),
        max(0, load.num_waiting_reqs),
        max(0, load.num_used_tokens),
        max(0, load.max_total_num_tokens),
        load.dp_rank,
        max(0, load.num_waiting_uncached_tokens),
        max(0, load.num_total_tokens),
        max(0, load.max_running_requests),
        load.total_prefill_uncached_tokens,
        load.total_prefill_busy_us,
        sequence,
        load.timestamp,
        epoch,
        load.dispatched_watermarks,
    )


def decode_load_stat(payload: bytes) -> LoadStat:
    """Read one sample, of this kit or of SGLang. Elements after those known here are skipped.

    Raises:
        DecodeError: the payload is not such an array, is too long, or holds a negative or not finite number.
    """
    if len(payload) > MAX_LOAD_STAT_BYTES:
        raise DecodeError(f"LoadStat of {len(payload)} bytes, at most {MAX_LOAD_STAT_BYTES} are read")
    try:
        stat = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a LoadStat: {error}") from error
    for name in _COUNTS:
        value = getattr(stat, name)
        if value is not None and not 0 <= value <= _MAX_COUNT:
            raise DecodeError(f"LoadStat.{name} is {value!r}, a count is not")
    if not math.isfinite(stat.timestamp):
        raise DecodeError(f"LoadStat.timestamp is {stat.timestamp!r}")
    return stat


# The newest load sample of each rank, as a dispatcher holds them. Pure: time comes in.

_MAX_FORMER_EPOCHS = 8
"""Earlier epochs of a rank's publisher, whose last samples may still be under way."""


class LoadSample(msgspec.Struct, frozen=True, gc=False):
    """One rank's newest sample.

    Attributes:
        stat: what it says.
        received_s: when it was read, by the reader's own clock.
        missed: samples between it and the one read before it.
    """

    stat: LoadStat
    received_s: float
    missed: int = 0

    def age_s(self, now: float) -> float:
        """Seconds since it was read, by the reader's clock, which need not agree with the publisher's."""
        return max(0.0, now - self.received_s)


@dataclass(slots=True, kw_only=True)
class LoadView:
    """Takes samples in any order and keeps the newest of each rank.

    Newest is the highest sequence of the publisher's present epoch. A epoch that was not seen before is a restart and
    begins anew; one that was left does not come back.

    Attributes:
        max_ranks: ranks that are kept; samples of further ones are refused.
        samples: rank -> newest sample.
        outdated: samples dropped because a newer one was there.
        refused: samples of ranks beyond ``max_ranks``.
    """

    max_ranks: int = 1024
    samples: dict[int, LoadSample] = field(default_factory=dict, init=False)
    outdated: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)
    _former_epochs: dict[int, deque[int]] = field(default_factory=dict, init=False, repr=False)

    def update(self, stat: LoadStat, now: float) -> bool:
        """Take in one sample; True when it is its rank's newest."""
        rank = stat.attn_dp_rank or 0
        if rank >= self.max_ranks:
            self.refused += 1
            return False
        known = self.samples.get(rank)
        missed = 0
        if known is not None:
            if not self._is_newer(stat, known.stat, rank):
                self.outdated += 1
                return False
            missed = stat.sequence - known.stat.sequence - 1 if stat.epoch == known.stat.epoch else stat.sequence
        self.samples[rank] = LoadSample(stat, now, missed)
        return True

    def _is_newer(self, stat: LoadStat, known: LoadStat, rank: int) -> bool:
        if stat.epoch == known.epoch:
            return stat.sequence > known.sequence
        left = self._former_epochs.setdefault(rank, deque(maxlen=_MAX_FORMER_EPOCHS))
        if stat.epoch in left:
            return False
        left.append(known.epoch)
        return True

    def stale_ranks(self, expected: Iterable[int], *, now: float, max_age_s: float) -> list[int]:
        """Return the ranks of ``expected`` that have said nothing for longer than ``max_age_s``, or never anything."""
        samples = self.samples
        return [rank for rank in expected if rank not in samples or samples[rank].age_s(now) > max_age_s]


LOAD_HEARTBEAT_S = 1.0
"""sgl-router takes a rank for silent after 5 s without a sample; a fifth of that survives losses."""
