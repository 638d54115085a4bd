"""Process the results of a batch and send the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_components import RadixCache
from scheduler_components.metrics import RateMeter
from scheduler_components.values import SchedulerCounters
from serving_parts.batching import Batch, release, share
from serving_parts.request import Output, Request, finish_reason


class OutputSink(Protocol):
    """Receives the outputs of requests. This port is the scheduler's own, because its outputs are."""

    def send(self, output: Output) -> None: ...


@dataclass(slots=True, kw_only=True)
class Results:
    """Processes the results of a batch."""

    cache: RadixCache
    totals: SchedulerCounters
    rates: RateMeter
    eos_token_id: int
    outputs: OutputSink

    def process_batch_result(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        num_generated = 0
        running = batch.running
        for work, token in zip(batch.works, tokens, strict=True):
            request = work.request
            request.num_computed_tokens += work.num_tokens
            share(self.cache, request)
            if request.num_uncomputed_tokens:
                continue
            request.token_ids.append(token)
            num_generated += 1
            reason = finish_reason(request, self.eos_token_id)
            if reason is not None:
                release(self.cache, request)
                running = [each for each in running if each is not request]
            self.outputs.send(Output(request.rid, (token,), reason))
        self.totals.generation_tokens_total += num_generated
        self.rates.observe_decode(num_generated)
        return running
