"""Reads request traces in Mooncake's format and turns them into requests.

A line is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``; each hash id
stands for 512 prompt tokens, equal ids for equal tokens, and the last block may be partial. Such traces are published
with Mooncake (``conversation_trace.jsonl`` and others of its FAST'25 release). The text of the prompts is not in
them: tokens are made from the hash ids, so that prompts share prefixes exactly where the recorded ones did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import Annotated

import attrs
import msgspec

from scheduler_components import ConfigError

__all__ = [
    "BLOCK_TOKENS",
    "QUANTUM_S",
    "TraceRequest",
    "open_trace",
    "parse_trace",
    "prompt_tokens",
    "spread_arrivals",
]

BLOCK_TOKENS = 512
"""Prompt tokens that one hash id stands for."""

QUANTUM_S = 3.0
"""Recorded arrivals are rounded to about this; requests of one timestamp arrived somewhere within it."""

_TOKEN_BYTES = 4
_KEPT_BLOCKS = 4096  # 8 MiB of tokens: the shared system prompts and the recent conversations
_TOKEN_MASK = int.from_bytes(b"\xff\x7f\x00\x00" * BLOCK_TOKENS, "little")  # token ids below 32,768 fit any vocabulary

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Positive
    output_length: _Positive
    hash_ids: Annotated[tuple[_NotNegative, ...], msgspec.Meta(min_length=1)]


@attrs.frozen(kw_only=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        index: its place in the trace, from 0.
        arrival_s: seconds after the trace's start.
        input_length, output_length: tokens.
        hash_ids: one a block of ``BLOCK_TOKENS`` prompt tokens, the last perhaps partial.
    """

    index: int
    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def conversation(self) -> str:
        """Equal for requests that share more than their first block, the system prompt."""
        return str(self.hash_ids[min(1, len(self.hash_ids) - 1)])


def open_trace(path: Path, *, limit: int | None = None) -> Iterator[TraceRequest]:
    """Stream the first ``limit`` requests of a trace file, arrivals spread; holds one quantum in memory.

    Raises:
        ConfigError: at once when the file cannot be read, and while streaming when a line is wrong (it is named).
    """
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("trace", str(path), reason, "give a readable file of Mooncake's JSON lines") from error
    return _stream(path, limit)


def _stream(path: Path, limit: int | None) -> Iterator[TraceRequest]:
    with path.open("rb") as lines:
        yield from islice(spread_arrivals(parse_trace(lines, name=str(path))), limit)


def parse_trace(lines: Iterable[bytes], *, name: str = "trace") -> Iterator[TraceRequest]:
    """Parse and check each line; blank lines are skipped.

    Raises:
        ConfigError: naming the line, for what is not such a request or goes back in time.
    """
    decoder = msgspec.json.Decoder(_Line)
    index, latest_ms = 0, 0.0
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _line_error(name, number, str(error)) from error
        blocks = -(-line.input_length // BLOCK_TOKENS)
        if blocks != len(line.hash_ids):
            problem = f"input_length {line.input_length} needs {blocks} hash_ids, there are {len(line.hash_ids)}"
            raise _line_error(name, number, problem)
        if line.timestamp < latest_ms:
            raise _line_error(name, number, f"timestamp {line.timestamp} is before the previous {latest_ms}")
        latest_ms = line.timestamp
        yield TraceRequest(
            index=index,
            arrival_s=line.timestamp / 1000,
            input_length=line.input_length,
            output_length=line.output_length,
            hash_ids=line.hash_ids,
        )
        index += 1


def _line_error(name: str, number: int, problem: str) -> ConfigError:
    hint = "each line is a JSON object with timestamp (ms, ascending), input_length, output_length and hash_ids"
    return ConfigError("trace", f"{name}:{number}", problem, hint)


def spread_arrivals(requests: Iterable[TraceRequest], *, quantum_s: float = QUANTUM_S) -> Iterator[TraceRequest]:
    """Spread requests of one timestamp evenly over the quantum that follows it, or up to the next timestamp.

    Order is kept and no request arrives before it was recorded. A trace without rounding passes unchanged.
    """
    groups = (list(group) for _, group in groupby(requests, key=_arrival_s))
    for group, following in pairwise(chain(groups, [[]])):
        gap_s = following[0].arrival_s - group[0].arrival_s if following else quantum_s
        yield from _spread(group, min(quantum_s, gap_s))


def _arrival_s(request: TraceRequest) -> float:
    return request.arrival_s


def _spread(group: list[TraceRequest], over_s: float) -> Iterator[TraceRequest]:
    for place, request in enumerate(group):
        yield attrs.evolve(request, arrival_s=request.arrival_s + over_s * place / len(group))


def prompt_tokens(request: TraceRequest) -> bytes:
    """The request's prompt: ``input_length`` token ids below 32,768, packed as four little-endian bytes each."""
    blocks = b"".join(_block_tokens(hash_id) for hash_id in request.hash_ids)
    return blocks[: request.input_length * _TOKEN_BYTES]


@lru_cache(maxsize=_KEPT_BLOCKS)
def _block_tokens(hash_id: int) -> bytes:
    size = BLOCK_TOKENS * _TOKEN_BYTES
    random_bits = int.from_bytes(hashlib.shake_128(str(hash_id).encode()).digest(size), "little")
    return (random_bits & _TOKEN_MASK).to_bytes(size, "little")
