"""BatchResultProcessor: apply the results of a batch to its requests, the prefix cache and the clients.

Each step the scheduler passes the tokens of one computed batch to `process`. The processor appends them, caches full
pages, ends finished requests and passes everything that changed to the `OutputStreamer`.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components.output_streamer import OutputStreamer, StreamedRequest
from scheduler_components.values import FinishReason

__all__ = [
    "BatchResultProcessor",
    "KvReleaser",
    "NullResultObserver",
    "ProcessedRequest",
    "RequestFinisher",
    "RequestResult",
    "ResultObserver",
    "StopConditions",
    "check_finished",
]

logger = logging.getLogger(__name__)

_PROCESSING = "processing a request's result"
_COMPUTING = "computing a batch"
_FINISHING = "finishing a request"
_FREEING = "freeing a request's pages"
_OBSERVING = "observing results"


class StopConditions(Protocol):
    """When a request ends: its sampling parameters. Read by `check_finished`."""

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def stop_token_ids(self) -> Container[int]: ...

    @property
    def ignore_eos(self) -> bool: ...


class ProcessedRequest(StreamedRequest, Protocol):
    """A request, as `BatchResultProcessor` sees it: the scheduler's own class.

    KV lags the tokens by one position: the last token has no KV until it has gone through the device.
    """

    num_computed_tokens: int
    """Positions whose KV is in the request's pages. The processor writes it."""

    @property
    def token_ids(self) -> MutableSequence[int]:
        """The prompt, followed by the output."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def limits(self) -> StopConditions: ...


R = TypeVar("R", bound=ProcessedRequest)
Request_contra = TypeVar("Request_contra", contravariant=True)


class KvReleaser(Protocol[Request_contra]):
    """Cache and free the KV pages of requests: `RequestKvCache` of the scheduler."""

    def cache_unfinished(self, request: Request_contra) -> None:
        """Insert the full pages, up to `num_computed_tokens`, into the prefix cache."""
        ...

    def free(self, request: Request_contra) -> None:
        """Free all pages. Computed ones may stay in the prefix cache."""
        ...


class RequestFinisher(Protocol[Request_contra]):
    """Remove ended requests from the queues: the scheduler itself."""

    def finish(self, request: Request_contra, reason: FinishReason) -> None:
        """Remove a waiting or running request, free its slot, and set its `finish_reason`."""
        ...


class ResultObserver(Protocol[Request_contra]):
    """Count what requests receive (totals, rates, latencies). It changes nothing."""

    def on_tokens(self, requests: Sequence[Request_contra], num_tokens: Sequence[int]) -> None:
        """Handle the new tokens of one step; a request has more than one where drafts were accepted.

        Called once per step with new tokens, before `on_finished` of the requests that these tokens ended.
        """
        ...

    def on_finished(self, request: Request_contra, reason: FinishReason) -> None:
        """Handle the end of a request; its `finish_reason` is set."""
        ...


class NullResultObserver:
    """The observer of a scheduler that counts nothing, neither its results nor its batches (``BatchObserver``)."""

    def on_admitted(self, request: object) -> None:
        pass

    def on_retracted(self, request: object) -> None:
        pass

    def on_tokens(self, requests: Sequence[object], num_tokens: Sequence[int]) -> None:
        pass

    def on_finished(self, request: object, reason: FinishReason) -> None:
        pass


class RequestResult(msgspec.Struct, Generic[R], frozen=True):
    """What the device computed for one request in one step.

    Attributes:
        request: at most one result per request and batch.
        start, end: positions whose KV the step has computed, drafts excluded. `start` equals the request's
            `num_computed_tokens`.
        token_ids: the tokens after position `end`: one, or several where drafts were accepted. Ignored for a chunk
            that ends inside the prompt, because the next token is known.
        is_prefill: False for a decode.
        error: why there is no result; empty if there is one.
    """

    request: R
    start: int
    end: int
    token_ids: tuple[int, ...] = ()
    is_prefill: bool = False
    error: str = ""


def check_finished(
    token: int, num_output_tokens: int, limits: StopConditions, eos_token_ids: Container[int]
) -> FinishReason | None:
    """Return why a request ends with `token`, or None if it continues. A stop token takes precedence over the length.

    Args:
        token: the newest token. A stop token is part of the output.
        num_output_tokens: generated so far, `token` included.
        limits: the request's stop conditions.
        eos_token_ids: the model's end-of-sequence tokens. `ignore_eos` disables them.
    """
    if token in limits.stop_token_ids or (token in eos_token_ids and not limits.ignore_eos):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output_tokens >= limits.max_new_tokens else None


@dataclass(slots=True, kw_only=True)
class BatchResultProcessor(Generic[R]):
    """Applies results: appends new tokens, caches computed KV, ends requests, streams the output.

    The scheduler calls `process` after each batch, `fail` if the device could not compute it, and `abort` between two
    steps. An exception about one request ends that request with `FinishReason.ERROR` and affects no other. It is
    counted in `failures` and logged once per episode. Positions of a failed step are not marked as computed, so its KV
    never enters the prefix cache.

    Attributes:
        kv: caches full pages after each prefill chunk and frees all pages of an ended request.
        requests: removes ended requests from the queues.
        output: streams the requests that changed, once per step.
        observer: counts totals, rates and latencies.
        eos_token_ids: the model's end-of-sequence tokens.
        failures: exceptions so far, by activity.
    """

    kv: KvReleaser[R]
    requests: RequestFinisher[R]
    output: OutputStreamer
    observer: ResultObserver[R] = field(default_factory=NullResultObserver)
    eos_token_ids: frozenset[int] = frozenset()
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _to_stream: list[R] = field(default_factory=list, init=False, repr=False)

    def process(self, results: Iterable[RequestResult[R]] = ()) -> list[R]:
        """Apply one computed batch and stream the output; return the requests that changed, aborted ones first.

        A result is ignored if its request has ended: it may be aborted while the device computes.
        """
        requests: list[R] = []
        num_tokens: list[int] = []
        finished: list[tuple[R, FinishReason]] = []
        is_computed = False
        for result in results:
            request = result.request
            if request.finish_reason is not None:
                continue
            try:
                num_accepted, reason = self._apply(result)
                is_computed = True
            except Exception as error:  # noqa: BLE001 - counted; a guard per result costs 5 us of a step of 64 results
                self.failures.failed(_PROCESSING, error)
                num_accepted, reason = 0, FinishReason.ERROR
            if num_accepted:
                requests.append(request)
                num_tokens.append(num_accepted)
            if reason is not None:
                self._finish(request, reason)
                finished.append((request, reason))
            if num_accepted or reason is not None:
                self._to_stream.append(request)
        if is_computed:
            self.failures.succeeded(_COMPUTING)
            self.failures.succeeded(_PROCESSING)
        self._observe(requests, num_tokens, finished)
        return self._stream()

    def fail(self, requests: Iterable[R], error: Exception) -> list[R]:
        """End and stream the requests of a batch that the device could not compute; return them."""
        for request in requests:
            if request.finish_reason is None:
                self.failures.failed(_COMPUTING, error)
                self._end(request, FinishReason.ERROR)
        return self._stream()

    def abort(self, request: R, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request early; the next `process` streams its end. Return False if it had ended.

        Its pages are free immediately. If the device may still be computing it, abort it after the step instead.

        Args:
            request: waits or runs.
            reason: why it ends; by default because it has no client any more.
        """
        if request.finish_reason is not None:
            return False
        self._end(request, reason)
        return True

    @property
    def has_pending_outputs(self) -> bool:
        """Whether ended requests wait for the next `process` to stream their ends."""
        return bool(self._to_stream)

    def _stream(self) -> list[R]:
        changed, self._to_stream = self._to_stream, []
        self.output.stream(changed)
        return changed

    def _apply(self, result: RequestResult[R]) -> tuple[int, FinishReason | None]:
        """Apply one result; return the number of accepted tokens, and why the request ends, or None."""
        request = result.request
        if result.error:
            raise RuntimeError(result.error)
        num_tokens = len(request.token_ids)
        if not result.start == request.num_computed_tokens < result.end <= num_tokens:
            raise ValueError(
                f"the result covers positions {result.start} to {result.end} of {request!r}, which has {num_tokens} "
                f"tokens and KV of {request.num_computed_tokens}: the request was retracted, or the result belongs to "
                "another request"
            )
        if result.end < num_tokens:
            request.num_computed_tokens = result.end
            self.kv.cache_unfinished(request)
            return 0, None
        num_accepted, reason = self._append(request, result.token_ids)
        # Accepted drafts have their KV already; the last token has none yet.
        request.num_computed_tokens = result.end + num_accepted - 1
        if result.is_prefill:
            self.kv.cache_unfinished(request)
        return num_accepted, reason

    def _append(self, request: R, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Append tokens up to the one that ends the request; discard the drafts accepted after it."""
        if not token_ids:
            raise ValueError(f"the result of {request!r} has no token")
        tokens = request.token_ids
        num_prompt_tokens = request.num_prompt_tokens
        for num_accepted, token in enumerate(token_ids, start=1):
            tokens.append(token)
            reason = check_finished(token, len(tokens) - num_prompt_tokens, request.limits, self.eos_token_ids)
            if reason is not None:
                return num_accepted, reason
        return len(token_ids), None

    def _end(self, request: R, reason: FinishReason) -> None:
        """End a request outside a computed batch."""
        self._finish(request, reason)
        self._observe_finished(request, reason)
        self._to_stream.append(request)

    def _finish(self, request: R, reason: FinishReason) -> None:
        """Remove a request and free its pages; a failure of one part does not prevent the other."""
        with self.failures.guard(_FINISHING):
            self.requests.finish(request, reason)
        with self.failures.guard(_FREEING):
            self.kv.free(request)

    def _observe(self, requests: list[R], num_tokens: list[int], finished: list[tuple[R, FinishReason]]) -> None:
        """Report a step to the observer with one call for all tokens, then one call per ended request."""
        if requests:
            with self.failures.guard(_OBSERVING):
                self.observer.on_tokens(requests, num_tokens)
        for request, reason in finished:
            self._observe_finished(request, reason)

    def _observe_finished(self, request: R, reason: FinishReason) -> None:
        with self.failures.guard(_OBSERVING):
            self.observer.on_finished(request, reason)
