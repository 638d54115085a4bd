"""KvRequestRouter: Ray Serve's request router (Ray 2.60) that sends a request where most of its prompt is cached.

A deployment names it in its ``RequestRouterConfig``. Its replicas say in ``record_routing_stats`` where they publish:

- ``kv_events``: the descriptor of ``/server_info``, as ``kv_events_server_info`` returns it.
- ``host``: address of the replica's node, which replaces a wildcard in the descriptor.
- ``load``: the fields of a ``LoadSnapshot``, if the replica has one.

A request whose tokens are unknown, and a replica that publishes nothing, are routed by what was sent.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import uuid4

import msgspec

from observability.kv_stream import CountingView, FairRLock, Subscriber, open_subscriber, parse_addresses, wait_any
from observability.routing.hashed_prompt import HashedPrompt
from observability.routing.kv_router import KvRouter, Pick
from observability.routing.stream_listener import LockedListener, RouterListener
from observability.routing.thread_prompt_hashing import hash_prompt
from scheduler_components import ComponentError, ConfigError
from scheduler_components._internal.extras import naming_extras
from scheduler_components.values import LoadSnapshot

with naming_extras:
    import httpx
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

__all__ = ["KvRequestRouter", "TokensOf", "token_ids_of"]

_log = logging.getLogger(__name__)

_POLL_S = 0.05

_MAX_PROMPTS = 256
"""Hashed prompts that are kept until Ray says where their requests went. One that was dropped is hashed again."""

_TOKEN_FIELDS = ("prompt_token_ids", "token_ids", "input_ids")

TokensOf: TypeAlias = Callable[[PendingRequest], Sequence[int]]
"""Returns the tokens of a request's prompt; none if it does not know them."""


def token_ids_of(request: PendingRequest) -> Sequence[int]:
    """Return the tokens of the first argument that has some, as a field or as a key; none without such an argument."""
    for given in (*request.args, *request.kwargs.values()):
        for name in _TOKEN_FIELDS:
            tokens = given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)
            if isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes) and _are_tokens(tokens):
                return tokens
    return ()


def _are_tokens(given: Sequence[object]) -> bool:
    return all(type(each) is int and 0 <= each < 2**32 for each in given)


@dataclass(slots=True, kw_only=True)
class _Followed:
    """A replica, and the thread that follows the stream that it has named."""

    stats: Mapping[str, Any] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    listener: LockedListener | None = None
    thread: threading.Thread | None = None

    def close(self) -> None:
        """Follow the stream no further. The thread ends later, and passes nothing on."""
        self.stop.set()
        if self.listener is not None:
            self.listener.close()


class KvRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is not installed where types are checked
    """Ranks the replicas of a deployment by cost. Ray sends the request to the first one that has room for it.

    ``request_router_kwargs`` of the deployment are the arguments of ``initialize_state``.
    """

    def initialize_state(self, *, page_size: int = 16, tokens_of: str = "", **router: Any) -> None:
        """Create the router. Ray calls this before any other method.

        Args:
            page_size: tokens per page of all replicas.
            tokens_of: ``module:function`` of a ``TokensOf``; by default ``token_ids_of``.
            router: further fields of ``KvRouter``.

        Raises:
            ConfigError: a value cannot be used.
        """
        self._kv = KvRouter(page_size=page_size, name=f"ray-{uuid4().hex[:8]}", **router)
        self._tokens_of: TokensOf = _import(tokens_of) if tokens_of else token_ids_of
        self._lock = FairRLock()
        self._followed: dict[str, _Followed] = {}
        self._ending: list[threading.Thread] = []
        self._prompts: OrderedDict[str, HashedPrompt] = OrderedDict()
        self._picks: dict[str, Pick] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow new replicas, and those that name other streams now. Forget those that are gone."""
        present = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in [name for name in self._followed if name not in present]:
            self._forget(name)
        for name, replica in present.items():
            self._update(name, replica.routing_stats)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica."""
        self._forget(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates in the order of their costs, each as a rank of its own."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        prompt = HashedPrompt(token_ids=(), page_size=self._kv.page_size)
        if pending_request is not None:
            prompt = await self._hashed(pending_request)
        with self._lock:
            names = [name for name in by_name if name in self._followed]
            found = self._kv.candidates(names, prompt, now_s=time.monotonic())
        found.sort(key=lambda each: (each.cost, each.num_dispatched))
        unknown = [replica for name, replica in by_name.items() if name not in self._followed]
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all replicas were considered
        return [[by_name[str(each.replica)]] for each in found] + ([unknown] if unknown else [])

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: object,
    ) -> None:
        """Count a request at the replica that has accepted it."""
        name, request_id = replica_id.unique_id, pending_request.metadata.internal_request_id
        prompt = self._prompts.pop(request_id, None) or self._prompt_of(pending_request)
        with self._lock:
            namespaces = tuple(self._kv.namespaces())
        prompt.hash_in(namespaces)  # usually it is already
        with self._lock:
            others = [other for other in self._followed if other != name]
            pick = self._kv.route_prompt(prompt, now_s=time.monotonic(), exclude=others)
            if pick is not None:
                self._picks[request_id] = pick

    async def _hashed(self, request: PendingRequest) -> HashedPrompt:
        """Return the prompt of a request, hashed in all namespaces, and keep it for ``on_request_routed``."""
        request_id = request.metadata.internal_request_id
        prompt = self._prompts.get(request_id) or self._prompt_of(request)
        await hash_prompt(prompt, self._kv, self._lock)
        self._prompts[request_id] = prompt
        while len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return prompt

    def _prompt_of(self, request: PendingRequest) -> HashedPrompt:
        return HashedPrompt(token_ids=self._tokens_of(request), page_size=self._kv.page_size)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request."""
        with self._lock:
            pick = self._picks.pop(internal_request_id, None)
            if pick is not None:
                self._kv.finish(pick)

    def close(self) -> None:
        """Stop to follow all replicas, and wait for the threads. Ray does not call it: they end with the process."""
        for name in list(self._followed):
            self._forget(name)
        for thread in self._ending:
            thread.join()

    def _forget(self, name: str) -> None:
        """Forget a replica. Its thread ends by itself, because this is Ray's event loop."""
        followed = self._followed.pop(name, None)
        if followed is not None:
            followed.close()
            ending = (*self._ending, followed.thread)
            self._ending = [thread for thread in ending if thread is not None and thread.is_alive()]
            with self._lock:
                self._kv.on_replica_down(name, time.monotonic())
                self._picks = {request: pick for request, pick in self._picks.items() if pick.replica != name}

    def _update(self, name: str, stats: Mapping[str, Any]) -> None:
        known = self._followed.get(name)
        if known is not None and known.stats.get("kv_events") != stats.get("kv_events"):
            self._forget(name)
            known = None
        if known is None:
            known = self._followed[name] = _Followed(stats=stats)
            with self._lock:
                self._kv.on_replica_up(name, time.monotonic())
            self._follow(name, known)
        self._take_load(name, stats)

    def _follow(self, name: str, followed: _Followed) -> None:
        """Follow the streams that a replica has named. One that cannot be followed is routed by what was sent."""
        described = followed.stats.get("kv_events")
        if described is None:
            return
        try:
            host = str(followed.stats.get("host", "127.0.0.1"))
            addresses = parse_addresses({"kv_events": described}, httpx.URL(scheme="http", host=host))
            if len(addresses) != 1:  # Ray sends to a replica, which then chooses one of its ranks
                raise ConfigError("kv_events", len(addresses), "streams cannot be followed", "publish one per replica")
            inner = RouterListener(router=self._kv, replicas={addresses[0].rank: name}, clock=time.monotonic)
            listener = followed.listener = LockedListener(inner, self._lock)
            subscriber = open_subscriber(addresses, listener=listener, view=CountingView())
        except ComponentError as error:
            _log.warning("replica %s is not followed: %s", name, error)
            return
        arguments = (subscriber, followed.stop)
        followed.thread = threading.Thread(target=_poll, args=arguments, name=f"kv-{name}", daemon=True)
        followed.thread.start()

    def _take_load(self, name: str, stats: Mapping[str, Any]) -> None:
        if "load" not in stats:
            return
        try:
            load = msgspec.convert(stats["load"], LoadSnapshot)
        except msgspec.ValidationError as error:
            _log.warning("the load of replica %s is ignored: %s", name, error)
            return
        with self._lock:
            self._kv.on_load_report(name, load, time.monotonic())


def _poll(subscriber: Subscriber, stop: threading.Event) -> None:
    with subscriber:
        while not stop.is_set():
            wait_any((subscriber,), _POLL_S)
            subscriber.drain()


def _import(path: str) -> TokensOf:
    module, _, name = path.partition(":")
    try:
        found: TokensOf = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("tokens_of", path, f"cannot be imported ({error})", "give module:function") from error
    return found
