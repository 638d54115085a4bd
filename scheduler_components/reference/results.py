"""ResultProcessor: from the device's tokens to requests, cache and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_components.metrics.rolling import RateMeter
from scheduler_components.reference.batch import RequestOutput, ScheduledBatch, ScheduledWork
from scheduler_components.reference.queues import RequestQueues
from scheduler_components.reference.request import FinishReason, Request
from scheduler_components.reference.request_pages import RequestPages
from scheduler_components.reference.totals import RunningTotals

__all__ = ["ResultProcessor", "finish_reason"]


def finish_reason(request: Request, eos_token_id: int | None) -> FinishReason | None:
    """Return why the request is done after its last token, or None while it goes on. A stop wins over the length."""
    token = request.token_ids[-1]
    limits = request.limits
    if token in limits.stop_token_ids or (token == eos_token_id and not limits.ignore_eos):
        return FinishReason.STOP
    if request.num_output_tokens_left <= 0:
        return FinishReason.LENGTH
    return None


@dataclass(slots=True, kw_only=True)
class ResultProcessor:
    """Books what a batch has computed: new tokens, pages that became usable, requests that ended.

    Attributes:
        queues: finished requests leave them.
        pages: full pages go to the cache after each chunk and at the end.
        totals, rates: generated tokens and aborts are counted here.
        eos_token_id: the model's end-of-sequence token, if it has one.
    """

    queues: RequestQueues
    pages: RequestPages
    totals: RunningTotals
    rates: RateMeter
    eos_token_id: int | None = None

    def process(self, batch: ScheduledBatch, next_tokens: Sequence[int]) -> list[RequestOutput]:
        """Book one computed batch; return the news of its requests.

        Raises:
            ValueError: the device did not give one token for each work; nothing has been booked then.
        """
        if len(next_tokens) != len(batch.works):
            raise ValueError(f"the device gave {len(next_tokens)} tokens for {len(batch.works)} works")
        outputs = []
        for work, token in zip(batch.works, next_tokens, strict=True):
            output = self._book(work, token)
            if output is not None:
                outputs.append(output)
        self.totals.generation_tokens += len(outputs)
        self.rates.observe_decode(len(outputs))
        return outputs

    def abort(self, request: Request) -> RequestOutput:
        """End a request between two steps, wherever it stands, and take back what it holds."""
        self.totals.num_aborted_requests += 1
        return self._finish(request, FinishReason.ABORT, ())

    def _book(self, work: ScheduledWork, token: int) -> RequestOutput | None:
        request = work.request
        request.num_computed_tokens = work.end
        if work.is_prefill:
            self.pages.share(request)
        if request.num_uncomputed_tokens:
            return None  # a chunk from within the prompt: the token after it is known already
        request.token_ids.append(token)
        reason = finish_reason(request, self.eos_token_id)
        if reason is not None:
            return self._finish(request, reason, (token,))
        return _output(request, (token,))

    def _finish(self, request: Request, reason: FinishReason, token_ids: tuple[int, ...]) -> RequestOutput:
        self.queues.finish(request, reason)
        self.pages.release(request)
        return _output(request, token_ids)


def _output(request: Request, token_ids: tuple[int, ...]) -> RequestOutput:
    return RequestOutput(
        rid=request.rid,
        token_ids=token_ids,
        finish_reason=request.finish_reason,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=request.num_cached_prompt_tokens,
        num_retractions=request.num_retractions,
    )
