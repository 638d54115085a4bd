"""What the engine's processes say to each other: msgpack arrays over ZMQ PUSH/PULL on private ipc sockets.

Frontend to the leader of a replica: ``RankCommand``, which its intake relays to the followers as it is. Every rank to
the
front: ``RankReport``, and outputs on a socket of their own. Token ids of prompts travel packed, four bytes each,
little-endian.

Statistics are not sent: each rank writes them to its page of the engine's board (``open_shm_metrics_sink``), and the
front reads the board when somebody looks. ``LoadReport`` is what the front must be woken for, since it dispatches by it
and waits for the end of all work by it; and it carries the tickets, which a board of metrics leaves out.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Literal, TypeAlias, TypeVar

import msgspec

from scheduler_components import DecodeError, LoadSnapshot, OutputBatch, OutputStats, TierStats
from scheduler_components.control_requests import ControlReply, ControlRequest
from scheduler_components.reference.device.sampling import SamplingLimits, SamplingParams

__all__ = [
    "HEARTBEAT_INTERVAL_S",
    "FRONTEND_DISPATCHER",
    "AbortRequest",
    "BlockInput",
    "CacheDump",
    "RankCommand",
    "DrainInput",
    "RpcReply",
    "RpcRequest",
    "DumpCache",
    "SubmitControl",
    "ControlCompleted",
    "PoolMediumGroup",
    "PoolSnapshot",
    "RankHeartbeat",
    "RankStalled",
    "RankReady",
    "ReadPool",
    "RankReport",
    "RequestRefused",
    "LoadReport",
    "SubmitRequest",
    "UnblockInput",
    "decode_command",
    "decode_report",
    "encode",
    "pack_hashes",
    "pack_tokens",
    "unpack_hash_array",
    "unpack_hashes",
    "unpack_tokens",
    "MAX_QUEUED_BATCHES",
    "decode_outputs",
    "encode_outputs",
    "RpcMethod",
]

FRONTEND_DISPATCHER = "front"
"""The front's name as a dispatcher, in load reports. It lives as long as its ranks do."""


HEARTBEAT_INTERVAL_S = 0.5
"""A rank's pause between two ``RankHeartbeat``, and the front's tick: two small messages a second cost neither
anything.
"""


RpcMethod: TypeAlias = Literal["get_internal_state", "set_internal_state", "start_profile", "stop_profile"]


class SubmitRequest(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """A new request. ``input_ids`` is packed (``pack_tokens``); ``ticket`` is of the front's ``DispatchLedger``."""

    rid: str
    input_ids: bytes
    limits: SamplingLimits
    stream_interval: int
    ticket: int
    sampling: SamplingParams = SamplingParams()


class AbortRequest(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Nobody waits for this request any more; unknown ids are ignored, since it may just have finished."""

    rid: str


class DumpCache(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Every rank of the replica answers with a ``CacheDump`` taken at the same step."""

    dump_id: int


class ReadPool(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """The leader answers with a ``PoolSnapshot`` after the step; its followers have nothing to do."""

    read_id: int


class SubmitControl(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Every rank of the replica carries an order out, in the same step; the leader answers with
    ``ControlCompleted``.
    """

    order_id: int
    order: ControlRequest


class BlockInput(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """The replica lets no request in until ``UnblockInput``: they wait at its leader. Not answered."""


class RpcRequest(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """What a person asks (``RpcHandler.answer``); every rank of the replica answers before the step. ``body`` is
    JSON.
    """

    rpc_id: int
    method: RpcMethod
    body: bytes


class UnblockInput(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """The replica lets requests in again, those that wait first. Not answered."""


class DrainInput(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """The replica refuses requests until ``UnblockInput`` and serves those that it has. Not answered."""


RankCommand = (
    SubmitRequest
    | AbortRequest
    | DumpCache
    | ReadPool
    | SubmitControl
    | BlockInput
    | UnblockInput
    | DrainInput
    | RpcRequest
)


class RankReady(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """The rank has bound its sockets: where they are. ``stream_endpoint`` is None on a rank without an event stream."""

    rank: int
    stream_endpoint: str | None
    replay_endpoint: str | None = None
    load_endpoint: str | None = None


class RankHeartbeat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """The loop of ``rank`` (as ``ParallelState`` puts it), of this replica, runs; said every
    ``HEARTBEAT_INTERVAL_S``.
    """

    rank: str
    replica: int


class RankStalled(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """The step of a rank makes no progress: where it stands, in words. Said by its watchdog; ``alive`` ends it."""

    alive: RankHeartbeat
    place: str


class RequestRefused(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """This request is not served; ``reason`` is for its author. ``is_busy``: try again later."""

    rid: str
    reason: str
    is_busy: bool = False


class LoadReport(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """How loaded a replica is; the watermarks say which ``SubmitRequest`` it counts. ``outputs`` are its streamer's."""

    load: LoadSnapshot
    outputs: OutputStats = OutputStats()


class CacheDump(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Every block hash in one rank's cache at one step, by tier (packed, signed 64-bit).

    ``last_sequence`` is the number of the last batch that the rank published, -1 when it published none. ``tiers`` is
    None without a hierarchical cache.
    """

    dump_id: int
    rank: int
    step: int
    digest: int
    last_sequence: int
    block_hashes: bytes
    host_hashes: bytes = b""
    stored_hashes: bytes = b""
    tiers: TierStats | None = None


class PoolMediumGroup(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One medium and KV-cache group of a pool, and the hashes there (packed, signed 64-bit)."""

    medium: str
    group_idx: int | None
    hashes: bytes


class PoolSnapshot(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """What a replica's pool held after a step, and the number of the last batch that tells of it."""

    read_id: int
    replica: int
    sequence: int | None
    places: tuple[PoolMediumGroup, ...]


class RpcReply(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """A rank's answer: ``problem`` is why nothing was done, None where it was; ``body`` is JSON."""

    rpc_id: int
    rank: int
    problem: str | None
    body: bytes = b"null"


class ControlCompleted(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """How an order ended on a replica."""

    replica: int
    answer: ControlReply


RankReport = (
    RankReady
    | RankHeartbeat
    | RankStalled
    | RequestRefused
    | LoadReport
    | CacheDump
    | PoolSnapshot
    | RpcReply
    | ControlCompleted
)

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[RankCommand] = msgspec.msgpack.Decoder(RankCommand)
_reports: msgspec.msgpack.Decoder[RankReport] = msgspec.msgpack.Decoder(RankReport)


def encode(message: RankCommand | RankReport) -> bytes:
    """One message as one ZMQ frame."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> RankCommand:
    """Raises DecodeError for a frame that is not a command."""
    return _decode(_commands, frame)


def decode_report(frame: bytes) -> RankReport:
    """Raises DecodeError for a frame that is not a report."""
    return _decode(_reports, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a message of this engine: {error}") from error


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids, each 0 to 2**32 - 1, as four little-endian bytes each. Raises OverflowError beyond that range."""
    return _little_endian(array("I", token_ids)).tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Inverse of ``pack_tokens``. Raises DecodeError when ``packed`` is not whole tokens."""
    return tuple(_unpack("I", packed))


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Signed 64-bit block hashes as eight little-endian bytes each."""
    return _little_endian(array("q", hashes)).tobytes()


def unpack_hash_array(packed: bytes) -> array[int]:
    """Inverse of ``pack_hashes``, in order. Raises DecodeError when ``packed`` is not whole hashes."""
    return _unpack("q", packed)


def unpack_hashes(packed: bytes) -> frozenset[int]:
    """Inverse of ``pack_hashes``, as a set. Raises DecodeError when ``packed`` is not whole hashes."""
    return frozenset(_unpack("q", packed))


def _unpack(typecode: str, packed: bytes) -> array[int]:
    values = array(typecode)
    try:
        values.frombytes(packed)
    except ValueError as error:
        raise DecodeError(f"{len(packed)} bytes are not whole items of {values.itemsize}") from error
    return _little_endian(values)


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


MAX_QUEUED_BATCHES = 64
"""Outputs on each side of their socket; some hundred steps.

The queue is short: while the front is behind, tokens gather in the leader's ``OutputStreamer``, one delta per request
and not one per step, and the front has less to catch up with.
"""

encode_outputs = msgspec.msgpack.Encoder().encode
_decode_outputs = msgspec.msgpack.Decoder(OutputBatch).decode


def decode_outputs(frame: bytes) -> OutputBatch:
    """Raises DecodeError for a frame that is not a batch of outputs."""
    try:
        return _decode_outputs(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not outputs of this engine: {error}") from error
