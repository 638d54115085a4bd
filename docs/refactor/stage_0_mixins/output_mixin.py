"""Process the results of a batch and send the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from serving_parts.batching import Batch, release, share
from serving_parts.request import Output, finish_reason

from .ambient import get_settings

if TYPE_CHECKING:
    from .scheduler import Scheduler


class OutputMixin:
    """Uses ``cache``, ``rates`` and ``totals``; writes ``running``."""

    def init_output(self: Scheduler, send_output: Callable) -> None:
        self.send_output = send_output

    def process_batch_result(self: Scheduler, batch: Batch, tokens: Sequence[int]) -> None:
        num_generated = 0
        for work, token in zip(batch.works, tokens, strict=True):
            request = work.request
            request.num_computed_tokens += work.num_tokens
            share(self.cache, request)
            if request.num_uncomputed_tokens:
                continue
            request.token_ids.append(token)
            num_generated += 1
            reason = finish_reason(request, get_settings().eos_token_id)
            if reason is not None:
                release(self.cache, request)
                self.running = [each for each in self.running if each is not request]
            self.send_output(Output(request.rid, (token,), reason))
        self.totals.generation_tokens_total += num_generated
        self.rates.observe_decode(num_generated)
