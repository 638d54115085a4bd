"""LoraQueue: requests that wait for a LoRA adapter, and which adapters all ranks of a replica have loaded. Pure.

**Facts and decisions.** A rank loads its own copy of an adapter in a thread, and some ranks are ready earlier than
others. Only "this rank has loaded it" and "this rank could not" are facts of a rank. They travel in an ``AgreedQueue``
of loads: an adapter is usable in the step in which all ranks have it, and a load that fails on one rank fails on all.
Everything else follows from calls that every rank makes in one order and from agreed values: which adapter is loaded
next, which one is evicted, which request waits. A rank that evicted an adapter by its own clock would compute a request
that the other ranks hold back.

**Slots.** At most ``max_loaded`` adapters are loaded or being loaded. A request that names another registered adapter
waits, and the adapter takes the next slot, in the order in which adapters were first wanted. If no slot is free, the
least recently used adapter that no request uses is evicted. A pinned adapter is never evicted.

**Drain.** If requests use every adapter, the least recently used one that is not pinned is drained. Requests that use
it finish, and new ones wait behind the adapters that were wanted before. An adapter is therefore drained after the
requests that were admitted before, whatever arrives later, and no adapter waits forever for a busy one. An adapter that
is unregistered is drained, too; requests that wait for it fail.

**Use.** A request uses its adapter from the step in which it leaves this queue until it has ended, also while it waits
for pages or was preempted. A loader carries out its calls in their order, so an eviction needs no agreement: the
adapter that replaces another is loaded after that one was unloaded.

**Identity.** Each registration has its own number. The KV of an adapter belongs to that number and its name
(``PrefixNamespace``), so an adapter that is registered again from other files never meets the earlier one's pages.

The invariant: after agreement n all ranks have the same registered, loading and loaded adapters with the same users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

import attrs
import msgspec

from scheduler_components._internal.validators import integer_validator, number_validator
from scheduler_components.agreement import AgreedValues, Proposal
from scheduler_components.errors import ConfigError, QueueFullError
from scheduler_components.ports import DecisionSink, NullDecisionLog
from scheduler_components.values import AdapterLoad, ControlReply, LoadSections, LoraLoad, LoraStats
from scheduler_components.waiting.agreed_queue import AgreedQueue, Departure
from scheduler_components.waiting.held_request import HeldRequest

__all__ = [
    "Adapter",
    "AdapterFact",
    "AdapterLoader",
    "LoraLimits",
    "LoraQueue",
    "NullAdapterLoader",
]

_NO_SECTIONS = LoadSections()
_MAX_SHOWN = 8
_MAX_NAME_CHARACTERS = 128

_State: TypeAlias = Literal["unloaded", "wanted", "loading", "loaded"]


class Adapter(msgspec.Struct, frozen=True):
    """A registered adapter.

    Attributes:
        name: by which requests name it.
        path: where its files are.
        lora_id: number of its registration, from 1; the same on all ranks, and never used again.
    """

    name: str
    path: str
    lora_id: int


class AdapterFact(msgspec.Struct, frozen=True):
    """The end of one load on this rank. ``problem`` says why it failed; empty if it succeeded."""

    key: str
    problem: str = ""


class AdapterLoader(Protocol):
    """Loads and unloads the adapters of one rank, in the order of the calls, without blocking: a thread does the work.

    ``ThreadAdapterLoader`` is one.
    """

    def load(self, key: str, adapter: Adapter) -> None:
        """Begin to load an adapter. A later ``poll`` returns its end under ``key``."""
        ...

    def unload(self, adapter: Adapter) -> None:
        """Drop an adapter after the loads before. No request uses it. No effect if it is not loaded."""
        ...

    def poll(self) -> Sequence[AdapterFact]:
        """Return the loads that have ended since the last call. Called in steps."""
        ...

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        ...


class NullAdapterLoader:
    """The loader of a rank whose device keeps no adapters: every load succeeds immediately."""

    def __init__(self) -> None:
        self._facts: list[AdapterFact] = []

    def load(self, key: str, adapter: Adapter) -> None:
        self._facts.append(AdapterFact(key))

    def unload(self, adapter: Adapter) -> None:
        pass

    def poll(self) -> Sequence[AdapterFact]:
        facts, self._facts = self._facts, []
        return facts

    def close(self) -> None:
        pass


R = TypeVar("R", bound=HeldRequest)


@attrs.frozen(kw_only=True)
class LoraLimits:
    """Bounds of a ``LoraQueue``.

    Attributes:
        max_loaded: adapters that are loaded or being loaded. 8 as SGLang's ``max_loras_per_batch``.
        max_registered: adapters that requests may name. It bounds the labels of metrics.
        max_waiting: requests that wait for adapters.
        max_wait_s: how long a request may wait, and how long a load may take, the wait for a slot included.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    max_loaded: int = attrs.field(default=8, validator=integer_validator(at_most=64))
    max_registered: int = attrs.field(default=64, validator=integer_validator(at_most=1024))
    max_waiting: int = attrs.field(default=1024, validator=integer_validator())
    max_wait_s: float = attrs.field(default=60.0, validator=number_validator("is not a timeout"))


@dataclass(slots=True, kw_only=True, eq=False)
class _Registered(Generic[R]):
    """A registered adapter, or one that is being drained after it was unregistered. Equal on all ranks.

    Attributes:
        key: of its current load.
        users: ids of requests that use it.
        waiting: requests that wait for it.
        last_used: number of its last use.
        is_draining: it is evicted when no request uses it.
        reply_to: a ``register`` that waits for its first load.
    """

    adapter: Adapter
    is_pinned: bool = False
    state: _State = "unloaded"
    key: str = ""
    users: set[str] = field(default_factory=set)
    waiting: dict[str, R] = field(default_factory=dict)
    last_used: int = 0
    is_draining: bool = False
    reply_to: int | None = None

    @property
    def is_resident(self) -> bool:
        return self.state in ("loading", "loaded")


@dataclass(slots=True, kw_only=True)
class LoraQueue(Generic[R]):
    """The adapters of one rank and the requests that wait for them. A ``WaitingRoom`` of the scheduler.
    ``load_sections`` is for its load reports.

    Attributes:
        loader: loads and unloads adapters on this rank.
        limits: bounds.
        decisions: notes which adapter is loaded, evicted or drained.
        queue: the requests that wait.
    """

    loader: AdapterLoader = field(default_factory=NullAdapterLoader)
    limits: LoraLimits = field(default_factory=LoraLimits)
    decisions: DecisionSink = field(default_factory=NullDecisionLog)
    queue: AgreedQueue[R] = field(init=False)
    _loads: AgreedQueue[_Registered[R]] = field(init=False, repr=False)
    _registered: dict[str, _Registered[R]] = field(default_factory=dict, init=False, repr=False)
    _leaving: list[_Registered[R]] = field(default_factory=list, init=False, repr=False)
    _adapter_of: dict[str, _Registered[R]] = field(default_factory=dict, init=False, repr=False)
    _replies: list[ControlReply] = field(default_factory=list, init=False, repr=False)
    _numbers: count[int] = field(default_factory=lambda: count(1), init=False, repr=False)
    _uses: count[int] = field(default_factory=lambda: count(1), init=False, repr=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.queue = AgreedQueue(
            name="lora", max_wait_s=limits.max_wait_s, max_waiting=limits.max_waiting, decisions=self.decisions
        )
        # An adapter wanted earlier is loaded earlier, so the oldest are those that are being loaded.
        self._loads = AgreedQueue(
            name="lora load",
            max_wait_s=limits.max_wait_s,
            num_lanes=limits.max_loaded,
            in_turns=False,
            max_waiting=limits.max_registered + limits.max_loaded,
        )

    # --- between two steps, in one order on all ranks ---

    def register(self, name: str, path: str, *, is_pinned: bool = False, request_id: int | None = None) -> Adapter:
        """Add an adapter that requests may name.

        Args:
            name: unique among the registered adapters.
            path: where each rank finds its files.
            is_pinned: it is never evicted.
            request_id: also load it now, and return the outcome in ``pop_replies``. If the load fails, the adapter is
                not registered any more.

        Raises:
            ConfigError: the name is empty, too long or in use, or too many adapters are registered or pinned.
        """
        limits = self.limits
        if not 0 < len(name) <= _MAX_NAME_CHARACTERS:
            raise ConfigError("lora_name", name[:_MAX_SHOWN], "is empty or too long", "give 1 to 128 characters")
        if name in self._registered:
            raise ConfigError("lora_name", name, "is loaded already", "unload it first, or give another name")
        if len(self._registered) >= limits.max_registered:
            problem = f"is one more than the {limits.max_registered} adapters that may be registered"
            raise ConfigError("lora_name", name, problem, "unload one first")
        if is_pinned and sum(each.is_pinned for each in self._all()) >= limits.max_loaded - 1:
            problem = f"would leave no slot of the {limits.max_loaded} for other adapters"
            raise ConfigError("pinned", True, problem, "unload a pinned adapter, or do not pin this one")
        adapter = Adapter(name, path, next(self._numbers))
        found = self._registered[name] = _Registered(adapter=adapter, is_pinned=is_pinned, reply_to=request_id)
        if request_id is not None:
            self._want(found)
        return adapter

    def unregister(self, name: str) -> None:
        """Refuse new requests for an adapter. It is unloaded when the requests that use it have ended.

        Requests that wait for it fail.

        Raises:
            ConfigError: no such adapter is registered.
        """
        found = self._find("lora_name", name)
        del self._registered[name]
        found.is_pinned, found.is_draining = False, True
        self._leaving.append(found)
        self._fail(found, f"adapter {name!r} was unloaded")
        if found.state == "wanted":
            self._loads.cancel(found.key)
            found.state = "unloaded"

    def check(self, name: str | None) -> int | None:
        """Return the number of an adapter; None for the base model.

        Raises:
            ConfigError: no such adapter is registered.
        """
        return None if name is None else self._find("lora_path", name).adapter.lora_id

    def enter(self, request: R) -> bool:
        """Handle a new request. Return True if it waits for its adapter; False if it may run now.

        Raises:
            ConfigError: its adapter is not registered. Nothing has changed.
            QueueFullError: too many requests wait. Nothing has changed.
        """
        request.lora_id = self.check(request.hints.lora)
        if request.hints.lora is None:
            return False
        found, rid = self._registered[request.hints.lora], request.rid
        is_usable = found.state == "loaded" and not found.is_draining
        if not is_usable and not self.queue.add(rid, request):
            raise QueueFullError(self.queue.name, self.limits.max_waiting)
        self._adapter_of[rid] = found
        if is_usable:
            self._use(found, rid)
            return False
        found.waiting[rid] = request
        if found.state == "unloaded":
            self._want(found)
        return True

    def end(self, request: R) -> None:
        """Handle the end of a request, wherever it was. Safe to call twice."""
        found = self._adapter_of.pop(request.rid, None)
        if found is None:
            return
        self.queue.cancel(request.rid)
        if request.rid in found.users:
            found.users.remove(request.rid)
            found.last_used = next(self._uses)
        if found.waiting.pop(request.rid, None) is None:
            return
        if found.state == "wanted" and not found.waiting and found.reply_to is None:
            self._loads.cancel(found.key)
            found.state = "unloaded"

    def pop_replies(self) -> Sequence[ControlReply]:
        """Return the outcomes of ``register`` since the last call. Only their texts differ between ranks.

        Without a ``problem`` all ranks have loaded the adapter.
        """
        replies, self._replies = self._replies, []
        return replies

    # --- in a step ---

    def fill(self, proposal: Proposal) -> None:
        """Add which loads have ended on this rank."""
        for fact in self.loader.poll():
            if fact.problem:
                self._loads.on_failed(fact.key, fact.problem)
            else:
                self._loads.on_ready(fact.key)
        self._loads.fill(proposal)
        self.queue.fill(proposal)

    def apply(self, step: int, agreed: AgreedValues) -> None:
        """Apply the loads that all ranks agreed on, and begin the next ones.

        Raises:
            QueueDivergenceError: the ranks hold different requests or loads.
        """
        self._loads.apply(step, agreed)
        self.queue.apply(step, agreed)
        for departure in self._loads.pop_departures():
            self._on_load_ended(departure)
        if self._leaving or len(self._loads) or any(each.is_draining for each in self._registered.values()):
            self._assign_slots()

    # --- what others read ---

    @property
    def has_pending_loads(self) -> bool:
        """True while a load or an eviction is under way, so that the scheduler must take steps."""
        return bool(len(self._loads) or self._leaving)

    @property
    def adapters(self) -> Sequence[Adapter]:
        """The adapters that requests may name, in the order of their registration."""
        return tuple(each.adapter for each in self._registered.values())

    def load_sections(self) -> LoadSections:
        """Return the section of the adapters for load reports; none without an adapter. Read in every step."""
        return LoadSections(lora=self.lora_load()) if self._registered else _NO_SECTIONS

    def lora_load(self) -> LoraLoad:
        """Return the slots, and the requests of each registered adapter, for load reports."""
        resident, total = sum(each.is_resident for each in self._all()), self.limits.max_loaded
        adapters = tuple(
            AdapterLoad(each.adapter.name, len(each.users), len(each.waiting), each.state == "loaded")
            for each in self._registered.values()
        )
        return LoraLoad(
            slots_used=resident,
            slots_total=total,
            utilization=resident / total,
            running_adapters=tuple(each.name for each in adapters if each.num_running_reqs),
            waiting_adapters=tuple(each.name for each in adapters if each.num_waiting_reqs),
            by_adapter=adapters,
        )

    def stats(self) -> LoraStats:
        waits = self.queue.stats()
        return LoraStats(
            registered=len(self._registered),
            waiting=waits.waiting,
            requests_failed=waits.failed,
            requests_refused=waits.refused,
            **self._counts,
        )

    # --- decisions, by agreed values alone ---

    def _all(self) -> Iterator[_Registered[R]]:
        """Yield all adapters: the registered ones, then those that leave."""
        yield from self._registered.values()
        yield from self._leaving

    def _find(self, name: str, value: str) -> _Registered[R]:
        found = self._registered.get(value)
        if found is None:
            known = ", ".join([*self._registered][:_MAX_SHOWN]) or "none"
            raise ConfigError(name, value[:_MAX_NAME_CHARACTERS], "is no loaded adapter", f"give one of: {known}")
        return found

    def _use(self, found: _Registered[R], rid: str) -> None:
        found.users.add(rid)
        found.last_used = next(self._uses)

    def _want(self, found: _Registered[R]) -> None:
        found.state, found.key = "wanted", f"{found.adapter.lora_id}/{next(self._uses)}"
        self._loads.add(found.key, found)

    def _on_load_ended(self, departure: Departure[_Registered[R]]) -> None:
        found, adapter = departure.item, departure.item.adapter
        self.decisions.note("apply", "lora", departure.reason, adapter.lora_id)
        if departure.reason == "ready":
            found.state = "loaded"
            self._counts["loads"] += 1
            self._admit(found)
            self._reply(found, "")
            return
        if found.state == "loading":
            self.loader.unload(adapter)  # other ranks may have loaded it
        found.state = "unloaded"
        self._counts["loads_failed"] += 1
        problem = f"adapter {adapter.name!r} was not loaded: {departure.problem}"
        self._fail(found, problem)
        if found.reply_to is not None and self._registered.get(adapter.name) is found:
            del self._registered[adapter.name]
        self._reply(found, problem)

    def _admit(self, found: _Registered[R]) -> None:
        """Let the waiting requests of a loaded adapter run. They use it from now on, so none may wait for a lane."""
        for rid in found.waiting:
            self._use(found, rid)
            self.queue.depart(rid, "ready")
        found.waiting.clear()

    def _fail(self, found: _Registered[R], problem: str) -> None:
        """Fail the waiting requests of an adapter."""
        for rid in found.waiting:
            self.queue.depart(rid, "failed", problem)
        found.waiting.clear()

    def _reply(self, found: _Registered[R], problem: str) -> None:
        if found.reply_to is not None:
            self._replies.append(ControlReply(found.reply_to, problem))
            found.reply_to = None

    def _assign_slots(self) -> None:
        """Evict what leaves or is drained, load what is wanted, and drain adapters for the rest."""
        for found in self._leaving:
            if found.state == "loaded" and not found.users:
                self._evict(found)
            if found.state == "unloaded":
                self._reply(found, f"adapter {found.adapter.name!r} was unloaded")
        self._leaving = [found for found in self._leaving if found.state != "unloaded"]
        wanted = [found for found in self._loads if found.state == "wanted"]
        num_free = self.limits.max_loaded - sum(found.is_resident for found in self._all())
        while wanted and (num_free or self._evict_idle()):
            num_free = max(0, num_free - 1)
            found = wanted.pop(0)
            found.state = "loading"
            self.decisions.note("apply", "lora", "load", found.adapter.lora_id)
            self.loader.load(found.key, found.adapter)
        self._drain_for(len(wanted) - sum(found.is_resident for found in self._leaving))

    def _evict_idle(self) -> bool:
        """Evict the least recently used adapter that no request uses. Return False if there is none."""
        idle = [each for each in self._registered.values() if each.state == "loaded" and not each.users]
        victim = min((each for each in idle if not each.is_pinned), key=_order_of_eviction, default=None)
        if victim is None:
            return False
        self._evict(victim)
        return True

    def _evict(self, found: _Registered[R]) -> None:
        assert not found.users, f"{found.adapter} is evicted while requests use it"
        found.state, found.is_draining = "unloaded", False
        self._counts["evictions"] += 1
        self.decisions.note("apply", "lora", "evict", found.adapter.lora_id)
        self.loader.unload(found.adapter)
        if found.waiting:
            self._want(found)

    def _drain_for(self, num_wanted: int) -> None:
        """Drain as many adapters as are wanted without a slot, the least recently used ones."""
        in_use = [each for each in self._registered.values() if each.state == "loaded" and not each.is_pinned]
        in_use.sort(key=_order_of_eviction)
        for place, found in enumerate(in_use):
            is_draining = place < num_wanted
            if is_draining != found.is_draining:
                found.is_draining = is_draining
                self.decisions.note("apply", "lora", "drain" if is_draining else "keep", found.adapter.lora_id)
                if not is_draining:
                    self._admit(found)


def _order_of_eviction(found: _Registered[R]) -> tuple[bool, int]:
    """Adapters that are drained already come first, then the least recently used."""
    return not found.is_draining, found.last_used
