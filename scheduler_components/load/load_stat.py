"""The load gauge on the wire: one msgpack array a sample.

Source: SGLang 0.5.23, ``LoadStat`` of its load publisher, and sgl-router, its reader: the tag and the first five
fields are fixed, the next five go together, and whatever follows is skipped by readers that do not know it.
"""

from __future__ import annotations

import math

import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.load.snapshot import LoadSnapshot

__all__ = ["LOAD_TOPIC", "MAX_LOAD_STAT_BYTES", "LoadStat", "decode_load_stat", "encode_load_stat", "load_stat_from"]

LOAD_TOPIC = b"load"
"""First frame of every sample."""

MAX_LOAD_STAT_BYTES = 8 * 1024
"""A sample has some 100 bytes, and up to 5 KiB with the watermarks of 64 dispatchers with long names."""

_MAX_COUNT = 2**64 - 1


class LoadStat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="LoadStat"):
    """One sample. ``num_tokens`` are KV tokens in use; names and order are SGLang's up to ``total_prefill_busy_us``.

    Attributes:
        sequence: number of the sample in its publisher's life, contiguous from 0; also the message's second frame.
        timestamp: the publisher's wall clock, seconds, when the counts were read.
        life: random number of the publisher's life: a sequence says nothing beside one of another life.
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
    life: int = 0
    dispatched_watermarks: tuple[tuple[str, int], ...] = ()


_COUNTS = tuple(
    field.name for field in msgspec.structs.fields(LoadStat) if field.name not in ("timestamp", "dispatched_watermarks")
)

encode_load_stat = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LoadStat).decode


def load_stat_from(load: LoadSnapshot, *, sequence: int, life: int) -> LoadStat:
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
        life,
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
