"""Messages between the frontend and the rank processes: msgpack arrays over ZMQ PUSH/PULL on private ipc sockets.

The frontend sends ``RankCommand`` to the leader of a replica, whose request receiver relays it unchanged to the
followers. Every rank sends ``RankReport`` to the frontend. Leaders send outputs on a separate socket. The token ids of
prompts are packed as four little-endian bytes each.

Statistics are not sent. Each rank writes them to its page of a shared board (``open_shm_metrics_sink``), and the
frontend reads the board when a client asks for metrics. ``LoadReport`` is sent because the frontend dispatches by it
and must be woken when a replica becomes idle. It also carries the dispatch tickets, which the board does not hold.

This module holds values and their encoding only. The frontend imports it without loading a scheduler.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Literal, TypeAlias, TypeVar

import msgspec

from scheduler_components import DecodeError
from scheduler_components.values import (
    ControlReply,
    ControlRequest,
    LoadSnapshot,
    OutputBatch,
    RequestHints,
    RequestTimeouts,
    SessionParams,
    TierStats,
    TraceParent,
)
from scheduler_engine.device.sampling import SamplingLimits, SamplingParams

FRONTEND_DISPATCHER = "front"
"""Name of the frontend as a dispatcher, in load reports. The value is part of published load snapshots."""


HEARTBEAT_INTERVAL_S = 0.5
"""Seconds between two ``RankHeartbeat`` of a rank, and between two ticks of the frontend's monitor."""


RpcMethod: TypeAlias = Literal[
    "get_internal_state", "set_internal_state", "start_profile", "stop_profile", "open_session", "close_session"
]


class SubmitRequest(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Submit a request. ``input_ids`` is packed by ``pack_tokens``; the ``DispatchLedger`` issues ``ticket``.

    ``trace`` is the trace of the client, if it sent one.
    """

    rid: str
    input_ids: bytes
    limits: SamplingLimits
    stream_interval: int
    ticket: int
    sampling: SamplingParams = SamplingParams()
    trace: TraceParent | None = None
    hints: RequestHints = RequestHints()
    timeouts: RequestTimeouts = RequestTimeouts()
    session: SessionParams | None = None


class LoadAdapter(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Register an adapter and load it. The leader replies with ``ControlCompleted`` when all ranks have loaded it."""

    request_id: int
    name: str
    path: str
    pinned: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Refuse new requests for an adapter, and unload it when no request uses it.

    The leader replies with ``ControlCompleted`` before the step.
    """

    request_id: int
    name: str


class AbortRequest(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Abort a request. A rank ignores an unknown id, because the request may have finished in the meantime."""

    rid: str


class DumpCache(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Dump the cache. Every rank of the replica replies with a ``CacheDump`` of the same step."""

    dump_id: int


class ReadPool(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Read the pool. The leader replies with a ``PoolSnapshot`` after the step; followers ignore the command."""

    read_id: int


class SubmitControl(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Execute a control request: pause, continue, flush, update weights, release or resume memory.

    Every rank of the replica executes it in the same step. The leader replies with ``ControlCompleted``.
    """

    request_id: int
    request: ControlRequest


class BlockInput(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Hold new requests at the leader of the replica until ``UnblockInput``. No reply."""


class RpcRequest(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Read or change internal state, open or close a session, start or stop a profile (``RpcHandler.answer``).

    Every rank of the replica replies before the step. ``body`` is JSON.
    """

    rpc_id: int
    method: RpcMethod
    body: bytes


class OpenSession(msgspec.Struct, frozen=True, gc=False):
    """The body of an ``RpcRequest`` that opens a session: arguments of ``SessionTable.open``."""

    session_id: str
    capacity_tokens: int
    timeout_s: float | None = None
    is_streaming: bool = False


class CloseSession(msgspec.Struct, frozen=True, gc=False):
    """The body of an ``RpcRequest`` that closes a session."""

    session_id: str


class UnblockInput(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Admit requests again; held requests go first. No reply."""


class DrainInput(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Refuse new requests until ``UnblockInput`` and finish the admitted ones. No reply."""


RankCommand = (
    SubmitRequest
    | LoadAdapter
    | UnloadAdapter
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
    """Report the endpoints that a rank has bound. ``stream_endpoint`` is None on a rank without an event stream."""

    rank: int
    stream_endpoint: str | None
    replay_endpoint: str | None = None
    load_endpoint: str | None = None
    forward_pass_endpoint: str | None = None


class RankHeartbeat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Report every ``HEARTBEAT_INTERVAL_S`` that the loop of a rank runs. ``rank`` is ``str(ParallelState)``."""

    rank: str
    replica: int


class RankStalled(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Report that a step makes no progress, and where it is stuck. The watchdog thread sends it.

    The next heartbeat equal to ``alive`` ends the stall.
    """

    alive: RankHeartbeat
    place: str


class RequestRefused(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Refuse a request. ``reason`` is for the client; ``is_busy`` means that a later attempt may succeed."""

    rid: str
    reason: str
    is_busy: bool = False


class LoadReport(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Report the load of a replica.

    The watermarks in ``load`` tell the dispatcher which ``SubmitRequest`` the snapshot already counts.
    """

    load: LoadSnapshot


class CacheDump(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """All block hashes in the cache of one rank at one step, by tier, packed by ``pack_hashes``.

    ``last_sequence`` is the number of the last batch that the rank published, -1 if it has published none. ``tiers``
    is None without a hierarchical cache.
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
    """The hashes of one medium and KV-cache group of a pool, packed by ``pack_hashes``."""

    medium: str
    group_idx: int | None
    hashes: bytes


class PoolSnapshot(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """The content of a replica's pool after a step. ``sequence`` numbers the last event batch that describes it."""

    read_id: int
    replica: int
    sequence: int | None
    places: tuple[PoolMediumGroup, ...]


class RpcReply(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """A rank's reply to an ``RpcRequest``. ``problem`` is None on success; ``body`` is JSON."""

    rpc_id: int
    rank: int
    problem: str | None
    body: bytes = b"null"


class ControlCompleted(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """The result of a control request on one replica."""

    replica: int
    reply: ControlReply


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
_outputs: msgspec.msgpack.Decoder[OutputBatch] = msgspec.msgpack.Decoder(OutputBatch)


def encode(message: RankCommand | RankReport) -> bytes:
    """Encode one message as one ZMQ frame."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> RankCommand:
    """Decode a command. Raises DecodeError for any other frame."""
    return _decode(_commands, frame)


def decode_report(frame: bytes) -> RankReport:
    """Decode a report. Raises DecodeError for any other frame."""
    return _decode(_reports, frame)


encode_outputs = msgspec.msgpack.Encoder().encode


def decode_outputs(frame: bytes) -> OutputBatch:
    """Decode a batch of outputs. Raises DecodeError for any other frame."""
    return _decode(_outputs, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"the frame is not a message of this engine: {error}") from error


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as four little-endian bytes each. Raises OverflowError for an id outside 0 to 2**32 - 1."""
    return _little_endian(array("I", token_ids)).tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Unpack the result of ``pack_tokens``. Raises DecodeError if the length is no multiple of four."""
    return tuple(_unpack("I", packed))


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Pack signed 64-bit block hashes as eight little-endian bytes each."""
    return _little_endian(array("q", hashes)).tobytes()


def unpack_hash_array(packed: bytes) -> array[int]:
    """Unpack the result of ``pack_hashes``. Raises DecodeError if the length is no multiple of eight."""
    return _unpack("q", packed)


def unpack_hashes(packed: bytes) -> frozenset[int]:
    """Unpack the result of ``pack_hashes`` as a set. Raises DecodeError if the length is no multiple of eight."""
    return frozenset(_unpack("q", packed))


def _unpack(typecode: str, packed: bytes) -> array[int]:
    values = array(typecode)
    try:
        values.frombytes(packed)
    except ValueError as error:
        raise DecodeError(f"{len(packed)} bytes are not a multiple of {values.itemsize} bytes per item") from error
    return _little_endian(values)


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


MAX_QUEUED_BATCHES = 64
"""High-water mark of output batches on each side of their socket.

The queue is short on purpose. While the frontend is behind, the leader's ``OutputStreamer`` merges tokens into one
delta per request instead of one per step, so the frontend has fewer messages to process when it catches up.
"""
