"""BatchResultProcessor: from a batch's tokens to requests, cache and clients."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from scheduler_components.failure_log import FailureLog
from scheduler_components.ports import (
    KvReleaser,
    NullResultObserver,
    OutputStream,
    ProcessedRequest,
    RequestFinisher,
    ResultObserver,
    StopConditions,
)
from scheduler_components.values import FinishReason

__all__ = [
    "check_finished",
    "BatchResultProcessor",
    "RequestResult",
]


def check_finished(
    token: int, num_output_tokens: int, limits: StopConditions, eos_token_ids: Container[int]
) -> FinishReason | None:
    """Return why a request is over once ``token`` is its last, or None while it goes on. A stop wins over the length.

    Args:
        token: the newest token; one that stops is part of the output.
        num_output_tokens: generated so far, ``token`` included.
        limits: the request's own.
        eos_token_ids: the model's end-of-sequence tokens, which ``ignore_eos`` makes tokens like others.
    """
    if token in limits.stop_token_ids or (token in eos_token_ids and not limits.ignore_eos):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output_tokens >= limits.max_new_tokens else None


logger = logging.getLogger(__name__)

_BOOKING = "booking a request's result"
_COMPUTING = "computing a batch"
_ENDING = "ending a request"
_RELEASING = "releasing a request's pages"
_OBSERVING = "observing results"

R = TypeVar("R", bound=ProcessedRequest)


class RequestResult(msgspec.Struct, Generic[R], frozen=True):
    """What the device made of one request in one step.

    Attributes:
        request: whose result it is; at most one per request and batch.
        start, end: positions whose KV the step has computed, drafts not counted. ``start`` is the request's
            ``num_computed_tokens`` at the time.
        token_ids: the tokens after position ``end``: one, or several where drafts were accepted. Not looked at for
            a chunk from within the prompt, after which the next token is known already.
        is_prefill: False for a decode.
        error: why there is no result; empty where there is one.
    """

    request: R
    start: int
    end: int
    token_ids: tuple[int, ...] = ()
    is_prefill: bool = False
    error: str = ""


@dataclass(slots=True)
class _StepNews(Generic[R]):
    """What the observer is told of one step: who got how many tokens, and who is over, why."""

    requests: list[R] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    ends: list[tuple[R, FinishReason]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class BatchResultProcessor(Generic[R]):
    """Books results: new tokens, KV that became usable, requests that ended.

    What goes wrong with one request's result ends that request with ``FinishReason.ERROR`` and touches no other. It
    is counted in ``failures`` and logged once per episode. Positions that a failed step was to compute are not
    marked as computed, so nothing of it gets into the prefix cache.

    Attributes:
        kv: full pages go to the prefix cache after each prefill chunk, all pages back at the end.
        requests: ended requests leave it.
        output: is told the news, once per step.
        observer: totals, rates, latencies.
        eos_token_ids: the model's end-of-sequence tokens.
        failures: what went wrong so far.
    """

    kv: KvReleaser[R]
    requests: RequestFinisher[R]
    output: OutputStream[R]
    observer: ResultObserver[R] = field(default_factory=NullResultObserver)
    eos_token_ids: frozenset[int] = frozenset()
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _untold: list[R] = field(default_factory=list, init=False, repr=False)

    def process(self, results: Iterable[RequestResult[R]] = ()) -> list[R]:
        """Book one computed batch and stream the news; returns the requests that have some, aborted ones first.

        A result of a request that has ended meanwhile is left out: an abort may come while the device computes.
        """
        step = _StepNews[R]()
        for result in results:
            request = result.request
            if request.finish_reason is not None:
                continue
            try:
                num_accepted, reason = self._book(result)
            except Exception as error:  # noqa: BLE001 - one request's trouble is not the batch's; counted and logged
                self.failures.failed(_BOOKING, error)
                num_accepted, reason = 0, FinishReason.ERROR
            else:
                self.failures.succeeded(_COMPUTING)
                self.failures.succeeded(_BOOKING)
            if num_accepted:
                step.requests.append(request)
                step.num_tokens.append(num_accepted)
            if reason is not None:
                self._take_out(request, reason)
                step.ends.append((request, reason))
            if num_accepted or reason is not None:
                self._untold.append(request)
        self._observe(step)
        return self._tell()

    def fail(self, requests: Iterable[R], error: Exception) -> list[R]:
        """End the requests of a batch that the device could not compute, and stream it; returns them."""
        for request in requests:
            if request.finish_reason is None:
                self.failures.failed(_COMPUTING, error)
                self._end(request, FinishReason.ERROR)
        return self._tell()

    def abort(self, request: R) -> bool:
        """End a request that nobody waits for any more; the next ``process`` tells of it. False if it had ended.

        Its pages are free at once. Where the device may still be computing it, abort it after the step instead.
        """
        if request.finish_reason is not None:
            return False
        self._end(request, FinishReason.ABORT)
        return True

    @property
    def has_pending_outputs(self) -> bool:
        """True when aborts wait for a ``process`` to tell of them."""
        return bool(self._untold)

    def _tell(self) -> list[R]:
        news, self._untold = self._untold, []
        self.output.stream(news)
        return news

    def _book(self, result: RequestResult[R]) -> tuple[int, FinishReason | None]:
        """Book one result; returns how many tokens the request got, and why it is over, or None."""
        request = result.request
        if result.error:
            raise _FailedResultError(result.error)
        num_tokens = len(request.token_ids)
        if not result.start == request.num_computed_tokens < result.end <= num_tokens:
            raise ValueError(
                f"positions {result.start} to {result.end} of {request!r}, which has {num_tokens} tokens and KV of "
                f"{request.num_computed_tokens}: it was retracted, or mixed up with another"
            )
        if result.end < num_tokens:
            request.num_computed_tokens = result.end
            self.kv.cache_unfinished(request)
            return 0, None
        num_accepted, reason = self._append(request, result.token_ids)
        # The drafts that became tokens have their KV; the last token has none yet.
        request.num_computed_tokens = result.end + num_accepted - 1
        if result.is_prefill:
            self.kv.cache_unfinished(request)
        return num_accepted, reason

    def _append(self, request: R, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Append tokens up to the one that ends the request; drafts accepted beyond it never were."""
        if not token_ids:
            raise ValueError(f"no token for {request!r}")
        tokens = request.token_ids
        num_prompt_tokens = request.num_prompt_tokens
        for place, token in enumerate(token_ids, start=1):
            tokens.append(token)
            reason = check_finished(token, len(tokens) - num_prompt_tokens, request.limits, self.eos_token_ids)
            if reason is not None:
                return place, reason
        return len(token_ids), None

    def _end(self, request: R, reason: FinishReason) -> None:
        """End a request outside of a batch that was computed."""
        self._take_out(request, reason)
        self._observe_end(request, reason)
        self._untold.append(request)

    def _take_out(self, request: R, reason: FinishReason) -> None:
        """Take a request out and its pages back; whatever fails in one part, the other is done."""
        try:
            self.requests.finish(request, reason)
        except Exception as error:  # noqa: BLE001 - its pages must come back all the same
            self.failures.failed(_ENDING, error)
        try:
            self.kv.free(request)
        except Exception as error:  # noqa: BLE001 - a broken cache says so in its own integrity check too
            self.failures.failed(_RELEASING, error)

    def _observe(self, step: _StepNews[R]) -> None:
        """Tell the observer of a whole step, ends last: one call for all tokens costs a fraction of one each."""
        if step.requests:
            try:
                self.observer.on_tokens(step.requests, step.num_tokens)
            except Exception as error:  # noqa: BLE001 - a broken counter must not fail a request
                self.failures.failed(_OBSERVING, error)
        for request, reason in step.ends:
            self._observe_end(request, reason)

    def _observe_end(self, request: R, reason: FinishReason) -> None:
        try:
            self.observer.on_finished(request, reason)
        except Exception as error:  # noqa: BLE001 - as above
            self.failures.failed(_OBSERVING, error)


class _FailedResultError(Exception):
    """The device said why it has no result for a request."""
