"""Results of a batch, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler_components.cache.radix_cache import RadixCache
from scheduler_components.metrics.rolling import RateMeter
from serving_parts.batching import Batch, release, share
from serving_parts.request import Output, Request, Totals, finish_reason


@dataclass(slots=True, kw_only=True)
class Results:
    """Books what a batch has computed."""

    cache: RadixCache
    totals: Totals
    rates: RateMeter
    eos_token_id: int
    send_output: Callable


class OutputMixin:
    """Needs nothing of its host any more, and writes nothing of it: it returns who goes on running."""

    @staticmethod
    def process_batch_result(self: Results, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        num_generated = 0
        going_on = []
        for work, token in zip(batch.works, tokens, strict=True):
            request = work.request
            request.num_computed_tokens += work.num_tokens
            share(self.cache, request)
            if request.num_uncomputed_tokens:
                going_on.append(request)
                continue
            request.token_ids.append(token)
            num_generated += 1
            reason = finish_reason(request, self.eos_token_id)
            if reason is None:
                going_on.append(request)
            else:
                release(self.cache, request)
            self.send_output(Output(request.rid, (token,), reason))
        self.totals.generation_tokens += num_generated
        self.rates.observe_decode(num_generated)
        return going_on
