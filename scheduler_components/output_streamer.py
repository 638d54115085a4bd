"""OutputStreamer: what to send of each request, and when; and the ends of requests that wait for a slow receiver."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from scheduler_components.failure_log import FailureLog
from scheduler_components.ports import OutputSink, StreamedRequest
from scheduler_components.validators import check_integer
from scheduler_components.values import OutputBatch, OutputDelta, OutputStats, TokenOutput

__all__ = [
    "FinalDeltaBuffer",
    "OutputStreamer",
]

# Last news of requests that are over, kept until the receiver takes them: bounded, and counted where it overflows.

_BYTES_A_TOKEN = 36
"""A pointer in a tuple and a small int behind it."""

_BYTES_A_LOGPROB = 32
_BYTES_A_TOP_LOGPROB = 120  # a pair, its token and its number


class FinalDeltaBuffer:
    """Holds the last delta of ended requests, oldest first.

    Beyond ``max_bytes`` the oldest lose their tokens, with logprobs and hidden states, and keep their end: their
    clients learn that it is over and that tokens are missing. Beyond ``max_ends`` the oldest are dropped whole.

    Args:
        max_ends: requests; the default is some seconds of a busy scheduler.
        max_bytes: what their tokens may take.

    Attributes:
        num_bytes: held now.
        ends_dropped, tokens_dropped: lost so far.

    Raises:
        ConfigError: a bound below 1.
    """

    __slots__ = ("num_bytes", "ends_dropped", "tokens_dropped", "_bare", "_full", "_max_bytes", "_max_ends")

    def __init__(self, *, max_ends: int = 16_384, max_bytes: int = 64 * 1024 * 1024) -> None:
        check_integer("max_ends", max_ends)
        check_integer("max_bytes", max_bytes)
        self._max_ends = max_ends
        self._max_bytes = max_bytes
        self.num_bytes = self.ends_dropped = self.tokens_dropped = 0
        # Tokens are taken from the oldest first, so all that have lost theirs are older than all that have not.
        self._bare: deque[OutputDelta] = deque()
        self._full: deque[OutputDelta] = deque()

    def __len__(self) -> int:
        return len(self._bare) + len(self._full)

    @property
    def deltas(self) -> tuple[OutputDelta, ...]:
        """What is held, oldest first."""
        return (*self._bare, *self._full)

    def add(self, delta: OutputDelta) -> None:
        """Take one request's last news in."""
        self._full.append(delta)
        self.num_bytes += _size_bytes(delta.output)
        while self.num_bytes > self._max_bytes:
            self._take_tokens_of_oldest()
        if len(self) > self._max_ends:
            self._drop_oldest()

    def _take_tokens_of_oldest(self) -> None:
        delta = self._full.popleft()
        self._lose_tokens(delta)
        output = msgspec.structs.replace(
            delta.output, token_ids=(), logprobs=None, hidden_states=None, top_logprobs=None
        )
        self._bare.append(msgspec.structs.replace(delta, output=output))

    def _drop_oldest(self) -> None:
        self._lose_tokens((self._bare or self._full).popleft())
        self.ends_dropped += 1

    def _lose_tokens(self, delta: OutputDelta) -> None:
        self.tokens_dropped += len(delta.output.token_ids)
        self.num_bytes -= _size_bytes(delta.output)

    def clear(self) -> None:
        """Forget what is held: the receiver has it."""
        self._bare.clear()
        self._full.clear()
        self.num_bytes = 0

    def drop_all(self) -> None:
        """Give up what is held: there will be no receiver."""
        while self:
            self._drop_oldest()


def _size_bytes(output: TokenOutput) -> int:
    return (
        len(output.token_ids) * _BYTES_A_TOKEN
        + len(output.logprobs or ()) * _BYTES_A_LOGPROB
        + sum(map(len, output.hidden_states or ()))
        + sum(map(len, output.top_logprobs or ())) * _BYTES_A_TOP_LOGPROB
    )


logger = logging.getLogger(__name__)

_READING = "reading a request's output"
_SENDING = "sending outputs"
_CLOSING = "closing the output stream"


@dataclass(slots=True, kw_only=True)
class OutputStreamer:
    """Puts the news of a step's requests into one message, or keeps them while the receiver is behind.

    A request's first token goes out at once, then as many at a time as its ``stream_interval`` says, and the rest
    with its end. Which tokens were sent is remembered by their place in the output, so a request that is retracted
    and computed again neither repeats nor loses one.

    A receiver that is behind never blocks a step. What is due of requests in flight stays with the requests and goes
    out later in one piece; ends are held, bounded by ``held``. Nothing raises into the step: a failing sink counts
    as one that is not ready, in ``failures``. It gets the same message again; ``OutputDelta.start`` tells a receiver
    that has it already.

    Attributes:
        sink: the way to the receiver.
        held: ends that wait, and the bounds on them.
        failures: what went wrong so far.
    """

    sink: OutputSink
    held: FinalDeltaBuffer = field(default_factory=FinalDeltaBuffer)
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _num_sent: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _due: dict[str, StreamedRequest] = field(default_factory=dict, init=False, repr=False)
    _counts: OutputStats = field(default_factory=OutputStats, init=False, repr=False)

    def stream(self, requests: Iterable[StreamedRequest]) -> None:
        """Take in a step's news: requests with new tokens, and each ended request once. Call it once per step.

        Nothing is sent when nothing is due. An ended request is read here and not kept; its id may be used again.
        """
        for request in requests:
            rid = request.rid
            if request.finish_reason is not None:
                self.held.add(self._read(request) or self._bare_end(request))
                self._num_sent.pop(rid, None)
                self._due.pop(rid, None)
            elif self._is_due(request):
                self._due[rid] = request
        if not self._deliver():
            self._counts = msgspec.structs.replace(self._counts, steps_delayed=self._counts.steps_delayed + 1)

    def flush(self) -> None:
        """Try again to deliver what waits. Call it where no step comes; ``has_backlog`` says whether to."""
        self._deliver()

    @property
    def has_backlog(self) -> bool:
        """True while something is due that the receiver has not taken."""
        return bool(self._due or len(self.held))

    def _is_due(self, request: StreamedRequest) -> bool:
        interval = request.stream_interval
        if interval < 1:
            return False
        num_sent = self._num_sent.get(request.rid, 0)
        num_new = request.num_output_tokens - num_sent
        return num_new >= interval or (num_sent == 0 and num_new > 0)

    def _read(self, request: StreamedRequest) -> OutputDelta | None:
        """Make a request's news; None when its output cannot be read, which costs its news and not the step."""
        start = self._num_sent.get(request.rid, 0)
        try:
            output = request.output_since(start)
        except Exception as error:  # noqa: BLE001 - counted and logged; in flight, the next token tries again
            self.failures.failed(_READING, error)
            return None
        self.failures.succeeded(_READING)
        return OutputDelta(request.rid, start, request.num_output_tokens, request.finish_reason, output)

    def _bare_end(self, request: StreamedRequest) -> OutputDelta:
        """The end of a request without its last tokens: its client must not wait forever."""
        start = self._num_sent.get(request.rid, 0)
        return OutputDelta(request.rid, start, request.num_output_tokens, request.finish_reason, TokenOutput())

    def _deliver(self) -> bool:
        """Send what waits; False when something does and the receiver did not take it."""
        if not self.has_backlog:
            return True
        try:
            batch = self._next_batch() if self.sink.is_ready() else None
            is_taken = batch is not None and self.sink.send(batch)
        except Exception as error:  # noqa: BLE001 - a lost receiver must not take the engine down
            self.failures.failed(_SENDING, error)
            is_taken, batch = False, None
        else:
            self.failures.succeeded(_SENDING)
        if not is_taken or batch is None:
            return False
        self._note_taken(batch)
        return True

    def _next_batch(self) -> OutputBatch:
        in_flight = (self._read(request) for request in self._due.values())
        deltas = (*self.held.deltas, *(delta for delta in in_flight if delta is not None))
        return OutputBatch(self._counts.batches_sent, deltas)

    def _note_taken(self, batch: OutputBatch) -> None:
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
        """Return the counters of this moment."""
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
        """Deliver what the receiver takes now, count the rest as dropped, close the sink. Safe to call twice."""
        self._deliver()
        self.held.drop_all()
        self._due.clear()
        try:
            self.sink.close()
        except Exception as error:  # noqa: BLE001 - a scheduler that ends has other things to close
            self.failures.failed(_CLOSING, error)
