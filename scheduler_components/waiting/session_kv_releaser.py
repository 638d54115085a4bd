"""SessionKvReleaser: free the pages of a request that has ended, and let its session lock them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler_components.scheduling.request import Request
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.waiting.sessions import SessionTable

__all__ = ["SessionKvReleaser"]

Node = TypeVar("Node")


@dataclass(slots=True, kw_only=True)
class SessionKvReleaser(Generic[Node]):
    """The ``KvReleaser`` of a scheduler with sessions: it frees the pages of a request, then its session locks them.

    Attributes:
        kv: frees the pages.
        sessions: locks those of a turn.
    """

    kv: RequestKvCache[Node]
    sessions: SessionTable[Node]

    def cache_unfinished(self, request: Request[Node]) -> None:
        """Insert the request's full pages into the cache."""
        self.kv.cache_unfinished(request)

    def free(self, request: Request[Node]) -> None:
        """Release the pages of a request that has ended. Those of a turn stay locked by its session."""
        self.kv.free(request)
        if request.session_id is not None and request.finish_reason is not None:
            self.sessions.end_turn(
                request.session_id,
                request.rid,
                request.token_ids,
                num_input_tokens=request.num_prompt_tokens,
                reason=request.finish_reason,
                namespace=self.kv.namespace_of(request),
            )
