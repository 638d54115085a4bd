"""The way of outputs from a replica's leader to the front: msgpack over a short PUSH/PULL queue of its own.

Short on both sides: while the front is behind, tokens gather in the leader's ``OutputStreamer``, one delta a request
and not one a step, and the front has less to catch up with.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import zmq

from scheduler_components.errors import DecodeError
from scheduler_components.output.delta import OutputBatch

__all__ = ["MAX_QUEUED_BATCHES", "OutputSocket", "decode_outputs", "encode_outputs"]

MAX_QUEUED_BATCHES = 64
"""On each side of the socket; some hundred steps with their outputs."""

encode_outputs = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(OutputBatch).decode


def decode_outputs(frame: bytes) -> OutputBatch:
    """Raises DecodeError for a frame that is no batch of outputs."""
    try:
        return _decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"no outputs of this engine: {error}") from error


@dataclass(slots=True, kw_only=True)
class OutputSocket:
    """An ``OutputSink`` over a connected PUSH socket with a high-water mark."""

    socket: zmq.Socket[bytes]

    def is_ready(self) -> bool:
        return bool(self.socket.poll(0, zmq.POLLOUT))

    def send(self, batch: OutputBatch) -> bool:
        try:
            self.socket.send(encode_outputs(batch), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close(linger=0)
