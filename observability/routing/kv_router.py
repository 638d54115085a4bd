"""KvRouter: sends each request where it costs least, by cached blocks and load."""

# What the router counts as load
# ==============================
#
# A load report is old when it arrives, and reports of all replicas are old together. A router that believes them sends
# every request of an interval to the replica that was idle at its start. So a request counts from the moment it is
# sent: its ledgers hold it until a report includes its ticket, and the report from then on. One ledger counts the
# tokens to compute, the other the tokens to hold; they issue the same tickets. A request that ends before a report
# includes it leaves the ledgers.
#
# The blocks of a request count as cached from the moment it is sent, too (``SpeculativeEntries``).

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import ClassVar, Protocol

import msgspec

from observability.kv_stream import BlockView
from observability.routing.cost_model import ReplicaId, RoutingCostModel
from observability.routing.hashed_prompt import HashedPrompt
from observability.routing.picker import Candidate, LeastCost, Picker
from observability.routing.replica_set import ReplicaSet
from observability.routing.speculative_entries import SpeculativeEntries
from scheduler_components import BlockStored, ConfigError, DecodeError, KVCacheEvent
from scheduler_components._internal.validators import check_integer
from scheduler_components.cache import PrefixNamespace
from scheduler_components.cache.block_hash import weight_key_of
from scheduler_components.events import Tier
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.load import DispatchLedger
from scheduler_components.load.token_counted_queue import MAX_DISPATCHER_NAME_CHARACTERS
from scheduler_components.values import LoadSnapshot

__all__ = ["KvRouter", "Pick", "RoutedRequest"]


_MAX_ADAPTERS = 4096
"""Adapters whose numbers are kept per replica, and those that are kept as sent there."""

_MAX_NAME_CHARACTERS = MAX_DISPATCHER_NAME_CHARACTERS - 12
"""Of a router's name. A ledger's name has a hyphen and the number of the ledger after it."""


class RoutedRequest(Protocol):
    """A request of a simulation, as far as the router reads and writes it.

    Attributes:
        token_ids: the prompt.
        conversation: its session.
        ticket: (dispatcher, ticket); the router writes it.
    """

    ticket: tuple[str, int] | None

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def conversation(self) -> str | None: ...


class Pick(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The choice for one request.

    Attributes:
        replica: that serves it.
        ticket: (dispatcher, ticket), to send with the request, so that load reports say when they include it.
        block_hashes: of the prompt's whole blocks.
        device_blocks, host_blocks, storage_blocks: cached blocks there: leading blocks on the device, blocks that
            follow on the host, and then in storage.
        cost: in blocks.
    """

    replica: ReplicaId
    ticket: tuple[str, int]
    block_hashes: tuple[int, ...]
    device_blocks: int
    host_blocks: int
    storage_blocks: int
    cost: float


@dataclass(slots=True, kw_only=True)
class _Replica:  # noqa: SCH003 - all that the router knows of one replica
    """What the router knows of one replica.

    Attributes:
        rank: its number in the view.
        page_size, cost_model: of the router.
        to_compute, to_hold: tokens of the requests that no report includes yet; both issue the same tickets.
        decoder: of its events.
        load: the last report.
        load_blocks: blocks to compute and to hold, of the last report and of the requests that it does not include.
        load_cost: the cost of these.
        num_dispatched: requests that were sent.
        open_tickets: of those that have not ended.
        adapters: loaded or waited for, in the last report.
        sent_adapters: adapters of the requests that were sent, with the last ticket of each.
        lora_ids: numbers of adapters, as its events say.
        weight_key: the part of its blocks' hashes that depends on the weights, as its events say; None for those that
            the engine started with.
    """

    rank: int
    page_size: int
    cost_model: RoutingCostModel
    to_compute: DispatchLedger
    to_hold: DispatchLedger
    decoder: BatchDecoder = field(default_factory=lambda: BatchDecoder(decode_tokens=False))
    load: LoadSnapshot = field(default_factory=LoadSnapshot)
    load_blocks: float = 0.0
    load_cost: float = 0.0
    num_dispatched: int = 0
    open_tickets: set[int] = field(default_factory=set)
    adapters: frozenset[str] = frozenset()
    sent_adapters: dict[str, int] = field(default_factory=dict)
    lora_ids: dict[str, int] = field(default_factory=dict)
    weight_key: str | None = None

    def _add_up(self) -> None:
        queued = (self.load.num_waiting_uncached_tokens + self.to_compute.unreported_tokens) / self.page_size
        held = (self.load.num_total_tokens + self.to_hold.unreported_tokens) / self.page_size
        self.load_blocks = queued + held
        self.load_cost = self.cost_model.load_cost(queued, held)

    def has_adapter(self, name: str) -> bool:
        return name in self.adapters or name in self.sent_adapters

    def note_namespace(self, event: BlockStored) -> None:
        """Note what a stored block says of the namespaces of later ones.

        Names of adapters come from a peer, so their number is bounded.
        """
        self.weight_key = weight_key_of(event.extra_keys)
        if event.lora_name is not None and event.lora_id is not None:
            self.lora_ids[event.lora_name] = event.lora_id
            if len(self.lora_ids) > _MAX_ADAPTERS:
                del self.lora_ids[next(iter(self.lora_ids))]

    def note_sent_adapter(self, name: str, ticket: int) -> None:
        """Note the adapter of a request. The name may come from a client, so their number is bounded."""
        self.sent_adapters.pop(name, None)
        self.sent_adapters[name] = ticket
        if len(self.sent_adapters) > _MAX_ADAPTERS:
            del self.sent_adapters[next(iter(self.sent_adapters))]

    def issue_ticket(self, num_uncached_tokens: int, num_tokens: int) -> int:
        self.num_dispatched += 1
        self.to_compute.issue_ticket(num_uncached_tokens)
        ticket = self.to_hold.issue_ticket(num_tokens)
        self.open_tickets.add(ticket)
        self._add_up()
        return ticket

    def end(self, ticket: tuple[str, int]) -> None:
        """Stop counting a request; one of a replica that has restarted since is ignored."""
        dispatcher, number = ticket
        if dispatcher == self.to_hold.dispatcher:
            self.open_tickets.discard(number)
            self.to_compute.cancel(number)
            self.to_hold.cancel(number)
            self._add_up()

    def take_report(self, load: LoadSnapshot) -> bool:
        """Take a report; return False for one that is not newer than the last."""
        if load.sequence <= self.load.sequence and load.timestamp <= self.load.timestamp and self.load.sequence:
            return False
        self.load = load
        self.to_compute.on_load_report(load.dispatched_watermarks)
        self.to_hold.on_load_report(load.dispatched_watermarks)
        self._add_up()
        if load.lora is not None:
            loaded = (each.name for each in load.lora.by_adapter if each.is_loaded or each.num_waiting_reqs)
            self.adapters = frozenset((*loaded, *load.lora.running_adapters, *load.lora.waiting_adapters))
        for dispatcher, number in load.dispatched_watermarks:
            if dispatcher == self.to_hold.dispatcher:
                self.sent_adapters = {name: sent for name, sent in self.sent_adapters.items() if sent > number}
        return True


@dataclass(slots=True, kw_only=True)
class KvRouter:
    """Chooses replicas. It satisfies ``scheduler_engine.simulation.Router``; a proxy calls ``route_tokens``.

    Attributes:
        page_size: tokens per block, as on the replicas.
        cost_model: of a request on a replica. A replica keeps the one with which it came up.
        picker: chooses by cost.
        replicas: which may get a request. ``on_replica_up`` adds them.
        view: the blocks of all replicas, by the number of a replica (``rank_of``).
        speculative: blocks that were sent and are not in the view yet.
        name: begins the names of its dispatch ledgers. Routers of the same replicas need different names, and so does a
            router that restarts.
        num_unreadable_batches: batches of events that could not be decoded.
        num_old_reports: reports that came after a newer one, and were ignored.
        num_other_page_sizes: events whose blocks have another size. Prompts never match them.

    Raises:
        ConfigError: the page size is below 1, or the name is not valid in a load report.
    """

    wants_events: ClassVar[bool] = True
    wants_load: ClassVar[bool] = True

    page_size: int
    cost_model: RoutingCostModel = field(default_factory=RoutingCostModel)
    picker: Picker = field(default_factory=LeastCost)
    replicas: ReplicaSet = field(default_factory=ReplicaSet)
    view: BlockView = field(default_factory=BlockView)
    speculative: SpeculativeEntries = field(default_factory=SpeculativeEntries)
    name: str = "kv-router"
    num_unreadable_batches: int = field(default=0, init=False)
    num_old_reports: int = field(default=0, init=False)
    num_other_page_sizes: int = field(default=0, init=False)
    _known: dict[ReplicaId, _Replica] = field(default_factory=dict, init=False, repr=False)
    _common_namespace: PrefixNamespace | None = field(default=None, init=False, repr=False)
    _num_ledgers: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("page_size", self.page_size)
        if len(self.name) > _MAX_NAME_CHARACTERS:
            hint = f"give at most {_MAX_NAME_CHARACTERS} characters; the names of its ledgers are longer"
            raise ConfigError("name", self.name, "is too long for a load report", hint)
        DispatchLedger(dispatcher=self.name)

    # --- choosing ---

    def route(self, request: RoutedRequest, now_s: float) -> int | None:
        """Choose the replica of a simulated request. Its conversation is its session, and replicas are integers."""
        pick = self.route_tokens(request.token_ids, now_s=now_s, session=request.conversation)
        if pick is None:
            return None
        request.ticket = pick.ticket
        assert isinstance(pick.replica, int), "the simulation names replicas by their index"
        return pick.replica

    def route_tokens(
        self,
        token_ids: Sequence[int],
        *,
        now_s: float,
        session: str | None = None,
        lora: str | None = None,
        namespace: PrefixNamespace | None = None,
        exclude: Collection[ReplicaId] = (),
    ) -> Pick | None:
        """Choose the replica of a prompt, and count the request there. Pass the pick to ``finish`` or ``cancel`` later.

        Args:
            token_ids: the prompt.
            now_s: monotonic seconds.
            session: requests of one session prefer one replica, with a picker that reads it.
            lora: name of the adapter.
            namespace: of the prompt's blocks; by default that of ``lora`` on each replica, as its events say.
            exclude: replicas that must not be picked, such as those that have failed this request.

        Returns:
            the choice; None if no replica may get a request.

        Raises:
            ConfigError: a token id does not fit u32.
        """
        prompt = HashedPrompt(token_ids=token_ids, page_size=self.page_size)
        prompt.hash_in(self.namespaces(lora=lora) if namespace is None else (namespace,))
        return self.route_prompt(prompt, now_s=now_s, session=session, lora=lora, namespace=namespace, exclude=exclude)

    def namespaces(self, *, lora: str | None = None) -> Collection[PrefixNamespace]:
        """Return the namespaces in which replicas have the blocks of a prompt for this adapter now.

        The number under which a replica has loaded an adapter, and the version of its weights after an update, are part
        of the hashes of its blocks. Its events name both.
        """
        return self._by_namespace(tuple(self._known), lora).keys()

    def route_prompt(
        self,
        prompt: HashedPrompt,
        *,
        now_s: float,
        session: str | None = None,
        lora: str | None = None,
        namespace: PrefixNamespace | None = None,
        exclude: Collection[ReplicaId] = (),
    ) -> Pick | None:
        """Choose the replica of a prompt that was hashed before, in ``namespace`` or in ``namespaces(lora=lora)``.

        Nothing counts as cached on a replica whose namespace has changed since.
        """
        names = self.replicas.up(now_s)
        if exclude:
            names = [name for name in names if name not in exclude]
        if not names:
            return None
        candidates = self.candidates(names, prompt, now_s=now_s, lora=lora, namespace=namespace)
        chosen = self.picker.pick(candidates, session=session, now_s=now_s)
        space = namespace or next(iter(self._by_namespace((chosen.replica,), lora)))
        return self._dispatch(chosen, prompt, space, now_s=now_s, lora=lora)

    def _by_namespace(
        self, names: Sequence[ReplicaId], lora: str | None
    ) -> Mapping[PrefixNamespace, Sequence[ReplicaId]]:
        """Return replicas by the namespace of an adapter's blocks, in their order.

        Before the first event names the number of the adapter on a replica, the number on another one is assumed.
        """
        if lora is None and self._common_namespace is not None:
            return {self._common_namespace: names}
        known = self._known
        numbers = () if lora is None else [each.lora_ids[lora] for each in known.values() if lora in each.lora_ids]
        usual = numbers[0] if numbers else None
        groups: dict[PrefixNamespace, list[ReplicaId]] = {}
        for name in names:
            number = usual if lora is None else known[name].lora_ids.get(lora, usual)
            space = PrefixNamespace(lora_id=number, lora_name=lora, extra_key=known[name].weight_key)
            groups.setdefault(space, []).append(name)
        return groups

    def candidates(
        self,
        names: Sequence[ReplicaId],
        prompt: HashedPrompt,
        *,
        now_s: float,
        lora: str | None = None,
        namespace: PrefixNamespace | None = None,
    ) -> list[Candidate]:
        """Return what a prompt costs on replicas. The arguments are those of ``route_prompt``."""
        groups = self._by_namespace(names, lora) if namespace is None else {namespace: names}
        model, prompt_blocks = self.cost_model, len(prompt.token_ids) / self.page_size
        found: list[Candidate] = []
        for space, members in groups.items():
            replicas = [self._known[name] for name in members]
            overlaps = self.overlaps(members, prompt.hashes_in(space), now_s=now_s)
            costs = {each: model.prefill_cost(prompt_blocks, each) for each in set(overlaps)}
            found += [
                Candidate(name, costs[each] + replica.load_cost, each, replica.load_blocks, replica.num_dispatched)
                for name, replica, each in zip(members, replicas, overlaps, strict=True)
            ]
        if lora is None:
            return found
        return [
            each
            if self._known[each.replica].has_adapter(lora)
            else msgspec.structs.replace(each, cost=each.cost + model.lora_weight)
            for each in found
        ]

    def overlaps(
        self, names: Sequence[ReplicaId], hashes: Sequence[int], *, now_s: float
    ) -> list[tuple[int, int, int]]:
        """Return the cached blocks of a prompt on replicas, in the order of ``names``.

        Each triple has the leading blocks on the device, those that follow on the host, and those that follow in
        storage. Blocks that were sent and are not confirmed yet count as on the device.
        """
        ranks = [self._known[name].rank for name in names]
        on_device = self._with_speculative(names, ranks, hashes, now_s)
        if not (self.view.has_blocks(Tier.HOST) or self.view.has_blocks(Tier.STORAGE)):
            shared = {depth: (depth, 0, 0) for depth in set(on_device)}
            return [shared[depth] for depth in on_device]
        on_host = self._continued(ranks, hashes, on_device, Tier.HOST)
        up_to_host = list(map(add, on_device, on_host))
        return list(zip(on_device, on_host, self._continued(ranks, hashes, up_to_host, Tier.STORAGE), strict=True))

    def _with_speculative(
        self, names: Sequence[ReplicaId], ranks: Sequence[int], hashes: Sequence[int], now_s: float
    ) -> list[int]:
        """Return the length of the prefix whose blocks are each on the device or speculative, for each replica."""
        found = self.view.match_lengths(hashes)
        depths, sent = [found.get(rank, 0) for rank in ranks], self.speculative.replicas
        if not sent:
            return depths
        extend, later = self.speculative.extend, dict[int, dict[int, int]]()
        for place, name in enumerate(names):
            depth = depths[place]
            while name in sent and (further := extend(name, hashes, depth, now_s)) > depth:
                if further < len(hashes) and further not in later:
                    later[further] = self.view.match_lengths(hashes[further:])
                depth = further + later[further].get(ranks[place], 0) if further in later else further
            depths[place] = depth
        return depths

    def _continued(self, ranks: Sequence[int], hashes: Sequence[int], depths: Sequence[int], tier: Tier) -> list[int]:
        """Return how many blocks follow on a tier after each rank's own depth."""
        if not self.view.has_blocks(tier):
            return [0] * len(ranks)
        by_depth = {depth: self.view.match_lengths(hashes[depth:], tier) for depth in set(depths)}
        return [by_depth[depth].get(rank, 0) for rank, depth in zip(ranks, depths, strict=True)]

    def _dispatch(
        self, chosen: Candidate, prompt: HashedPrompt, space: PrefixNamespace, *, now_s: float, lora: str | None
    ) -> Pick:
        """Count the request on the chosen replica."""
        replica, (on_device, on_host, in_storage) = self._known[chosen.replica], chosen.overlap
        hashes, num_tokens = prompt.hashes_in(space), len(prompt.token_ids)
        uncached_blocks = self.cost_model.uncached_blocks(num_tokens / self.page_size, chosen.overlap)
        ticket = replica.issue_ticket(round(uncached_blocks * self.page_size), num_tokens)
        if lora is not None:
            replica.note_sent_adapter(lora, ticket)
        self.speculative.add(chosen.replica, hashes[on_device:], now_s)
        return Pick(
            replica=chosen.replica,
            ticket=(replica.to_hold.dispatcher, ticket),
            block_hashes=hashes,
            device_blocks=on_device,
            host_blocks=on_host,
            storage_blocks=in_storage,
            cost=chosen.cost,
        )

    # --- what becomes of requests ---

    def finish(self, pick: Pick) -> None:
        """Stop counting a request that has ended."""
        self._end(pick.replica, pick.ticket)

    def cancel(self, pick: Pick) -> None:
        """Stop counting a request that could not be sent, and its blocks."""
        self._end(pick.replica, pick.ticket)
        self.speculative.discard(pick.replica, pick.block_hashes[pick.device_blocks :])

    def on_finished(self, replica: ReplicaId, request: RoutedRequest, now_s: float) -> None:
        if request.ticket is not None:
            self._end(replica, request.ticket)

    def _end(self, name: ReplicaId, ticket: tuple[str, int]) -> None:
        replica = self._known.get(name)
        if replica is not None:
            replica.end(ticket)

    # --- what replicas say ---

    def on_events(self, replica: ReplicaId, payload: bytes, now_s: float) -> None:
        """Apply an encoded batch of KV events. One that cannot be decoded costs itself and a counter."""
        known = self._known.get(replica)
        if known is None:
            return
        try:
            batch = known.decoder.decode(payload)
        except DecodeError:
            self.num_unreadable_batches += 1
            return
        self.apply_events(replica, batch.events, now_s)

    def apply_events(
        self, replica: ReplicaId, events: Sequence[KVCacheEvent], now_s: float, *, staging: BlockView | None = None
    ) -> None:
        """Apply decoded KV events of a replica; those of an unknown one are ignored.

        Args:
            replica: that published them.
            events: in order.
            now_s: monotonic seconds.
            staging: the view in which a snapshot is built, created by ``view.create_staging()``; None for ``view``.
        """
        known = self._known.get(replica)
        if known is None:
            return
        self.replicas.on_heartbeat(replica, now_s)
        (self.view if staging is None else staging).apply(known.rank, events)
        self.speculative.on_events(replica, events)
        weight_key = known.weight_key
        for event in events:
            if isinstance(event, BlockStored):
                self.num_other_page_sizes += event.block_size != self.page_size
                known.note_namespace(event)
        if known.weight_key != weight_key:
            self._compare_weights()

    def clear_blocks(self, replica: ReplicaId) -> None:
        """Forget the blocks of a replica, because its stream cannot be followed. What was sent still counts."""
        known = self._known.get(replica)
        if known is not None:
            self.view.clear(known.rank)

    def replace_blocks(self, replica: ReplicaId, staging: BlockView) -> None:
        """Replace the blocks of a replica by those of a staging view."""
        known = self._known.get(replica)
        if known is None:
            self.view.discard_staging(staging)
        else:
            self.view.replace(known.rank, staging)

    def on_load_report(self, replica: ReplicaId, load: LoadSnapshot, now_s: float) -> None:
        """Take a load report as the new load of a replica, unless a newer one came before it."""
        known = self._known.get(replica)
        if known is None:
            return
        self.replicas.on_heartbeat(replica, now_s)
        self.num_old_reports += not known.take_report(load)

    # --- replicas that come and go ---

    def on_replica_up(self, replica: ReplicaId, now_s: float) -> None:
        """Add a replica with an empty cache. One that is known has restarted: what was known of it is forgotten."""
        self.remove_replica(replica)
        taken = {known.rank for known in self._known.values()}
        rank = next(number for number in range(len(taken) + 1) if number not in taken)
        self._num_ledgers += 1
        name = f"{self.name}-{self._num_ledgers}"
        self._known[replica] = _Replica(
            rank=rank,
            page_size=self.page_size,
            cost_model=self.cost_model,
            to_compute=DispatchLedger(dispatcher=name),
            to_hold=DispatchLedger(dispatcher=name),
        )
        self.replicas.add(replica, now_s)
        self._compare_weights()

    def on_replica_down(self, replica: ReplicaId, now_s: float) -> None:
        """Remove a replica that has failed."""
        self.remove_replica(replica)

    def remove_replica(self, replica: ReplicaId) -> None:
        """Forget a replica, its blocks and its requests; an unknown one is ignored."""
        known = self._known.pop(replica, None)
        if known is not None:
            self.replicas.remove(replica)
            self.view.clear(known.rank)
            self.speculative.clear(replica)
            self._compare_weights()

    def _compare_weights(self) -> None:
        """Note the namespace of the base model's blocks, if it is the same on all replicas, as it nearly always is."""
        keys = {known.weight_key for known in self._known.values()}
        self._common_namespace = PrefixNamespace(extra_key=keys.pop()) if len(keys) == 1 else None

    def rank_of(self, replica: ReplicaId) -> int | None:
        """Return the number of a replica in the view; None for an unknown one."""
        known = self._known.get(replica)
        return None if known is None else known.rank

    def load_blocks(self, replica: ReplicaId) -> float:
        """Return the load that counts for a replica: blocks to compute and to hold; 0 for an unknown one."""
        known = self._known.get(replica)
        return 0.0 if known is None else known.load_blocks

    def num_in_flight(self, replica: ReplicaId) -> int:
        """Return how many requests were sent to a replica and have not ended."""
        known = self._known.get(replica)
        return 0 if known is None else len(known.open_tickets)
