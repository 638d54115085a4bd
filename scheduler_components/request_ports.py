"""Ports around requests: what the parts that book results and stream outputs ask of a scheduler's own.

They stand beside ``ports``, which is about caches, load and metrics. A request is one object to all of them; each
part sees the few members that it needs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, MutableSequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from scheduler_components.output.delta import OutputBatch, OutputStats, TokenOutput

if TYPE_CHECKING:
    from scheduler_components.finish import FinishReason

__all__ = [
    "BookedRequest",
    "KvResidence",
    "OutputSink",
    "OutputStatsSource",
    "OutputStream",
    "RequestRegister",
    "ResultObserver",
    "StopRules",
    "StreamedRequest",
]


class StopRules(Protocol):
    """When a request ends."""

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def stop_token_ids(self) -> Container[int]: ...

    @property
    def ignore_eos(self) -> bool: ...


class BookedRequest(Protocol):
    """A request as the booking of results sees it.

    KV is computed one position behind the tokens: the last token has none until it has gone through the device.
    """

    num_computed_tokens: int
    """Positions whose KV stands in the request's pages; written by the booking."""

    @property
    def token_ids(self) -> MutableSequence[int]:
        """The prompt, then what was generated."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def limits(self) -> StopRules: ...

    @property
    def finish_reason(self) -> str | None:
        """None until ``RequestRegister.finish`` was called with it."""
        ...


class StreamedRequest(Protocol):
    """A request as its output stream sees it. A retraction takes nothing of its output back."""

    @property
    def rid(self) -> str:
        """Unique among the requests whose end has not been streamed."""
        ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def stream_interval(self) -> int:
        """Tokens between two messages of this request; 0 for all at its end."""
        ...

    @property
    def num_output_tokens(self) -> int: ...

    def output_since(self, start: int) -> TokenOutput:
        """Return the output from its token ``start`` on, with what belongs to these tokens."""
        ...


Booked_contra = TypeVar("Booked_contra", bound=BookedRequest, contravariant=True)
Streamed_contra = TypeVar("Streamed_contra", bound=StreamedRequest, contravariant=True)
Request_contra = TypeVar("Request_contra", contravariant=True)


class KvResidence(Protocol[Request_contra]):
    """Who gives KV pages to requests and takes them back."""

    def share(self, request: Request_contra) -> None:
        """Put the pages that are full, up to ``num_computed_tokens``, into the prefix cache."""
        ...

    def release(self, request: Request_contra) -> None:
        """Take all pages back; what is computed may stay in the prefix cache."""
        ...


class RequestRegister(Protocol[Request_contra]):
    """Who knows which requests wait and run."""

    def finish(self, request: Request_contra, reason: FinishReason) -> None:
        """Take a request out, wherever it stands, free its slot, and set its ``finish_reason``."""
        ...


class ResultObserver(Protocol[Request_contra]):
    """Who counts what requests get: totals, rates, latencies. Cannot change anything."""

    def generated(self, request: Request_contra, num_tokens: int) -> None:
        """A step gave the request ``num_tokens`` tokens, more than one where drafts were accepted."""
        ...

    def ended(self, request: Request_contra, reason: FinishReason) -> None: ...


class OutputStream(Protocol[Request_contra]):
    """Who tells clients; ``OutputStreamer`` is one."""

    def stream(self, requests: Iterable[Request_contra]) -> None:
        """Tell the news of these requests, each end once. Never blocks, never raises."""
        ...


class OutputSink(Protocol):
    """The way to the receiver of outputs, usually the process that turns tokens into text."""

    def is_ready(self) -> bool:
        """Say whether the receiver takes a message now. Asked before a message is made; never blocks."""
        ...

    def send(self, batch: OutputBatch) -> bool:
        """Hand on one message, whole; False when it was not taken after all. Never blocks."""
        ...

    def close(self) -> None:
        """Let go of sockets; safe to call twice."""
        ...


class OutputStatsSource(Protocol):
    """A streamer of outputs that counts what it does; ``OutputStreamer`` is one."""

    def stats(self) -> OutputStats: ...
