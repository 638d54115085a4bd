"""Requests: what result processing and output streaming ask of the scheduler's own classes."""

from __future__ import annotations

from collections.abc import Container, Iterable, MutableSequence, Sequence
from typing import Protocol, TypeVar

from scheduler_components.values import FinishReason, OutputBatch, TokenOutput

__all__ = [
    "OutputSink",
    "StopConditions",
    "ProcessedRequest",
    "StreamedRequest",
    "KvReleaser",
    "RequestFinisher",
    "ResultObserver",
    "NullResultObserver",
    "OutputStream",
]

Request_contra = TypeVar("Request_contra", contravariant=True)


class OutputSink(Protocol):
    """The way to whoever turns tokens into text: the engine's own socket or queue. Called by ``OutputStreamer``."""

    def is_ready(self) -> bool:
        """Say whether the receiver takes a message now. Asked before a message is made; never blocks."""
        ...

    def send(self, batch: OutputBatch) -> bool:
        """Hand on one message, whole; False when it was not taken after all. Never blocks."""
        ...

    def close(self) -> None:
        """Let go of sockets; safe to call twice."""
        ...


class StopConditions(Protocol):
    """When a request ends: its sampling parameters. Read by ``check_finished``."""

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def stop_token_ids(self) -> Container[int]: ...

    @property
    def ignore_eos(self) -> bool: ...


class ProcessedRequest(Protocol):
    """A request as ``BatchResultProcessor`` sees it: the scheduler's own class.

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
    def limits(self) -> StopConditions: ...

    @property
    def finish_reason(self) -> str | None:
        """None until ``RequestFinisher.finish`` was called with it."""
        ...


class StreamedRequest(Protocol):
    """A request as ``OutputStreamer`` sees it: the scheduler's own class.

    A retraction takes none of its output back.
    """

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


class KvReleaser(Protocol[Request_contra]):
    """Gives KV pages to requests and takes them back: the scheduler's cache. Called by ``BatchResultProcessor``."""

    def cache_unfinished(self, request: Request_contra) -> None:
        """Put the pages that are full, up to ``num_computed_tokens``, into the prefix cache."""
        ...

    def free(self, request: Request_contra) -> None:
        """Take all pages back; what is computed may stay in the prefix cache."""
        ...


class RequestFinisher(Protocol[Request_contra]):
    """Knows which requests wait and run: the scheduler itself. Called by ``BatchResultProcessor``."""

    def finish(self, request: Request_contra, reason: FinishReason) -> None:
        """Take a request out, wherever it stands, free its slot, and set its ``finish_reason``."""
        ...


class ResultObserver(Protocol[Request_contra]):
    """Counts what requests get (totals, rates, latencies) and changes nothing. Called by ``BatchResultProcessor``."""

    def on_tokens(self, requests: Sequence[Request_contra], num_tokens: Sequence[int]) -> None:
        """A step gave each of these requests so many tokens, more than one where drafts were accepted.

        Called once per step in which some request got some, before ``ended`` of those that these tokens ended.
        """
        ...

    def on_finished(self, request: Request_contra, reason: FinishReason) -> None:
        """A request is over; its ``finish_reason`` is set."""
        ...


class NullResultObserver:
    """The observer of a scheduler that counts nothing."""

    def on_tokens(self, requests: Sequence[object], num_tokens: Sequence[int]) -> None:
        pass

    def on_finished(self, request: object, reason: FinishReason) -> None:
        pass


class OutputStream(Protocol[Request_contra]):
    """Sends news to clients: ``OutputStreamer``. Called by ``BatchResultProcessor``."""

    def stream(self, requests: Iterable[Request_contra]) -> None:
        """Send the news of these requests, each end once. Never blocks, never raises."""
        ...
