"""Recorded traces in Mooncake's format: requests with arrivals, lengths, and prefixes that they share.

A line of a trace is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``. A hash
id identifies 512 prompt tokens; equal ids mean equal tokens, and the last block may be partial. Mooncake publishes such
traces with its FAST'25 release (``conversation_trace.jsonl`` and others). They do not contain the prompts, so the
tokens are derived from the hash ids. Prompts share prefixes exactly where the recorded prompts did.

A line may also have what a scheduling policy reads: ``tenant``, ``priority`` (a larger one runs first), and
``deadline_ms``, from the arrival to the first token. Mooncake's traces have none of them. Other fields are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import Annotated, BinaryIO

import attrs
import msgspec

from scheduler_components.errors import ConfigError
from scheduler_components.values import RequestHints

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens per hash id."""

ARRIVAL_QUANTUM_S = 3.0
"""Approximate rounding of recorded arrivals. Requests of one timestamp arrived within this time."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it before the first line
_MAX_LINE_BYTES = 1 << 20  # a prompt of ten million tokens; keeps a file without line breaks out of memory

_MAX_TIMESTAMP_MS = 366 * 24 * 3600 * 1000  # refuses milliseconds since 1970, for which a replay would wait for decades

_MAX_TENANT_CHARACTERS = 256  # a report has a row per tenant

_TOKEN_BYTES = 4
_CACHED_BLOCKS = 4096  # 8 MiB of tokens: the shared system prompts and the recent conversations
_TOKEN_MASK = int.from_bytes(
    b"\xff\x7f\x00\x00" * TRACE_BLOCK_TOKENS, "little"
)  # token ids below 32,768 fit any vocabulary

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Positive
    output_length: _Positive
    hash_ids: Annotated[tuple[_NotNegative, ...], msgspec.Meta(min_length=1)]
    tenant: Annotated[str, msgspec.Meta(max_length=_MAX_TENANT_CHARACTERS)] = ""
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    deadline_ms: Annotated[float, msgspec.Meta(gt=0, le=_MAX_TIMESTAMP_MS)] | None = None


@attrs.frozen(kw_only=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        index: number of the request in the trace, from 0.
        arrival_s: seconds after the start of the trace.
        input_length, output_length: tokens.
        hash_ids: one per block of ``TRACE_BLOCK_TOKENS`` prompt tokens; the last block may be partial.
        tenant, priority: as in ``RequestHints``.
        deadline_s: seconds from the arrival to the first token that the client accepts; None for no limit.
    """

    index: int
    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None

    @property
    def hints(self) -> RequestHints:
        """What a scheduling policy may read. The deadline is in seconds after the start of the trace."""
        deadline_s = None if self.deadline_s is None else self.arrival_s + self.deadline_s
        return RequestHints(priority=self.priority, tenant=self.tenant, deadline_s=deadline_s)

    @property
    def conversation(self) -> str:
        """An id shared by requests with a common second block. The first block is the system prompt."""
        return str(self.hash_ids[min(1, len(self.hash_ids) - 1)])


@attrs.frozen(kw_only=True)
class TraceSummary:
    """The size of a trace.

    Attributes:
        num_requests: requests in the trace.
        duration_s: seconds from the start to the last arrival.
    """

    num_requests: int
    duration_s: float


def check_trace(path: Path, *, limit: int | None = None) -> TraceSummary:
    """Check the lines of the first ``limit`` requests of a trace file. Keep one line in memory.

    Raises:
        ConfigError: the file cannot be read twice, has no requests, or has a wrong line; the error names the line.
    """
    _check_readable(path)
    num_requests, last_s = 0, 0.0
    with path.open("rb") as file:
        for request in islice(parse_trace(_lines(file), name=str(path)), limit):
            num_requests, last_s = num_requests + 1, request.arrival_s
    if not num_requests:
        raise ConfigError("trace", str(path), "has no requests", "give a file of Mooncake's JSON lines")
    return TraceSummary(num_requests=num_requests, duration_s=last_s)


def open_trace(path: Path, *, limit: int | None = None) -> Iterator[TraceRequest]:
    """Stream the first ``limit`` requests of a trace file with spread arrivals. Keep one timestamp in memory.

    Raises:
        ConfigError: the file cannot be read (immediately), or a line is wrong (while streaming; the error names it).
    """
    _check_readable(path)
    return _stream(path, limit)


def _check_readable(path: Path) -> None:
    hint = "give a readable file of Mooncake's JSON lines"
    try:
        if path.exists() and not path.is_dir() and not path.is_file():  # opening a pipe could block
            raise ConfigError("trace", str(path), "is not a regular file; it is read twice", hint)
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError("trace", str(path), error.strerror or str(error), hint) from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines. A line that is too long comes in pieces, and the parser refuses the first piece."""
    while line := file.readline(_MAX_LINE_BYTES + 1):
        yield line


def _stream(path: Path, limit: int | None) -> Iterator[TraceRequest]:
    with path.open("rb") as file:
        yield from spread_arrivals(islice(parse_trace(_lines(file), name=str(path)), limit))


def parse_trace(lines: Iterable[bytes], *, name: str = "trace") -> Iterator[TraceRequest]:
    """Parse and check each line. Skip blank lines and a byte order mark.

    Raises:
        ConfigError: a line is not a request, or its timestamp goes back; the error names the line.
    """
    decoder = msgspec.json.Decoder(_Line)
    index, latest_ms = 0, 0.0
    for number, text in enumerate(lines, start=1):
        if number == 1:
            text = text.removeprefix(_BYTE_ORDER_MARK)
        if not text.strip():
            continue
        if len(text) > _MAX_LINE_BYTES:
            raise _line_error(name, number, f"is longer than {_MAX_LINE_BYTES} bytes")
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _line_error(name, number, str(error)) from error
        blocks = -(-line.input_length // TRACE_BLOCK_TOKENS)
        if blocks != len(line.hash_ids):
            problem = f"input_length {line.input_length} needs {blocks} hash_ids, there are {len(line.hash_ids)}"
            raise _line_error(name, number, problem)
        if line.timestamp > _MAX_TIMESTAMP_MS:
            problem = f"timestamp {line.timestamp:g} is more than a year after the start of the trace, which is 0"
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
            tenant=line.tenant,
            priority=line.priority,
            deadline_s=None if line.deadline_ms is None else line.deadline_ms / 1000,
        )
        index += 1


def _line_error(name: str, number: int, problem: str) -> ConfigError:
    hint = "each line is a JSON object with timestamp (ms, ascending), input_length, output_length and hash_ids"
    return ConfigError("trace", f"{name}:{number}", problem, hint)


def spread_arrivals(
    requests: Iterable[TraceRequest], *, quantum_s: float = ARRIVAL_QUANTUM_S
) -> Iterator[TraceRequest]:
    """Spread the requests of one timestamp evenly over the following quantum, or up to the next timestamp.

    The order stays, and no request arrives before its timestamp. A trace without rounding does not change.
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
    """Return the prompt: ``input_length`` token ids below 32,768, four little-endian bytes each."""
    blocks = b"".join(_block_tokens(hash_id) for hash_id in request.hash_ids)
    return blocks[: request.input_length * _TOKEN_BYTES]


@lru_cache(maxsize=_CACHED_BLOCKS)
def _block_tokens(hash_id: int) -> bytes:
    size = TRACE_BLOCK_TOKENS * _TOKEN_BYTES
    random_bits = int.from_bytes(hashlib.shake_128(str(hash_id).encode()).digest(size), "little")
    return (random_bits & _TOKEN_MASK).to_bytes(size, "little")
