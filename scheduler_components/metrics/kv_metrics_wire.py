"""KvMetrics on the wire: where they go, and one msgpack map of the field names a report."""

from __future__ import annotations

import math

import msgspec

from scheduler_components.errors import ConfigError, DecodeError
from scheduler_components.kv_events.endpoint import Endpoint
from scheduler_components.metrics.stats import KvMetrics

__all__ = ["MAX_KV_METRICS_BYTES", "decode_kv_metrics", "encode_kv_metrics", "parse_kv_metrics_endpoint"]

MAX_KV_METRICS_BYTES = 4096
"""Eight numbers with their names take some 250 bytes; the rest is room for fields of later versions."""

encode_kv_metrics = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KvMetrics).decode


def decode_kv_metrics(payload: bytes) -> KvMetrics:
    """Read one report. Unknown fields are skipped, missing ones are 0.

    Raises:
        DecodeError: the payload is not such a map, is too long, or holds a negative or not finite number.
    """
    if len(payload) > MAX_KV_METRICS_BYTES:
        raise DecodeError(f"KvMetrics of {len(payload)} bytes, at most {MAX_KV_METRICS_BYTES} are read")
    try:
        metrics = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not KvMetrics: {error}") from error
    for name in KvMetrics.__struct_fields__:
        value = getattr(metrics, name)
        if not 0 <= value < math.inf:
            raise DecodeError(f"KvMetrics.{name} is {value!r}, a count or a share is not")
    return metrics


def parse_kv_metrics_endpoint(endpoint: str, *, bind: bool) -> Endpoint:
    """Parse the address of the serving process, which is another process: it binds there, schedulers connect.

    Raises:
        ConfigError: it is no address, does not leave the process, or is a wildcard or port 0 to connect to.
    """
    address = Endpoint.parse(endpoint, field="metrics_endpoint")
    if address.transport == "inproc":
        raise ConfigError(
            "metrics_endpoint", endpoint, "does not leave the process", "give an ipc:// or tcp:// address"
        )
    address.decide_bind(bind, field="metrics_endpoint")
    return address
