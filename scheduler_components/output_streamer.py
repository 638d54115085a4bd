"""OutputStreamer: send the new output of requests to their receiver, and buffer it while the receiver is slow."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.validators import check_integer
from scheduler_components.ports import OutputSink
from scheduler_components.values import OutputBatch, OutputDelta, OutputStats, TokenOutput

__all__ = ["FinalDeltaBuffer", "OutputStreamer", "StreamedRequest"]

logger = logging.getLogger(__name__)

_READING = "reading a request's output"
_SENDING = "sending outputs"
_CLOSING = "closing the output stream"

_BYTES_PER_TOKEN = 36
"""A pointer in a tuple and a small int."""

_BYTES_PER_LOGPROB = 32
_BYTES_PER_TOP_LOGPROB = 120
"""A pair, its token and its number."""


class StreamedRequest(Protocol):
    """A request, as `OutputStreamer` sees it: the scheduler's own class. A retraction keeps its output."""

    @property
    def rid(self) -> str:
        """Id, unique among the requests whose end has not been streamed."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """None until the request ends."""
        ...

    @property
    def stream_interval(self) -> int:
        """Tokens per message of this request; 0 to send everything at its end."""
        ...

    @property
    def num_output_tokens(self) -> int: ...

    def output_since(self, start: int) -> TokenOutput:
        """Return the output from token `start` on, with the data that belongs to these tokens."""
        ...


class FinalDeltaBuffer:
    """Holds the last delta of ended requests, oldest first, until the receiver accepts them.

    Beyond `max_bytes` the oldest deltas lose their tokens, logprobs and hidden states, and keep their end: the clients
    learn that the request ended and that tokens are missing. Beyond `max_ends` the oldest deltas are dropped.

    Args:
        max_ends: number of deltas; the default covers some seconds of a busy scheduler.
        max_bytes: size of their tokens.

    Attributes:
        num_bytes: size of the held tokens.
        ends_dropped, tokens_dropped: counters of lost deltas and tokens.

    Raises:
        ConfigError: a bound is below 1.
    """

    __slots__ = (
        "_max_bytes",
        "_max_ends",
        "_with_tokens",
        "_without_tokens",
        "ends_dropped",
        "num_bytes",
        "tokens_dropped",
    )

    def __init__(self, *, max_ends: int = 16_384, max_bytes: int = 64 * 1024 * 1024) -> None:
        check_integer("max_ends", max_ends)
        check_integer("max_bytes", max_bytes)
        self._max_ends = max_ends
        self._max_bytes = max_bytes
        self.num_bytes = self.ends_dropped = self.tokens_dropped = 0
        # The oldest lose their tokens first, so every delta without tokens is older than every delta with tokens.
        self._without_tokens: deque[OutputDelta] = deque()
        self._with_tokens: deque[OutputDelta] = deque()

    def __len__(self) -> int:
        return len(self._without_tokens) + len(self._with_tokens)

    @property
    def deltas(self) -> tuple[OutputDelta, ...]:
        """The held deltas, oldest first."""
        return (*self._without_tokens, *self._with_tokens)

    def add(self, delta: OutputDelta) -> None:
        """Hold one more delta; shed the oldest if a bound is exceeded."""
        self._with_tokens.append(delta)
        self.num_bytes += _size_bytes(delta.output)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest_tokens()
        if len(self) > self._max_ends:
            self._drop_oldest()

    def _drop_oldest_tokens(self) -> None:
        delta = self._with_tokens.popleft()
        self._count_lost_tokens(delta)
        output = msgspec.structs.replace(
            delta.output, token_ids=(), logprobs=None, hidden_states=None, top_logprobs=None
        )
        self._without_tokens.append(msgspec.structs.replace(delta, output=output))

    def _drop_oldest(self) -> None:
        self._count_lost_tokens((self._without_tokens or self._with_tokens).popleft())
        self.ends_dropped += 1

    def _count_lost_tokens(self, delta: OutputDelta) -> None:
        self.tokens_dropped += len(delta.output.token_ids)
        self.num_bytes -= _size_bytes(delta.output)

    def clear(self) -> None:
        """Forget all deltas because the receiver has accepted them."""
        self._without_tokens.clear()
        self._with_tokens.clear()
        self.num_bytes = 0

    def drop_all(self) -> None:
        """Drop and count all deltas because there is no receiver any more."""
        while self:
            self._drop_oldest()


def _size_bytes(output: TokenOutput) -> int:
    return (
        len(output.token_ids) * _BYTES_PER_TOKEN
        + len(output.logprobs or ()) * _BYTES_PER_LOGPROB
        + sum(map(len, output.hidden_states or ()))
        + sum(map(len, output.top_logprobs or ())) * _BYTES_PER_TOP_LOGPROB
    )


@dataclass(slots=True, kw_only=True)
class OutputStreamer:
    """Sends the new output of a step's requests in one message, or keeps it while the receiver is slow.

    `BatchResultProcessor` calls `stream` once per step; an idle scheduler calls `flush` while `has_backlog` is true.

    The first token of a request is sent immediately, later ones `stream_interval` at a time, and the remainder with its
    end. The streamer remembers the number of sent tokens, so a request that is retracted and computed again neither
    repeats nor loses a token.

    A slow receiver never blocks a step. Unsent output of running requests stays with the requests and is sent later in
    one piece. The last deltas of ended requests are held in `held`, which is bounded. No exception reaches the step: a
    sink that fails counts as not ready, and `failures` counts it. It receives the same message again, and
    `OutputDelta.start` lets a receiver recognize the repetition.

    Attributes:
        sink: the path to the receiver.
        held: last deltas of ended requests that wait for the receiver, and their bounds.
        failures: exceptions so far, by activity.
    """

    sink: OutputSink
    held: FinalDeltaBuffer = field(default_factory=FinalDeltaBuffer)
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _num_sent: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _due: dict[str, StreamedRequest] = field(default_factory=dict, init=False, repr=False)
    _counts: OutputStats = field(default_factory=OutputStats, init=False, repr=False)

    def stream(self, requests: Iterable[StreamedRequest]) -> None:
        """Send the new output of these requests: those with new tokens, and each ended request exactly once.

        Nothing is sent if nothing is due. An ended request is read here and not kept, so its id may be used again.
        """
        for request in requests:
            rid = request.rid
            if request.finish_reason is not None:
                self.held.add(self._read(request, request.finish_reason) or self._end_without_tokens(request))
                self._num_sent.pop(rid, None)
                self._due.pop(rid, None)
            elif self._is_due(request):
                self._due[rid] = request
        if not self._deliver():
            self._counts = msgspec.structs.replace(self._counts, steps_delayed=self._counts.steps_delayed + 1)

    def flush(self) -> None:
        """Try again to send the backlog. Call it while no step runs and `has_backlog` is true."""
        self._deliver()

    @property
    def has_backlog(self) -> bool:
        """Whether the receiver has not yet accepted some output that is due."""
        return bool(self._due or len(self.held))

    def _is_due(self, request: StreamedRequest) -> bool:
        interval = request.stream_interval
        if interval < 1:
            return False
        num_sent = self._num_sent.get(request.rid, 0)
        num_new = request.num_output_tokens - num_sent
        return num_new >= interval or (num_sent == 0 and num_new > 0)

    def _read(self, request: StreamedRequest, finish_reason: str | None) -> OutputDelta | None:
        """Build the delta of a request; None if its output cannot be read. The next token of a running one retries."""
        start = self._num_sent.get(request.rid, 0)
        try:
            output = request.output_since(start)
        except Exception as error:  # noqa: BLE001 - counted; a guard per request costs 5 us of a step of 64 requests
            self.failures.failed(_READING, error)
            return None
        return OutputDelta(request.rid, start, request.num_output_tokens, finish_reason, output)

    def _end_without_tokens(self, request: StreamedRequest) -> OutputDelta:
        """Build an end without the last tokens, so that the client does not wait forever."""
        start = self._num_sent.get(request.rid, 0)
        return OutputDelta(request.rid, start, request.num_output_tokens, request.finish_reason, TokenOutput())

    def _deliver(self) -> bool:
        """Send the backlog; return False if the receiver did not accept it."""
        if not self.has_backlog:
            return True
        with self.failures.guard(_SENDING):
            if self.sink.is_ready():
                batch = self._next_batch()
                if self.sink.send(batch):
                    self._record_sent(batch)
                    return True
        return False

    def _next_batch(self) -> OutputBatch:
        # A request of `_due` may have ended since. Its end belongs to the `stream` call that brings it.
        running = [self._read(request, None) for request in self._due.values()]
        if None not in running:
            self.failures.succeeded(_READING)  # once per pass, or one bad request would log twice per step
        deltas = (*self.held.deltas, *(delta for delta in running if delta is not None))
        return OutputBatch(self._counts.batches_sent, deltas)

    def _record_sent(self, batch: OutputBatch) -> None:
        num_tokens = 0
        for delta in batch.deltas:
            num_tokens += len(delta.output.token_ids)
            if delta.finish_reason is None:
                self._num_sent[delta.rid] = delta.start + len(delta.output.token_ids)
        self._due.clear()
        self.held.clear()
        counts = self._counts
        self._counts = msgspec.structs.replace(
            counts,
            batches_sent=counts.batches_sent + 1,
            deltas_sent=counts.deltas_sent + len(batch.deltas),
            tokens_sent=counts.tokens_sent + num_tokens,
        )

    def stats(self) -> OutputStats:
        held = self.held
        return msgspec.structs.replace(
            self._counts,
            requests_waiting=len(self._due),
            ends_held=len(held),
            bytes_held=held.num_bytes,
            ends_dropped=held.ends_dropped,
            tokens_dropped=held.tokens_dropped,
        )

    def close(self) -> None:
        """Send what the receiver accepts now, drop and count the remainder, and close the sink. Safe to call twice."""
        self._deliver()
        self.held.drop_all()
        self._due.clear()
        with self.failures.guard(_CLOSING):
            self.sink.close()
