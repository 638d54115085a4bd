"""What one forward pass computed and what waited then: the messages that planners read.

Source of names, meanings and defaults: ``observability/forward_pass_metrics.py`` of SGLang 0.5.23, version 1. Dynamo
(``ai-dynamo-runtime`` 1.6.1) reads and writes the same maps.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "FORWARD_PASS_VERSION",
    "ForwardPassMetrics",
    "QueuedRequestMetrics",
    "ScheduledRequestMetrics",
]

FORWARD_PASS_VERSION = 1
"""Version of the messages. SGLang raises it when a reader of the old version would misread a message."""


class ScheduledRequestMetrics(msgspec.Struct, frozen=True, gc=False):
    """The requests that one forward pass computed.

    Attributes:
        num_prefill_requests: requests in prefill; each chunk of a long prompt counts in its own pass.
        sum_prefill_tokens: prompt tokens that the pass computed.
        var_prefill_length: population variance of the prompts' whole lengths, in tokens squared.
        sum_prefill_kv_tokens: tokens before the computed ones, whose KV the prefills read: cached or in earlier chunks.
        num_decode_requests: requests that decoded.
        sum_decode_kv_tokens: tokens of their contexts.
        var_decode_kv_tokens: population variance of these contexts' lengths, in tokens squared.
    """

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueuedRequestMetrics(msgspec.Struct, frozen=True, gc=False):
    """The requests that waited after the pass. Cached prefixes do not reduce the counts.

    Attributes:
        num_prefill_requests: requests without any output.
        sum_prefill_tokens: tokens of their prompts.
        var_prefill_length: population variance of the prompts' lengths, in tokens squared.
        num_decode_requests: requests that had output when they lost their pages.
        sum_decode_kv_tokens: tokens of their prompts and outputs.
        var_decode_kv_tokens: population variance of these lengths, in tokens squared.
    """

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class ForwardPassMetrics(msgspec.Struct, frozen=True, gc=False):
    """One forward pass of one replica, or a heartbeat of an idle one.

    Attributes:
        version: version of this format.
        worker_id: the engine, by the name that the reader's discovery gives it.
        dp_rank: the replica.
        counter_id: number of the message, from 0; a gap is a lost message.
        wall_time: seconds that the pass took; 0 in a heartbeat.
        scheduled_requests: what the pass computed.
        queued_requests: what waited.
    """

    version: int = FORWARD_PASS_VERSION
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: ScheduledRequestMetrics = ScheduledRequestMetrics()
    queued_requests: QueuedRequestMetrics = QueuedRequestMetrics()
