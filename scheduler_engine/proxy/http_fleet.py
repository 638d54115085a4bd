"""The engines behind a proxy: found by their URLs, followed by their event streams, polled for readiness and load.

One task per engine repeats this: it reads ``/server_info``, follows the streams named there, adds the engine's replicas
to the router, and polls until the engine is lost or describes other streams. Then it removes the replicas and begins
again. An engine with data parallelism has several replicas, one per rank, each with its own cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

import httpx
import msgspec

from observability.kv_stream import (
    AsyncSubscriber,
    CountingView,
    FairRLock,
    NoStreamsError,
    open_async_subscriber,
    parse_addresses,
)
from observability.kv_stream.stream_stats import MAX_STREAMS
from observability.routing import HashedPrompt, KvRouter, LockedListener, Pick, ReplicaId, RouterListener
from observability.routing.thread_prompt_hashing import hash_prompt
from scheduler_components import ComponentError, ConfigError, DecodeError
from scheduler_components.kv_events import StreamAddress
from scheduler_engine.proxy.answer_memory import AnswerMemory, AnswerMemoryError
from scheduler_engine.proxy.config import ProxyConfig
from scheduler_engine.proxy.http_replica import (
    EngineClient,
    EngineDownError,
    ReplicaError,
    open_engine_client,
)
from scheduler_engine.proxy.routing_fields import MAX_KEY_CHARACTERS, RoutingFields

_log = logging.getLogger("scheduler_components.proxy")

_DEFAULT_PAGE_SIZE = 16
_CONTACT_S = 1.0
"""Longest wait for the first contact with an engine's streams, so that the blocks of a warm engine count early."""

_SETTLE_S = 0.25
"""A load report that comes so long after a request was sent counts it: the engine has had the time to queue it."""

_MAX_TOKENIZED_BYTES = 4 * 2**20
"""A longer text is routed by load: its tokens would fill the memory, and few of them count."""

_MAX_UNCOUNTED = 100_000
_MAX_SESSIONS = 65_536


class EngineState(Enum):
    """Whether an engine gets requests: an UP one does; a NOT_READY one ends those that it has; a DOWN one is lost."""

    UP = "up"
    NOT_READY = "not ready"
    DOWN = "down"


class _Info(msgspec.Struct, frozen=True):
    """The part of ``/server_info`` that the proxy reads, besides ``kv_events``."""

    page_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None = None
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)] = 1


class _Description(msgspec.Struct, frozen=True):
    """What an engine says of itself.

    Attributes:
        addresses: of its streams; none if it publishes no events.
        page_size: tokens per page.
        ranks: data-parallel ranks, each with its own cache.
        adapters: names of the adapters that it serves; None if it does not list them.
        models: what it lists as models, by id.
    """

    addresses: tuple[StreamAddress, ...]
    page_size: int
    ranks: tuple[int, ...]
    adapters: frozenset[str] | None
    models: Mapping[str, msgspec.Raw]

    def is_followed_as(self, other: _Description) -> bool:
        """Return whether an engine can be followed further. Adapters come and go while it serves requests."""
        return self == msgspec.structs.replace(other, adapters=self.adapters, models=self.models)


@dataclass(slots=True)
class ReplicaStats:
    """Counters of one replica, for metrics and status."""

    picks: int = 0
    prompt_blocks: int = 0
    cached_blocks: int = 0
    failures: int = 0


@dataclass(slots=True, kw_only=True)
class Replica:
    """One rank of an engine.

    Attributes:
        id: its name in the router.
        rank: its data-parallel rank, and the number of its stream.
        stats: counters since the proxy started.
        uncounted: (time, dispatcher, ticket) of the requests that no load report counts yet.
        counted: (dispatcher, ticket) of the last request that reports count; none before the first one.
    """

    id: int
    rank: int
    stats: ReplicaStats = field(default_factory=ReplicaStats)
    uncounted: deque[tuple[float, str, int]] = field(default_factory=lambda: deque(maxlen=_MAX_UNCOUNTED))
    counted: tuple[tuple[str, int], ...] = ()

    def begin(self) -> None:
        """Forget the requests that were sent before the engine came back."""
        self.uncounted.clear()
        self.counted = ()

    def watermarks(self, now_s: float) -> tuple[tuple[str, int], ...]:
        """Return up to which ticket a report that came now counts the requests.

        Each report gets the last mark, also if it is not new: the router may have ignored the report before it.
        """
        while self.uncounted and self.uncounted[0][0] <= now_s - _SETTLE_S:
            _, dispatcher, ticket = self.uncounted.popleft()
            self.counted = ((dispatcher, ticket),)
        return self.counted


@dataclass(slots=True, kw_only=True)
class ProxiedEngine:  # noqa: SCH003 - all that is known of one engine, as the status shows it
    """An engine and what the proxy knows of it.

    Attributes:
        number: its place in the list of URLs.
        client: sends requests to it.
        state: whether it gets requests.
        problem: why it gets none.
        replicas: its ranks.
        adapters: names of the adapters that it serves; None if it does not list them.
        models: what it lists as models, by id, as JSON.
        subscriber: follows its streams; None without streams, or while it is down.
        lost: set when it goes down. Requests that have no answer then go elsewhere.
        check_now: set to poll it without waiting for the interval.
    """

    number: int
    client: EngineClient
    state: EngineState = EngineState.DOWN
    problem: str = "has not answered yet"
    replicas: Mapping[int, Replica] = field(default_factory=dict)
    adapters: frozenset[str] | None = None
    models: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    subscriber: AsyncSubscriber | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    check_now: asyncio.Event = field(default_factory=asyncio.Event)
    num_times_lost: int = 0
    _known: dict[int, Replica] = field(default_factory=dict, init=False, repr=False)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def is_data_parallel(self) -> bool:
        return len(self.replicas) > 1

    def lists_adapter(self, name: str) -> bool | None:
        """Return whether the engine lists an adapter; None if it lists none that it may serve."""
        return None if self.adapters is None else name in self.adapters

    def begin(self, description: _Description) -> None:
        """Note that the engine is back. Its ranks keep their counters."""
        self.replicas = {rank: self._replica(rank) for rank in description.ranks}
        self.describe(description)
        self.lost = asyncio.Event()
        self.state, self.problem = EngineState.NOT_READY, "has not said that it is ready"
        for replica in self.replicas.values():
            replica.begin()

    def describe(self, description: _Description) -> None:
        """Note what the engine serves now."""
        self.adapters, self.models = description.adapters, description.models

    def end(self) -> bool:
        """Note that the engine is lost. Return False if it was already."""
        self.subscriber = None
        if self.state is EngineState.DOWN:
            return False
        self.state = EngineState.DOWN
        self.num_times_lost += 1
        self.lost.set()
        return True

    def _replica(self, rank: int) -> Replica:
        return self._known.setdefault(rank, Replica(id=self.number * MAX_STREAMS + rank, rank=rank))


class RequestRoute(msgspec.Struct, frozen=True):
    """The replica that gets a request, and the router's choice."""

    engine: ProxiedEngine
    replica: Replica
    pick: Pick


@dataclass(slots=True, kw_only=True)
class Fleet:
    """All engines, and the router that chooses among their replicas. ``open_fleet`` creates it.

    Attributes:
        config: of the proxy.
        engines: in the order of their URLs.
        make_router: creates the router when the first engine has said its page size.
        clock: monotonic seconds.
        answers: bounds the memory of what the engines answer.
        num_unknown_prompts: prompts whose tokens no engine said.
    """

    config: ProxyConfig
    engines: Sequence[ProxiedEngine]
    make_router: Callable[[int], KvRouter]
    clock: Callable[[], float] = time.monotonic
    answers: AnswerMemory = field(init=False)
    num_unknown_prompts: int = field(default=0, init=False)
    _sessions: OrderedDict[str, ProxiedEngine] = field(default_factory=OrderedDict, init=False, repr=False)
    _router: KvRouter | None = field(default=None, init=False, repr=False)
    _lock: FairRLock = field(default_factory=FairRLock, init=False, repr=False)
    _last_tokenizer: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        self.answers = AnswerMemory(max_bytes=self.config.max_answer_bytes)

    @property
    def num_ready(self) -> int:
        """The number of engines that take requests."""
        return sum(engine.state is EngineState.UP for engine in self.engines)

    def models(self) -> Mapping[str, msgspec.Raw]:
        """Return the models of the engines that take requests, by id, as the first one of them describes each."""
        found: dict[str, msgspec.Raw] = {}
        for engine in self.engines:
            if engine.state is EngineState.UP:
                found |= {name: each for name, each in engine.models.items() if name not in found}
        return found

    # --- choosing ---

    async def prompt_of(self, fields: RoutingFields) -> HashedPrompt:
        """Return the prompt of a request, to place it; without tokens if no engine says them."""
        tokens = await self.tokens_of(fields)
        page_size = _DEFAULT_PAGE_SIZE if self._router is None else self._router.page_size
        return HashedPrompt(token_ids=tokens, page_size=page_size)

    async def tokens_of(self, fields: RoutingFields) -> Sequence[int]:
        """Return the tokens of a request's prompt; none if no engine says them, and then the load alone decides."""
        if fields.token_ids is not None:
            return fields.token_ids
        if not fields.tokenize_body:
            return ()
        if len(fields.tokenize_body) > _MAX_TOKENIZED_BYTES:
            self.num_unknown_prompts += 1
            return ()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.tokenize_timeout_s):
                for engine in self._tokenizers():
                    try:
                        with self.answers.open() as held:
                            return await engine.client.tokenize(fields.tokenize_body, held)
                    except EngineDownError as error:
                        engine.check_now.set()
                        if not error.is_refused:
                            break  # the prompt may be what it fails at
                    except (ReplicaError, AnswerMemoryError) as error:
                        _log.info("%s", error)
                        break  # another engine would probably refuse the prompt too, or find the memory as full
        self.num_unknown_prompts += 1
        return ()

    def _tokenizers(self) -> list[ProxiedEngine]:
        """Return the engines that are up, each time beginning with another."""
        ready = [engine for engine in self.engines if engine.state is EngineState.UP]
        self._last_tokenizer += 1
        first = self._last_tokenizer % len(ready) if ready else 0
        return ready[first:] + ready[:first]

    async def place(
        self, prompt: HashedPrompt, fields: RoutingFields, *, exclude: Collection[ProxiedEngine] = ()
    ) -> RequestRoute | None:
        """Choose the replica of a request among engines that are not in ``exclude``; None if none takes requests.

        The prompt is hashed without the router's lock. A long one is hashed in a thread.

        Raises:
            ConfigError: the request is a turn of a session that is not open.
        """
        router, lora = self._router, self._adapter(fields)
        if router is None:
            return None
        await hash_prompt(prompt, router, self._lock, lora=lora)
        session = fields.open_session
        if session is None and fields.new_session in self._sessions:
            session = fields.new_session  # its engine refuses to open it again
        if session is not None:
            exclude = [*exclude, *self._others(session)]
        elif lora is not None and any(engine.lists_adapter(lora) for engine in self.engines):
            exclude = [*exclude, *(engine for engine in self.engines if engine.lists_adapter(lora) is False)]
        excluded = frozenset(replica.id for engine in exclude for replica in engine.replicas.values())
        now_s = self.clock()
        with self._lock:
            pick = router.route_prompt(prompt, now_s=now_s, session=fields.session, lora=lora, exclude=excluded)
        if pick is None:
            return None
        assert isinstance(pick.replica, int), "the fleet names replicas by numbers"
        engine = self.engines[pick.replica // MAX_STREAMS]
        replica = engine.replicas[pick.replica % MAX_STREAMS]
        replica.uncounted.append((now_s, *pick.ticket))
        replica.stats.picks += 1
        replica.stats.prompt_blocks += len(pick.block_hashes)
        replica.stats.cached_blocks += pick.device_blocks + pick.host_blocks + pick.storage_blocks
        return RequestRoute(engine, replica, pick)

    def add_session(self, name: str, engine: ProxiedEngine) -> bool:
        """Note that an engine has, or is asked to open, a session. Return False if it is known or its name too long.

        Beyond the limit the session that was unused for the longest time is forgotten.
        """
        if name in self._sessions or len(name) > MAX_KEY_CHARACTERS:
            return False
        self._sessions[name] = engine
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return True

    def remove_session(self, name: str) -> None:
        """Note that a session was closed or not opened; an unknown one is ignored."""
        self._sessions.pop(name, None)

    def _others(self, session: str) -> list[ProxiedEngine]:
        """Return the engines that do not have a session, which is used now."""
        engine = self._sessions.get(session)
        if engine is None:
            hint = "open it through this proxy; it ends with its engine"
            raise ConfigError("session_params.id", session, "is not an open session", hint)
        self._sessions.move_to_end(session)
        return [each for each in self.engines if each is not engine]

    def _adapter(self, fields: RoutingFields) -> str | None:
        if fields.lora is not None:
            return fields.lora
        model = fields.model
        return model if model is not None and any(engine.lists_adapter(model) for engine in self.engines) else None

    def finish(self, placement: RequestRoute) -> None:
        """Note that a request has ended."""
        if self._router is not None:
            with self._lock:
                self._router.finish(placement.pick)

    def cancel(self, placement: RequestRoute) -> None:
        """Note that a replica has not taken a request, so its prompt is not cached there."""
        if self._router is not None:
            with self._lock:
                self._router.cancel(placement.pick)

    def fail(self, placement: RequestRoute, error: EngineDownError) -> None:
        """Note that an engine failed before it answered. One that refuses connections goes down, others are polled."""
        placement.replica.stats.failures += 1
        self.cancel(placement)
        if error.is_refused:
            self._lose(placement.engine, error)
        placement.engine.check_now.set()

    def num_in_flight(self, replica: Replica) -> int:
        """Return how many requests were sent to a replica and have not ended."""
        return 0 if self._router is None else self._router.num_in_flight(replica.id)

    def load_blocks(self, replica: Replica) -> float:
        """Return the load that counts for a replica when a request is placed, in blocks."""
        return 0.0 if self._router is None else self._router.load_blocks(replica.id)

    # --- following ---

    async def keep(self, engine: ProxiedEngine) -> None:
        """Follow an engine until this task is cancelled."""
        pause_s = self.config.retry_min_s
        while True:
            try:
                description = await self._describe(engine)
                async with AsyncExitStack() as stack:
                    stack.callback(self._lose, engine, None)
                    listener = self._begin(engine, description)
                    await self._follow(engine, description.addresses, listener, stack)
                    pause_s = self.config.retry_min_s
                    await self._poll_until_changed(engine, description)
            except ComponentError as error:
                self._lose(engine, error)
            except Exception as error:  # noqa: BLE001 - it costs this engine; the others go on
                _log.exception("%s cannot be followed", engine.url)
                self._lose(engine, ReplicaError(f"{engine.url} cannot be followed: {type(error).__name__}"))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self.config.retry_max_s)

    async def _describe(self, engine: ProxiedEngine) -> _Description:
        """Ask an engine for its description.

        Raises:
            ComponentError: it does not answer, or its answer cannot be used.
        """
        answer = await engine.client.server_info()
        try:
            info = msgspec.convert(answer, _Info)
        except msgspec.ValidationError as error:
            raise DecodeError(f"{engine.url}/server_info: {error}") from error
        try:
            addresses = parse_addresses(answer, httpx.URL(engine.url))
        except NoStreamsError:
            addresses = ()
        page_size = next((each.block_size for each in addresses if each.block_size), info.page_size)
        ranks = tuple(address.rank for address in addresses) or tuple(range(info.dp_size))
        client = engine.client
        adapters = await client.adapters()
        try:
            models = await client.models()
        except EngineDownError:
            raise
        except ReplicaError as error:  # a list for clients, without which the engine serves all the same
            _log.info("%s: the list from before stays", error)
            models = engine.models
        return _Description(addresses, page_size or _DEFAULT_PAGE_SIZE, ranks, adapters, models)

    def _begin(self, engine: ProxiedEngine, description: _Description) -> RouterListener:
        """Add the replicas of an engine to the router, which sends them nothing yet. Return its streams' listener.

        Raises:
            ReplicaError: its pages have another size than those of the other engines, so no hash of a prompt fits both.
        """
        if self._router is None:
            self._router = self.make_router(description.page_size)
        router, now_s = self._router, self.clock()
        if router.page_size != description.page_size:
            sizes = f"pages of {description.page_size} tokens, and the first engine has pages of {router.page_size}"
            raise ReplicaError(f"{engine.url} has {sizes}; start all engines with one page size")
        engine.begin(description)
        with self._lock:
            for replica in engine.replicas.values():
                router.on_replica_up(replica.id, now_s)
                router.replicas.drain(replica.id)
        ids: dict[int, ReplicaId] = {rank: replica.id for rank, replica in engine.replicas.items()}
        return RouterListener(router=router, replicas=ids, clock=self.clock)

    async def _follow(
        self, engine: ProxiedEngine, addresses: Sequence[StreamAddress], listener: RouterListener, stack: AsyncExitStack
    ) -> None:
        """Follow the streams of an engine until the stack is closed. Wait a little for the blocks of a warm engine."""
        if not addresses:
            return
        opened = open_async_subscriber(
            addresses,
            listener=LockedListener(listener, self._lock),
            keys=self.config.stream_keys,
            view=CountingView(),  # the router's view has the blocks
        )
        subscriber = engine.subscriber = await stack.enter_async_context(opened)
        await asyncio.gather(*(subscriber.wait_until(address.rank, -1, _CONTACT_S) for address in addresses))

    def _lose(self, engine: ProxiedEngine, error: ComponentError | None) -> None:
        """Take out an engine: its replicas, their blocks, and the requests that wait for its answer."""
        if error is not None and str(error) != engine.problem:
            engine.problem = str(error)
            _log.warning("%s", error)
        if not engine.end():
            return
        for session in [name for name, each in self._sessions.items() if each is engine]:
            del self._sessions[session]
        if self._router is not None:
            with self._lock:
                for replica in engine.replicas.values():
                    self._router.on_replica_down(replica.id, self.clock())

    async def _poll_until_changed(self, engine: ProxiedEngine, description: _Description) -> None:
        """Poll an engine until it describes other streams.

        Raises:
            ComponentError: it is lost.
        """
        num_failed, described_s = 0, self.clock()
        while engine.state is not EngineState.DOWN:
            engine.check_now.clear()
            try:
                await self._poll(engine)
                if self.clock() - described_s >= self.config.description_interval_s:
                    found = await self._describe(engine)
                    if not found.is_followed_as(description):
                        _log.warning("%s describes itself differently now, and is followed again", engine.url)
                        return
                    engine.describe(found)
                    described_s = self.clock()
                num_failed = 0
            except ComponentError as error:
                num_failed += 1
                is_refused = isinstance(error, EngineDownError) and error.is_refused
                if is_refused or num_failed >= self.config.max_failed_polls:
                    raise
            self._sweep()
            await _wait_for(engine.check_now, self.config.poll_interval_s)

    async def _poll(self, engine: ProxiedEngine) -> None:
        """Ask whether an engine is ready, and for its load.

        For an engine without ``/v1/loads`` the load is what was sent and has not ended.

        Raises:
            EngineDownError: it does not answer.
        """
        self._set_ready(engine, await engine.client.is_ready())
        try:
            loads = await engine.client.loads()
        except EngineDownError:
            raise
        except ReplicaError as error:
            _log.debug("%s", error)
            return
        router, now_s = self._router, self.clock()
        for load in loads:
            replica = engine.replicas.get(load.dp_rank)
            if replica is not None and router is not None:
                counted = msgspec.structs.replace(load, dispatched_watermarks=replica.watermarks(now_s))
                with self._lock:
                    router.on_load_report(replica.id, counted, now_s)

    def _set_ready(self, engine: ProxiedEngine, is_ready: bool) -> None:
        state = EngineState.UP if is_ready else EngineState.NOT_READY
        if self._router is None or engine.state in (state, EngineState.DOWN):
            return
        engine.state, engine.problem = state, "" if is_ready else "says that it is not ready"
        _log.info("%s %s", engine.url, engine.problem or "takes requests")
        with self._lock:
            for replica in engine.replicas.values():
                if is_ready:
                    self._router.replicas.add(replica.id, self.clock())
                else:
                    self._router.replicas.drain(replica.id)

    def _sweep(self) -> None:
        """Remove a slice of the blocks of replicas that have gone."""
        if self._router is not None and not self._router.view.is_swept:
            with self._lock:
                self._router.view.sweep()


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


@asynccontextmanager
async def open_fleet(config: ProxyConfig, *, make_router: Callable[[int], KvRouter]) -> AsyncIterator[Fleet]:
    """Follow all engines until the end of the block. It begins without waiting for any of them.

    Args:
        config: of the proxy.
        make_router: creates the router for pages of this many tokens.
    """
    async with AsyncExitStack() as stack:
        engines = []
        for number, url in enumerate(config.urls):
            client = await stack.enter_async_context(open_engine_client(url, config))
            engines.append(ProxiedEngine(number=number, client=client))
        fleet = Fleet(config=config, engines=engines, make_router=make_router)
        tasks = [asyncio.create_task(fleet.keep(engine), name=f"follow {engine.url}") for engine in engines]
        try:
            yield fleet
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
