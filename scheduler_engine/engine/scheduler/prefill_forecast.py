"""PrefillForecast: learn the duration of prefills, and predict times to first token. No decision depends on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components.batcher import BatchConditions
from scheduler_components.scheduling.dynamic_chunk_sizer import FirstTokenPredictor
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.values import ScheduledBatch
from scheduler_engine.engine.scheduler.request import Request

__all__ = ["PrefillForecast"]


@dataclass(slots=True, kw_only=True)
class PrefillForecast:
    """Observes prefills for the fit of the chunk sizer and for predictions.

    Attributes:
        conditions: of the batcher; its chunk sizer has the fit.
        predictor: predicts times to first token.
    """

    conditions: BatchConditions[Request] = field(default_factory=BatchConditions)
    predictor: FirstTokenPredictor = field(init=False)

    def __post_init__(self) -> None:
        self.predictor = FirstTokenPredictor(fit=self.conditions.chunk_sizer.fit)

    def predict_first_token(self, request: Request, queues: RequestQueues[Request], *, step_tokens: int) -> None:
        """Predict the time to the first token of a request that is about to be queued.

        Args:
            request: its cached tokens are known.
            queues: the requests ahead of it.
            step_tokens: prefilled tokens per step.
        """
        slots_ahead = max(0, len(queues.running) + len(queues.waiting) + 1 - queues.max_running_requests)
        predicted_s = self.predictor.predict_s(
            request.num_input_tokens - request.num_cached_tokens,
            tokens_ahead=queues.waiting.uncached_tokens + queues.num_chunked_tokens_left,
            step_tokens=step_tokens,
            history_tokens=request.num_cached_tokens,
            slots_ahead=slots_ahead,
        )
        self.predictor.start(request.rid, predicted_s, slots_ahead=slots_ahead)

    def observe_prefill(self, batch: ScheduledBatch[Request], busy_s: float) -> None:
        """Record how long a batch with prefills took, for the length of later chunks."""
        pairs = sum(chunk.end**2 - chunk.start**2 for chunk in batch.chunks if chunk.is_prefill)
        self.conditions.chunk_sizer.fit.observe(batch.num_prefill_tokens, pairs, busy_s)

    def on_first_tokens(self, batch: ScheduledBatch[Request]) -> None:
        """Record the requests of a batch that have received their first token."""
        for chunk in batch.chunks:
            if chunk.is_prefill and chunk.request.num_output_tokens == 1:
                self.predictor.on_first_token(chunk.request.rid)

    def on_finished(self, request: Request) -> None:
        """Record the end of a request, which may have come with its first token."""
        if request.num_output_tokens:
            self.predictor.on_first_token(request.rid)
        else:
            self.predictor.discard(request.rid)
