"""The samples of the load gauge: one msgpack array each, and a view of the newest sample of each rank.

Source: SGLang 0.5.23, ``LoadStat`` of its load publisher, and sgl-router, its reader: the tag and the first five
fields are fixed, the next five belong together, and readers skip any fields that they do not know.
"""

from __future__ import annotations

import math
from collections import deque
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
"""The first frame of every sample."""

MAX_LOAD_STAT_BYTES = 8 * 1024
"""A sample has about 100 bytes, and up to 5 KiB with the watermarks of 64 dispatchers with long names."""

_MAX_COUNT = 2**64 - 1


class LoadStat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="LoadStat"):
    """One sample. ``num_tokens`` counts KV tokens in use. Names and order up to ``total_prefill_busy_us`` are SGLang's.

    Attributes:
        sequence: number of the sample in its epoch, contiguous from 0; also the second frame of the message.
        timestamp: wall-clock seconds of the publisher when it read the counts.
        epoch: random number of the publisher's run. Sequences of different epochs cannot be compared.
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
    """Convert a snapshot to sample ``sequence``. Counts below 0, which readers refuse, become 0."""
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
    """Decode one sample of this kit or of SGLang. Unknown further elements are skipped.

    Raises:
        DecodeError: the payload is not such an array, is too long, or has a negative or infinite number.
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


_MAX_FORMER_EPOCHS = 8
"""Earlier epochs of a rank to remember, because their last samples may still be in transit."""


class LoadSample(msgspec.Struct, frozen=True, gc=False):
    """The newest sample of one rank.

    Attributes:
        stat: the sample.
        received_s: time of receipt by the reader's clock.
        missed: samples lost between this one and the one received before it.
    """

    stat: LoadStat
    received_s: float
    missed: int = 0

    def age_s(self, now: float) -> float:
        """Return the seconds since receipt by the reader's clock, which may differ from the publisher's."""
        return max(0.0, now - self.received_s)


@dataclass(slots=True, kw_only=True)
class LoadView:
    """Keeps the newest sample of each rank, in whatever order samples arrive.

    The newest sample has the highest sequence of the current epoch. An unknown epoch is a restart of the publisher and
    replaces the current one; samples of earlier epochs are dropped.

    Attributes:
        max_ranks: number of ranks to keep.
        samples: rank -> newest sample.
        outdated: samples dropped because a newer one was known.
        refused: samples dropped because their rank is beyond ``max_ranks``.
    """

    max_ranks: int = 1024
    samples: dict[int, LoadSample] = field(default_factory=dict, init=False)
    outdated: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)
    _former_epochs: dict[int, deque[int]] = field(default_factory=dict, init=False, repr=False)

    def update(self, stat: LoadStat, now: float) -> bool:
        """Add one sample; return whether it is the newest of its rank."""
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
        former = self._former_epochs.setdefault(rank, deque(maxlen=_MAX_FORMER_EPOCHS))
        if stat.epoch in former:
            return False
        former.append(known.epoch)
        return True


LOAD_HEARTBEAT_S = 1.0
"""sgl-router considers a rank silent after 5 s without a sample, so four samples in a row may be lost."""
