"""Ended requests as tracing sees them: their facts, and their spans."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["FinishedRequest", "RequestSpan", "TraceParent"]


class TraceParent(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The trace that a request belongs to: the W3C headers of these names, as the client sent them."""

    traceparent: str
    tracestate: str = ""


class FinishedRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The facts about an ended request that its span shows.

    Attributes:
        rid: request id.
        finish_reason: why it ended, for example "stop"; "error" makes the span one of an error.
        num_prompt_tokens, num_output_tokens: length of the prompt and of the output.
        num_cached_tokens: prompt tokens that the prefix cache covered.
        max_tokens, temperature, top_p, top_k: sampling parameters; None for one that the span leaves out.
        parent: trace of the client, or None.
    """

    rid: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    parent: TraceParent | None = None


class RequestSpan(msgspec.Struct, frozen=True):
    """One span: a request from its first queueing to its end.

    Attributes:
        start_ns, end_ns: nanoseconds since 1970.
        attributes: by the names of OpenTelemetry.
        is_error: the request failed.
        parent: trace of the client, or None.
    """

    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int | float | tuple[str, ...]]
    is_error: bool = False
    parent: TraceParent | None = None
