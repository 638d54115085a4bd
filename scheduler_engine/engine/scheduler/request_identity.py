"""RequestIdentity: which adapter and which session the KV of a request belongs to."""

from __future__ import annotations

import msgspec

from scheduler_components.cache import PrefixNamespace, RadixNode
from scheduler_components.scheduling.request_kv_cache import KvRequest
from scheduler_engine.engine.scheduler.request import Request

__all__ = ["RequestIdentity"]


class RequestIdentity:
    """The ``RequestNamespaces`` of a scheduler: KV of different adapters is never shared; KV of sessions is."""

    __slots__ = ()

    def namespace_of(self, request: KvRequest[RadixNode], base: PrefixNamespace) -> PrefixNamespace:
        """Return the namespace of the weights, with the request's adapter and session."""
        if not isinstance(request, Request) or (request.lora_id is None and request.session_id is None):
            return base
        return msgspec.structs.replace(
            base,
            lora_id=request.lora_id,
            lora_name=None if request.lora_id is None else request.hints.lora,
            session_id=request.session_id,
        )
