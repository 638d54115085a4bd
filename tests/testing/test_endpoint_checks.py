"""The checks of port plans pass on ``PortPlan``, and find each broken plan, and the known faults of engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise

import pytest
from kit.engine_stream_rules import (
    SGLANG_EVENTS,
    VLLM_EVENTS,
    EnginePlan,
    offset_sglang_endpoint,
    offset_vllm_endpoint,
)
from kit.variants import found, instead_of, variants

from observability.kv_stream import parse_addresses, parse_worker_url
from scheduler_components import ConfigError, kv_events_server_info
from scheduler_components.kv_events import Endpoint, KVEventsConfig, PortPlan
from scheduler_components.testing import (
    ENDPOINT_CHECKS,
    ConformanceError,
    EndpointPromises,
    TopologyRank,
    make_topology,
)
from scheduler_components.testing import endpoint_checks as checks
from scheduler_components.testing.interfaces import PortPlanner

SETTINGS = {"events": "endpoint", "replay": "replay_endpoint", "load": "load_endpoint"}


def config_of(bases: Mapping[str, str]) -> KVEventsConfig:
    return KVEventsConfig.model_validate({"publisher": "zmq"} | {SETTINGS[kind]: base for kind, base in bases.items()})


@lru_cache(maxsize=64)
def _plan(bases: tuple[tuple[str, str], ...], num_streams: int) -> PortPlan:
    return config_of(dict(bases)).port_plan(num_streams)


def plan_of(bases: Mapping[str, str], num_streams: int) -> PortPlan:
    """Return the plan of a configuration. All ranks ask for the same one, one after another."""
    return _plan(tuple(bases.items()), num_streams)


class KitPlan:
    """The kit's own publishers and readers: ``PortPlan``, and ``/server_info`` as the subscriber reads it."""

    def bind(self, rank: TopologyRank, bases: Mapping[str, str]) -> dict[str, str]:
        parallel = rank.parallel
        plan = plan_of(bases, parallel.kv_stream_count)
        if not parallel.owns_kv_stream:
            return {}
        index = parallel.kv_stream_index
        planned = {
            "events": plan.event_endpoint(index),
            "replay": plan.replay_endpoint(index),
            "load": plan.load_endpoint(index),
        }
        return {kind: str(endpoint) for kind, endpoint in planned.items() if endpoint is not None}

    def dial(self, bases: Mapping[str, str], stream: int, num_streams: int, host: str) -> dict[str, str]:
        if not bases["events"].startswith("tcp"):
            return checks.dial_base_plus_rank(bases, stream, num_streams, host)
        info = kv_events_server_info(config_of(bases), block_size=16, dp_size=num_streams)
        worker = parse_worker_url(f"http://[{host}]:30000" if ":" in host else f"http://{host}:30000")
        address = parse_addresses(info, worker)[stream]
        dialed = {"events": address.events, "replay": address.replay, "load": address.load}
        return {kind: str(endpoint) for kind, endpoint in dialed.items() if endpoint is not None}


@pytest.mark.parametrize("check", ENDPOINT_CHECKS)
def test_the_port_plan_passes(check: Callable[[PortPlanner, EndpointPromises], None]) -> None:
    check(KitPlan(), EndpointPromises())


def failed(planner: PortPlanner, promises: EndpointPromises) -> dict[str, str]:
    """Return the checks that a planner fails, without their prefix, with the text of each error."""
    found = {}
    for check in ENDPOINT_CHECKS:
        try:
            check(planner, promises)
        except ConformanceError as error:
            found[check.__name__.removeprefix("check_")] = str(error)
    return found


BOTH = EndpointPromises(kinds=("events", "replay"), transports=("tcp", "inproc"))
"""What SGLang and vLLM plan by offsets. vLLM has no load endpoint, and SGLang plans its own and checks overlaps."""

ENGINE_FAULTS = {
    "every_form_of_address_is_planned": "_dp1",
    "readers_dial_what_publishers_bind": "_dp1",
    "ports_beyond_the_last_are_refused": "65536",
    "overlapping_ranges_are_refused": "both at",
    "bad_addresses_are_refused": "{'events': '', ",
}
"""Faults of both: a host named inproc-3 gets a suffix, ranges pass 65535 or overlap, bad addresses reach libzmq."""

ENGINES: dict[str, tuple[EnginePlan, dict[str, str]]] = {
    "SGLang 0.5.23": (
        EnginePlan(SGLANG_EVENTS, offset_sglang_endpoint),
        ENGINE_FAULTS | {"port_0_stays_0": "tcp://*:0"},
    ),
    "vLLM 0.32": (EnginePlan(VLLM_EVENTS, offset_vllm_endpoint), ENGINE_FAULTS),
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_faults_of_an_engine_are_found(name: str) -> None:
    planner, faults = ENGINES[name]
    found = failed(planner, BOTH)
    assert found.keys() == faults.keys()
    for check, text in faults.items():
        assert text in found[check], found[check]


@pytest.mark.parametrize("name", ENGINES)
def test_engines_refuse_ipc_of_a_second_replica(name: str) -> None:
    planner, _ = ENGINES[name]
    with pytest.raises(ConformanceError, match="refused: Invalid endpoint: must contain 'inproc' or 'tcp'"):
        checks.check_every_form_of_address_is_planned(planner, EndpointPromises(kinds=("events",), transports=("ipc",)))


def test_a_failure_names_the_topology_the_bases_and_both_streams() -> None:
    planner, _ = ENGINES["vLLM 0.32"]
    with pytest.raises(ConformanceError) as error:
        checks.check_overlapping_ranges_are_refused(planner, BOTH)
    assert str(error.value) == (
        "Two ranges share no address\n"
        "  1. DP 1 (plain) x CP 2 x TP 2 x PP 2 on 1 node from GPU 0: 8 ranks\n"
        "  2. every rank binds {'events': 'tcp://*:9001', 'replay': 'tcp://*:9000'}\n"
        "  3. every rank binds {'events': 'tcp://*:9000', 'replay': 'tcp://*:9000'}\n"
        "  expected: different addresses\n"
        "  found:    replay of stream 0 and events of stream 0 both at tcp://*:9000"
    )


def test_readers_of_others_dial_base_plus_rank() -> None:
    bases = {"events": "tcp://*:5557", "replay": "tcp://127.0.0.1:6000", "load": "ipc:///tmp/load"}
    assert checks.dial_base_plus_rank(bases, 2, 3, "2001:db8::1") == {
        "events": "tcp://[2001:db8::1]:5559",
        "replay": "tcp://127.0.0.1:6002",
        "load": "ipc:///tmp/load_dp2",
    }
    with pytest.raises(ConfigError, match="stream=3"):
        checks.dial_base_plus_rank(bases, 3, 3, "worker")


# Port plans as authors of engines write them, each right but for one thing.


class Plan(KitPlan):
    """The right plan, with a step that a variant replaces."""

    def stream(self, rank):
        """Return the stream of a rank, None for a silent rank."""
        return rank.parallel.kv_stream_index if rank.parallel.owns_kv_stream else None

    def bind(self, rank, bases):
        self.refuse(rank, bases)
        index = self.stream(rank)
        return {} if index is None else {kind: self.place(kind, base, index, rank) for kind, base in bases.items()}

    def refuse(self, rank, bases):
        plan_of(bases, rank.parallel.kv_stream_count)

    def place(self, kind, base, index, rank):
        return str(Endpoint.parse(base).offset(index))


class Unchecked(Plan):
    """Adds the index to whatever port is there."""

    def refuse(self, rank, bases):
        for base in bases.values():
            Endpoint.parse(base)

    def place(self, kind, base, index, rank):
        endpoint = Endpoint.parse(base)
        if endpoint.port is None or endpoint.port == 0:
            return str(endpoint.offset(index))
        return f"{base.rpartition(':')[0]}:{endpoint.port + index}"


class RefusesOnItsOwnRank(Unchecked):
    """Checks only the ports of its own stream: the first replica starts before the last one fails."""

    def place(self, kind, base, index, rank):
        return str(Endpoint.parse(base).offset(index))


ALONE = checks.check_each_rank_plans_alone
BAD = checks.check_bad_addresses_are_refused
DIALED = checks.check_readers_dial_what_publishers_bind
FORMS = checks.check_every_form_of_address_is_planned
KINDS = checks.check_only_configured_kinds_are_bound
LAST = checks.check_ports_beyond_the_last_are_refused
OVERLAPS = checks.check_overlapping_ranges_are_refused
OWN = checks.check_each_stream_has_its_own_addresses
PLUS_RANK = checks.check_ports_are_base_plus_rank
PORT_0 = checks.check_port_0_stays_0


def offset_by(chosen):
    """Return how to place an address at a chosen offset instead of the stream's index."""
    return lambda self, kind, base, index, rank: Plan.place(self, kind, base, chosen(index, rank), rank)


class BrokenPlan(Plan):
    # Adds the index to whatever port is there.
    unchecked = found(LAST)(Unchecked)

    @found(LAST)
    class wraps(Unchecked):
        """Wraps ports as libzmq does."""

        def place(self, kind, base, index, rank):
            text = super().place(kind, base, index, rank)
            at, _, port = text.rpartition(":")
            return f"{at}:{int(port) % 65536}" if port.isdigit() and text.startswith("tcp") else text

    @found(LAST)
    class off_by_one(Unchecked):
        """Compares the end of a range with 65536 instead of 65535."""

        def refuse(self, rank, bases):
            for base in bases.values():
                port = Endpoint.parse(base).port or 0
                if port + rank.parallel.kv_stream_count - 1 > 65536:
                    raise ValueError(f"{base} ends behind the last port")

    @instead_of("refuse", LAST)
    def too_strict(self, rank, bases):
        """Refuses a range that ends at port 65535."""
        super().refuse(rank, bases)
        for base in bases.values():
            if (Endpoint.parse(base).port or 0) + rank.parallel.kv_stream_count > 65535:
                raise ValueError(f"{base} ends behind the last port")

    @instead_of("refuse", OVERLAPS)
    def compares_bases(self, rank, bases):
        """Refuses equal base ports, but not ranges that overlap."""
        for kind, base in bases.items():
            Endpoint.parse(base).offset(rank.parallel.kv_stream_count - 1)
            for other_kind, other in bases.items():
                if kind < other_kind and base == other and (Endpoint.parse(base).port != 0):
                    raise ValueError(f"{kind} and {other_kind} are both {base}")

    @instead_of("refuse", OVERLAPS)
    def compares_texts(self, rank, bases):
        """Refuses overlapping ranges of one host, but not of a wildcard and an address."""
        hosts = {}
        for kind, base in bases.items():
            hosts.setdefault(Endpoint.parse(base).host, {})[kind] = base
        for group in hosts.values():
            if "events" in group:
                super().refuse(rank, group)
            else:
                super().refuse(rank, {"events": "tcp://*:1"} | group)

    @instead_of("refuse", OVERLAPS)
    def replay_and_load_unchecked(self, rank, bases):
        """Compares each optional range with that of the events only."""
        for kind in bases:
            super().refuse(rank, {"events": bases["events"], kind: bases[kind]})

    @instead_of("refuse", OVERLAPS)
    def refuses_on_one_node(self, rank, bases):
        """Refuses ranges next to each other."""
        super().refuse(rank, bases)
        ports = sorted(port for base in bases.values() if (port := Endpoint.parse(base).port))
        if any(high - low <= rank.parallel.kv_stream_count for low, high in pairwise(ports)):
            raise ValueError(f"ports {ports} are too near")

    # Offsets by the rank on its node.
    local_offsets = found(
        OWN, place=offset_by(lambda index, rank: index % max(1, rank.parallel.kv_stream_count // rank.num_nodes))
    )

    # Offsets by the rank within its stage.
    offsets_by_tp_rank = found(PLUS_RANK, place=offset_by(lambda index, rank: rank.parallel.tp_rank if index else 0))

    offsets_by_device = found(PLUS_RANK, place=offset_by(lambda index, rank: rank.parallel.gpu_id))

    offsets_by_dp_rank = found(OWN, place=offset_by(lambda index, rank: rank.parallel.dp_rank or 0))

    @instead_of("place", OWN)
    def replay_at_the_base(self, kind, base, index, rank):
        """Every replica listens for replay requests at one address."""
        return base if kind == "replay" else super().place(kind, base, index, rank)

    @instead_of("bind", OWN)
    def load_of_every_rank(self, rank, bases):
        """Gates events, but not the load."""
        bound = super().bind(rank, bases)
        if "load" in bases and rank.parallel.pp_rank == 0:
            bound["load"] = self.place("load", bases["load"], rank.parallel.kv_stream_index, rank)
        return bound

    @instead_of("bind", OWN)
    def load_of_the_first(self, rank, bases):
        """Only the first replica reports its load."""
        bound = super().bind(rank, bases)
        if rank.parallel.kv_stream_index:
            bound.pop("load", None)
        return bound

    @instead_of("bind", KINDS)
    def always_replays(self, rank, bases):
        """Listens for replay requests without being asked to."""
        bound = super().bind(rank, bases)
        if bound and "replay" not in bound:
            bound["replay"] = str(Endpoint.parse(bound["events"]).offset(50))
        return bound

    # Gives each stream its own three neighbouring ports. Its readers still compute base + rank.
    interleaves = found(DIALED, place=offset_by(lambda index, rank: 3 * index))

    @instead_of("place", FORMS)
    def substring_plan(self, kind, base, index, rank):
        """Looks for words in an address."""
        if "inproc" in base or "ipc" in base:
            return f"{base}_dp{index}" if index else base
        return super().place(kind, base, index, rank)

    @instead_of("place", DIALED)
    def suffixes_rank_zero(self, kind, base, index, rank):
        """Adds a suffix to the path of the first stream, too."""
        return super().place(kind, base, index, rank) if base.startswith("tcp") else f"{base}_dp{index}"

    @instead_of("place", FORMS)
    def only_wildcards(self, kind, base, index, rank):
        """Replaces the host of an address by a wildcard."""
        endpoint = Endpoint.parse(super().place(kind, base, index, rank))
        return str(endpoint.with_host("*")) if endpoint.transport == "tcp" else str(endpoint)

    @instead_of("place", FORMS)
    def ipv4_only(self, kind, base, index, rank):
        """Takes an address apart at its first colon."""
        if not base.startswith("tcp"):
            return super().place(kind, base, index, rank)
        match = re.fullmatch(r"tcp://([^:]*):(\d+)", base)
        if match is None:
            raise ValueError(f"{base} is no address")
        return f"tcp://{match[1]}:{int(match[2]) + index if int(match[2]) else 0}"

    @instead_of("place", FORMS)
    def loses_brackets(self, kind, base, index, rank):
        return super().place(kind, base, index, rank).replace("[", "").replace("]", "")

    @instead_of("place", PORT_0)
    def port_zero_plus_rank(self, kind, base, index, rank):
        """Offsets port 0, as SGLang 0.5.23 does."""
        if base.endswith(":0"):
            return f"{base[:-1]}{index}"
        return super().place(kind, base, index, rank)

    @instead_of("refuse", PORT_0)
    def refuses_port_zero(self, rank, bases):
        super().refuse(rank, bases)
        for base in bases.values():
            if base.endswith(":0"):
                raise ValueError(f"{base} has no port")

    @found(ALONE)
    class next_free_port(Plan):
        """Gives out the next port of a list, in order of the calls."""

        def __init__(self):
            self.number = 0

        def place(self, kind, base, index, rank):
            endpoint = Endpoint.parse(base)
            if not endpoint.port:
                return super().place(kind, base, index, rank)
            self.number += 1
            return str(endpoint.offset(self.number % 50))

    @instead_of("refuse", BAD)
    def raises_key_errors(self, rank, bases):
        """Refuses with whatever error comes up."""
        try:
            super().refuse(rank, bases)
        except ValueError as error:
            raise KeyError(str(error)) from error

    @instead_of("refuse", BAD)
    def says_nothing(self, rank, bases):
        """Refuses without a reason."""
        try:
            super().refuse(rank, bases)
        except ValueError as error:
            raise ValueError from error

    @instead_of("bind", BAD)
    def silently_off(self, rank, bases):
        """Publishes nothing if an address is bad."""
        try:
            return super().bind(rank, bases)
        except ValueError:
            return {}

    @instead_of("bind", BAD)
    def drops_the_bad_one(self, rank, bases):
        """Leaves out the kinds whose address is bad."""
        good = {}
        for kind, base in bases.items():
            try:
                Endpoint.parse(base)
            except ConfigError:
                continue
            good[kind] = base
        return super().bind(rank, good) if "events" in good else {}

    @instead_of("dial", DIALED)
    def dials_the_base(self, bases, stream, num_streams, host):
        """Readers dial the base of every stream."""
        return super().dial(bases, 0, num_streams, host)

    @instead_of("dial", DIALED)
    def dials_the_wildcard(self, bases, stream, num_streams, host):
        return {kind: str(Endpoint.parse(base).offset(stream)) for kind, base in bases.items()}

    @instead_of("dial", DIALED)
    def dials_the_worker_always(self, bases, stream, num_streams, host):
        """Readers replace a concrete host by the worker's."""
        dialed = super().dial(bases, stream, num_streams, host)
        return {
            kind: str(Endpoint.parse(at).with_host(host)) if at.startswith("tcp") else at for kind, at in dialed.items()
        }

    @instead_of("dial", DIALED)
    def dials_ipv6_without_brackets(self, bases, stream, num_streams, host):
        dialed = super().dial(bases, stream, num_streams, host)
        return {kind: at.replace("[", "").replace("]", "") for kind, at in dialed.items()}

    @instead_of("dial", DIALED)
    def dials_replay_next_to_events(self, bases, stream, num_streams, host):
        """Readers take the replay port to be the event port + 1."""
        dialed = super().dial(bases, stream, num_streams, host)
        if "replay" in dialed and dialed["events"].startswith("tcp"):
            dialed["replay"] = str(Endpoint.parse(dialed["events"]).offset(1))
        return dialed

    @instead_of("dial", DIALED)
    def dials_no_load(self, bases, stream, num_streams, host):
        return {kind: at for kind, at in super().dial(bases, stream, num_streams, host).items() if kind != "load"}


VARIANTS = variants(BrokenPlan)


def test_the_plan_of_the_variants_passes() -> None:
    assert failed(Plan(), EndpointPromises()) == {}


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_plan_is_found(name):
    broken, check = VARIANTS[name]
    with pytest.raises(ConformanceError):
        check(broken(), EndpointPromises())


def test_a_refusal_may_come_from_one_rank() -> None:
    """A rank that checks only its own ports passes: the last one refuses, and the engine does not start."""
    checks.check_ports_beyond_the_last_are_refused(RefusesOnItsOwnRank(), EndpointPromises())
    with pytest.raises(ConformanceError):
        checks.check_overlapping_ranges_are_refused(RefusesOnItsOwnRank(), EndpointPromises())


def test_promises_leave_out_what_a_plan_does_not_have() -> None:
    narrow = EndpointPromises(kinds=("events",), transports=("tcp",), adds_rank=False, chooses_ports=False)

    for name in ("refuses_port_zero", "suffixes_rank_zero", "load_of_the_first"):
        assert failed(VARIANTS[name][0](), narrow) == {}


def test_the_default_engine_of_the_page_binds_its_bases() -> None:
    [rank] = make_topology().ranks
    assert KitPlan().bind(rank, {"events": "tcp://*:5557"}) == {"events": "tcp://*:5557"}
