"""The rows of the metric catalogue about outputs: what was sent to the receiver, what waits for it, what it never got.

Paths are fields of ``OutputStats``. Each metric is labelled with ``ParallelState.metric_labels``, as a step's are.
"""

from __future__ import annotations

from observability.metric import Metric, counter, gauge

__all__ = ["OUTPUT_METRICS"]

OUTPUT_METRICS: tuple[Metric, ...] = (
    counter("output_batches_sent_total", "messages", "batches_sent", "Messages of outputs that the receiver took."),
    counter("output_deltas_sent_total", "deltas", "deltas_sent", "News of single requests in them."),
    counter("output_tokens_sent_total", "tokens", "tokens_sent", "Generated tokens in them."),
    counter(
        "output_steps_delayed_total",
        "steps",
        "steps_delayed",
        "Steps whose outputs had to wait, because the receiver was behind.",
    ),
    gauge("output_requests_waiting", "requests", "requests_waiting", "Requests in flight whose outputs wait."),
    gauge("output_ends_held", "requests", "ends_held", "Requests that are over and whose last outputs wait."),
    gauge("output_bytes_held", "bytes", "bytes_held", "Bytes that these outputs take."),
    counter(
        "output_ends_dropped_total",
        "requests",
        "ends_dropped",
        "Requests whose end the receiver was never told: more were over than may be held.",
    ),
    counter("output_tokens_dropped_total", "tokens", "tokens_dropped", "Generated tokens that it was never told."),
)
"""One row for each field of ``OutputStats``, apart from a step's report: a scrape reads them, no step does."""
