"""Encode and decode forward-pass metrics, and derive the address of each replica's messages.

A message is the msgpack map of a ``ForwardPassMetrics``, byte for byte that of SGLang 0.5.23 and of Dynamo 1.6.1.
"""

from __future__ import annotations

import math

import attrs
import msgspec

from scheduler_components.errors import DecodeError
from scheduler_components.kv_events import Endpoint
from scheduler_components.values import (
    FORWARD_PASS_VERSION,
    ForwardPassMetrics,
    QueuedRequestMetrics,
    ScheduledRequestMetrics,
)

__all__ = [
    "MAX_FORWARD_PASS_BYTES",
    "decode_forward_pass",
    "encode_forward_pass",
    "forward_pass_endpoint",
    "parse_forward_pass_endpoint",
]

MAX_FORWARD_PASS_BYTES = 4096
"""A message has about 450 bytes; the rest is reserved for a long ``worker_id`` and for fields of later versions."""

encode_forward_pass = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ForwardPassMetrics).decode


def decode_forward_pass(payload: bytes) -> ForwardPassMetrics:
    """Decode one message. Unknown fields are skipped, missing ones are 0.

    Raises:
        DecodeError: the payload is not such a map, is too long, has another version, or has a negative or infinite
            number.
    """
    if len(payload) > MAX_FORWARD_PASS_BYTES:
        raise DecodeError(f"ForwardPassMetrics of {len(payload)} bytes, at most {MAX_FORWARD_PASS_BYTES} are read")
    try:
        metrics = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not ForwardPassMetrics: {error}") from error
    if metrics.version != FORWARD_PASS_VERSION:
        raise DecodeError(f"ForwardPassMetrics of version {metrics.version}, this reader knows {FORWARD_PASS_VERSION}")
    for part in (metrics, metrics.scheduled_requests, metrics.queued_requests):
        _check_numbers(part)
    return metrics


def _check_numbers(part: ForwardPassMetrics | ScheduledRequestMetrics | QueuedRequestMetrics) -> None:
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise DecodeError(f"{type(part).__name__}.{name} is {value!r}, a count or a duration is not")


def parse_forward_pass_endpoint(text: str, *, num_ranks: int = 1) -> Endpoint:
    """Parse the base address of an engine's forward-pass metrics.

    Raises:
        ConfigError: it is not an address, does not leave the process, or is too high for ``num_ranks`` ranks.
    """
    base = Endpoint.parse(text, field="forward_pass_endpoint")
    base.check_leaves_process(field="forward_pass_endpoint")
    forward_pass_endpoint(base, num_ranks - 1)
    return base


def forward_pass_endpoint(base: Endpoint, rank: int) -> Endpoint:
    """Return the address of one replica, as Dynamo's relays derive it: port + rank for tcp, ``path.rank`` for ipc.

    Raises:
        ConfigError: the port or the path becomes invalid.
    """
    if base.transport == "tcp":
        return base.offset(rank, field="forward_pass_endpoint")
    return attrs.evolve(base, path=f"{base.path}.{rank}")
