"""Checks of a port plan: where the streams of an engine listen, and where readers dial.

Run each of ``ENDPOINT_CHECKS`` on a port plan of your own. A check takes a ``PortPlanner`` and what it promises. It
gives the planner base addresses as an operator writes them, and asks each rank of an engine what it binds. A planner
may refuse addresses with a ``ValueError``. If it does not, every stream has its own valid addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import combinations, permutations

import msgspec

from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ConfigError
from scheduler_components.kv_events import Endpoint
from scheduler_components.kv_events.endpoints import MAX_PORT
from scheduler_components.testing.check_trace import CheckTrace, checks_in
from scheduler_components.testing.interfaces import PortPlanner
from scheduler_components.testing.topology_space import (
    DataParallelism,
    Topology,
    TopologyRank,
    make_topology,
    topologies,
)

__all__ = ["ENDPOINT_CHECKS", "EndpointPromises", "dial_base_plus_rank"]


class EndpointPromises(msgspec.Struct, frozen=True):
    """What a port plan promises.

    Attributes:
        kinds: what it plans, of ``events``, ``replay`` and ``load``; ``events`` is always one of them.
        transports: the transports that it accepts, of ``tcp``, ``ipc`` and ``inproc``.
        adds_rank: stream r of tcp listens at the base port + r, as readers of SGLang, vLLM and Dynamo compute it.
        chooses_ports: port 0 lets the system choose the port of each stream.
    """

    kinds: tuple[str, ...] = ("events", "replay", "load")
    transports: tuple[str, ...] = ("tcp", "ipc", "inproc")
    adds_rank: bool = True
    chooses_ports: bool = True


_ALL_PROMISES = EndpointPromises()

Bases = dict[str, str]
Bound = dict[tuple[int, str], Endpoint]
"""What an engine binds, by cache and kind."""


def dial_base_plus_rank(bases: Mapping[str, str], stream: int, num_streams: int, host: str) -> dict[str, str]:
    """Return the addresses that SGLang's gateway and Dynamo compute: base + rank, at the host of the worker.

    It is the ``PortPlanner.dial`` of an engine whose readers others have written.
    """
    check_integer("num_streams", num_streams, "is not a number of streams")
    if not 0 <= stream < num_streams:
        raise ConfigError("stream", stream, f"is not one of {num_streams} streams", f"give 0 to {num_streams - 1}")
    dialed = dict[str, str]()
    for kind, text in bases.items():
        endpoint = Endpoint.parse(text).offset(stream)
        dialed[kind] = str(endpoint.with_host(host) if endpoint.is_wildcard else endpoint)
    return dialed


def check_each_stream_has_its_own_addresses(planner: PortPlanner, promises: EndpointPromises = _ALL_PROMISES) -> None:
    """In every topology each replica's stream has one address of each kind, and no two are equal."""
    for topology in topologies():
        use = _Use("Each stream has its own addresses", planner, topology)
        use.require_bound(_bases(promises))


def check_only_configured_kinds_are_bound(planner: PortPlanner, promises: EndpointPromises = _ALL_PROMISES) -> None:
    """Replay and load are optional, each by itself."""
    optional = [kind for kind in promises.kinds if kind != "events"]
    for topology in _few_topologies():
        for count in range(len(optional) + 1):
            for chosen in combinations(optional, count):
                use = _Use("Only what is configured is bound", planner, topology)
                use.require_bound(_bases(promises, ("events", *chosen)))


def check_every_form_of_address_is_planned(planner: PortPlanner, promises: EndpointPromises = _ALL_PROMISES) -> None:
    """Wildcards, IPv4, IPv6, names and paths keep their host or path, whatever words they contain."""
    for topology in _few_topologies():
        for transport, pattern in _FORMS:
            if transport in promises.transports:
                use = _Use("The address of a stream keeps the host or path of its base", planner, topology)
                bases = _bases(promises, pattern=pattern)
                for (_, kind), endpoint in use.require_bound(bases).items():
                    base = Endpoint.parse(bases[kind])
                    same = endpoint.host == base.host and endpoint.path.startswith(base.path)
                    use.trace.require(
                        same and endpoint.transport == base.transport, f"{kind} at {bases[kind]}", str(endpoint)
                    )


def check_ports_are_base_plus_rank(planner: PortPlanner, promises: EndpointPromises = _ALL_PROMISES) -> None:
    """Stream r listens at each base port + r, on every node. Streams of the first replica listen at the bases."""
    if not promises.adds_rank:
        return
    for topology in _few_topologies():
        use = _Use("Stream r listens at base + r", planner, topology)
        bases = _bases(promises)
        for (cache, kind), endpoint in use.require_bound(bases).items():
            port = Endpoint.parse(bases[kind]).offset(cache).port
            use.trace.expect(port, endpoint.port, f"the port of the {kind} of stream {cache}")


def check_readers_dial_what_publishers_bind(planner: PortPlanner, promises: EndpointPromises = _ALL_PROMISES) -> None:
    """A reader that knows the bases, the number of streams and the host of a stream reaches each of its addresses."""
    for topology in _few_topologies():
        for transport, pattern in _FORMS:
            if transport in promises.transports and transport != "inproc":
                _check_dialed(
                    _Use("Readers dial what publishers bind", planner, topology), _bases(promises, pattern=pattern)
                )


def _check_dialed(use: _Use, bases: Bases) -> None:
    bound = use.require_bound(bases)
    for cache in range(use.topology.num_caches):
        for host in _READER_HOSTS:
            step = f"dial({bases}, stream {cache} of {use.topology.num_caches}, host {host!r})"
            dial = partial(use.planner.dial, bases, cache, use.topology.num_caches, host)
            dialed = use.trace.call(step, dial)
            for kind in bases:
                at = bound[cache, kind]
                expected = at.with_host(host) if at.is_wildcard else at
                found = dialed.get(kind)
                same = found is not None and _parsed(found) == expected
                use.trace.require(same, f"the {kind} of stream {cache} at {expected}", found)


def check_ports_beyond_the_last_are_refused(planner: PortPlanner, promises: EndpointPromises = _ALL_PROMISES) -> None:
    """A range may end at port 65535. One that would end behind it is refused: libzmq binds port 65536 + n as n."""
    for topology in _few_topologies():
        for kind in promises.kinds:
            last = MAX_PORT + 1 - topology.num_caches
            use = _Use("A range of ports may end at 65535, and not behind it", planner, topology)
            use.require_bound(_bases(promises) | {kind: f"tcp://*:{last}"})
            for port in range(last + 1, MAX_PORT + 1):
                use.bind(_bases(promises) | {kind: f"tcp://*:{port}"})
            for port in (MAX_PORT + 1, 70_000):
                use.require_refused(_bases(promises) | {kind: f"tcp://*:{port}"})


def check_overlapping_ranges_are_refused(planner: PortPlanner, promises: EndpointPromises = _ALL_PROMISES) -> None:
    """Ranges that share an address are refused, also with different hosts. Ranges next to each other are accepted."""
    for topology in _few_topologies():
        for one, other in permutations(promises.kinds, 2):
            count = topology.num_caches
            use = _Use("Two ranges share no address", planner, topology)
            use.require_bound(_bases(promises) | {one: f"tcp://*:{9000 + count}", other: "tcp://*:9000"})
            for host in ("*", "[::]", "127.0.0.1"):
                for distance in range(count):
                    use.bind(_bases(promises) | {one: f"tcp://*:{9000 + distance}", other: f"tcp://{host}:9000"})
            for transport in promises.transports:
                if transport != "tcp":
                    for suffix in ("", *(f"_dp{number}" for number in range(1, count))):
                        use.bind(
                            _bases(promises) | {one: f"{transport}://shared", other: f"{transport}://shared{suffix}"}
                        )


def check_port_0_stays_0(planner: PortPlanner, promises: EndpointPromises = _ALL_PROMISES) -> None:
    """Port 0 lets the system choose a port for each stream: an offset would bind ports 1, 2 and 3."""
    if not promises.chooses_ports:
        return
    for topology in _few_topologies():
        for host in ("*", "[::]"):
            use = _Use("Port 0 is no base of a range", planner, topology)
            for (cache, kind), endpoint in use.require_bound(_bases(promises, pattern=f"tcp://{host}:0")).items():
                use.trace.expect(0, endpoint.port, f"the port of the {kind} of stream {cache}")


def check_bad_addresses_are_refused(planner: PortPlanner, promises: EndpointPromises = _ALL_PROMISES) -> None:
    """An address that libzmq cannot bind, or that no reader can parse, is refused with a ``ValueError`` of one line."""
    for topology in (make_topology(), make_topology(dp=2)):
        for kind in promises.kinds:
            for text in _BAD_ADDRESSES:
                use = _Use("A bad address is refused", planner, topology)
                use.require_refused(_bases(promises) | {kind: text})


def check_each_rank_plans_alone(planner: PortPlanner, promises: EndpointPromises = _ALL_PROMISES) -> None:
    """A rank binds the same addresses whichever rank was asked before, because each is a process of its own."""
    for topology in _few_topologies():
        use = _Use("A rank plans alone: asking others before changes nothing", planner, topology)
        bases = _bases(promises)
        forward = [use.bound_by(rank, bases) for rank in topology.ranks]
        use.trace.note("asked the ranks again, the last one first")
        backward = [use.bound_by(rank, bases) for rank in reversed(topology.ranks)]
        for rank, first, second in zip(topology.ranks, forward, reversed(backward), strict=True):
            use.trace.expect(first, second, f"what {rank} binds")


class _Use:
    """One planner, asked about one topology.

    Args:
        title: the promise that is checked.
        planner: the planner under check.
        topology: the engine.
    """

    def __init__(self, title: str, planner: PortPlanner, topology: Topology) -> None:
        self.trace = CheckTrace(title)
        self.trace.note(f"{topology.name}: {len(topology.ranks)} ranks")
        self.planner = planner
        self.topology = topology
        self.refusal = ""

    def require_bound(self, bases: Bases) -> Bound:
        """Bind on every rank; the planner must not refuse."""
        bound = self.bind(bases)
        if bound is None:
            raise self.trace.failure("addresses for every stream", f"refused: {self.refusal}")
        return bound

    def require_refused(self, bases: Bases) -> None:
        """Bind on every rank; one of them must refuse."""
        bound = self.bind(bases)
        self.trace.require(bound is None, "a ValueError", bound and _written(bound.values()))

    def bind(self, bases: Bases) -> Bound | None:
        """Bind on every rank. Return None if one refuses, else what is bound: valid, complete, and all different."""
        self.trace.note(f"every rank binds {bases}")
        bound: Bound = {}
        for rank, cache in zip(self.topology.ranks, self.topology.caches, strict=True):
            try:
                addresses = self.bound_by(rank, bases)
            except ValueError as error:
                self.refusal = str(error)
                is_one_line = bool(self.refusal.strip()) and "\n" not in self.refusal
                self.trace.require(is_one_line, "an error of one line", f"{type(error).__name__}: {error}")
                return None
            for kind, text in addresses.items():
                endpoint = _parsed(text)
                if endpoint is None or (endpoint.port == 0 and not bases.get(kind, "").endswith((":0", ":*"))):
                    raise self.trace.failure(f"an address for the {kind} of {rank}", repr(text))
                before = bound.setdefault((cache, kind), endpoint)
                self.trace.require(before is endpoint, f"one rank of cache {cache} that binds {kind}", f"also {rank}")
        expected = {(cache, kind) for cache in range(self.topology.num_caches) for kind in bases}
        self.trace.expect(sorted(expected), sorted(bound), "what is bound, by stream and kind")
        self._check_apart(bound)
        return bound

    def bound_by(self, rank: TopologyRank, bases: Bases) -> dict[str, str]:
        """Return what one rank binds.

        Raises:
            ValueError: the planner refuses the bases.
        """
        try:
            return dict(self.planner.bind(rank, dict(bases)))
        except ValueError:
            raise
        except Exception as error:
            self.trace.note(f"bind({rank}) with {rank.parallel!r}")
            raise self.trace.failure("addresses or a ValueError", f"{type(error).__name__}: {error}") from error

    def _check_apart(self, bound: Bound) -> None:
        places: dict[tuple[str, object], tuple[int, str]] = {}
        for (cache, kind), endpoint in bound.items():
            if endpoint.port == 0:
                continue
            other = places.setdefault((endpoint.transport, endpoint.port or endpoint.path), (cache, kind))
            same = f"{kind} of stream {cache} and {other[1]} of stream {other[0]}"
            self.trace.require(other == (cache, kind), "different addresses", f"{same} both at {endpoint}")


def _parsed(text: str) -> Endpoint | None:
    try:
        return Endpoint.parse(text)
    except ConfigError:
        return None


def _written(endpoints: Iterable[Endpoint]) -> str:
    return ", ".join(map(str, endpoints))


def _bases(
    promises: EndpointPromises, kinds: tuple[str, ...] | None = None, *, pattern: str = "tcp://*:{port}"
) -> Bases:
    """Return a base address of each kind, far from each other. ``{port}`` and ``{kind}`` of the pattern differ."""
    chosen = promises.kinds if kinds is None else kinds
    return {kind: pattern.format(port=5557 + 100 * number, kind=kind) for number, kind in enumerate(chosen)}


_FORMS = (
    ("tcp", "tcp://*:{port}"),
    ("tcp", "tcp://0.0.0.0:{port}"),
    ("tcp", "tcp://[::]:{port}"),
    ("tcp", "tcp://127.0.0.1:{port}"),
    ("tcp", "tcp://[2001:db8::5]:{port}"),
    ("tcp", "tcp://inproc-3.example:{port}"),
    ("ipc", "ipc:///tmp/kv-{kind}"),
    ("ipc", "ipc:///tmp/tcp:1/inproc-{kind}"),
    ("ipc", "ipc://@kv-{kind}"),
    ("inproc", "inproc://kv-{kind}"),
    ("inproc", "inproc://tcp:{port}-{kind}"),
)
"""Transports, and base addresses of them as operators write them."""

_READER_HOSTS = ("10.0.0.7", "worker-3.example", "2001:db8::9")

_BAD_ADDRESSES = (
    "",
    "5557",
    "*:5557",
    "tcp://",
    "tcp://*",
    "tcp://*:",
    "tcp://*:port",
    "tcp://*:-1",
    "tcp://:::5557",
    "udp://*:5557",
)


def _few_topologies() -> Iterator[Topology]:
    """Yield engines of 1 to 3 streams, each form of data parallelism, with and without other axes and nodes."""
    yield make_topology(cp=2, tp=2, pp=2)
    yield make_topology(mode="plain, dp_rank None")
    for dp in (2, 3):
        yield make_topology(dp=dp)
        yield make_topology(dp=dp, tp=2, num_nodes=dp)
        modes: tuple[DataParallelism, ...] = ("attention", "attention, dp_rank None")
        for mode in modes:
            yield make_topology(dp=dp, mode=mode)
            yield make_topology(dp=dp, cp=2, pp=2, mode=mode, num_nodes=dp)


ENDPOINT_CHECKS: tuple[Callable[[PortPlanner, EndpointPromises], None], ...] = checks_in(globals())
"""All checks of a port plan."""
