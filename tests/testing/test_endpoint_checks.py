"""The checks of port plans pass on ``PortPlan``, and find each broken plan, and the known faults of engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
from kit.engine_stream_rules import (
    SGLANG_EVENTS,
    VLLM_EVENTS,
    EnginePlan,
    offset_sglang_endpoint,
    offset_vllm_endpoint,
)

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

    def stream(self, rank: TopologyRank) -> int | None:
        """Return the stream of a rank, None for a silent rank."""
        return rank.parallel.kv_stream_index if rank.parallel.owns_kv_stream else None

    def bind(self, rank: TopologyRank, bases: Mapping[str, str]) -> dict[str, str]:
        self.refuse(rank, bases)
        index = self.stream(rank)
        return {} if index is None else {kind: self.place(kind, base, index, rank) for kind, base in bases.items()}

    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        plan_of(bases, rank.parallel.kv_stream_count)

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        return str(Endpoint.parse(base).offset(index))


class Unchecked(Plan):
    """Adds the index to whatever port is there."""

    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        for base in bases.values():
            Endpoint.parse(base)

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        endpoint = Endpoint.parse(base)
        if endpoint.port is None or endpoint.port == 0:
            return str(endpoint.offset(index))
        return f"{base.rpartition(':')[0]}:{endpoint.port + index}"


class Wraps(Unchecked):
    """Wraps ports as libzmq does."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        text = super().place(kind, base, index, rank)
        at, _, port = text.rpartition(":")
        return f"{at}:{int(port) % 65536}" if port.isdigit() and text.startswith("tcp") else text


class OffByOne(Unchecked):
    """Compares the end of a range with 65536 instead of 65535."""

    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        for base in bases.values():
            port = Endpoint.parse(base).port or 0
            if port + rank.parallel.kv_stream_count - 1 > 65536:
                raise ValueError(f"{base} ends behind the last port")


class TooStrict(Plan):
    """Refuses a range that ends at port 65535."""

    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        super().refuse(rank, bases)
        for base in bases.values():
            if (Endpoint.parse(base).port or 0) + rank.parallel.kv_stream_count > 65535:
                raise ValueError(f"{base} ends behind the last port")


class ComparesBases(Plan):
    """Refuses equal base ports, but not ranges that overlap."""

    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        for kind, base in bases.items():
            Endpoint.parse(base).offset(rank.parallel.kv_stream_count - 1)
            for other_kind, other in bases.items():
                if kind < other_kind and base == other and Endpoint.parse(base).port != 0:
                    raise ValueError(f"{kind} and {other_kind} are both {base}")


class ComparesTexts(Plan):
    """Refuses overlapping ranges of one host, but not of a wildcard and an address."""

    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        hosts: dict[str, dict[str, str]] = {}
        for kind, base in bases.items():
            hosts.setdefault(Endpoint.parse(base).host, {})[kind] = base
        for group in hosts.values():
            if "events" in group:
                super().refuse(rank, group)
            else:
                super().refuse(rank, {"events": "tcp://*:1"} | group)


class ReplayAndLoadUnchecked(Plan):
    """Compares each optional range with that of the events only."""

    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        for kind in bases:
            super().refuse(rank, {"events": bases["events"], kind: bases[kind]})


class RefusesOnOneNode(Plan):
    """Refuses ranges next to each other."""

    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        super().refuse(rank, bases)
        ports = sorted(port for base in bases.values() if (port := Endpoint.parse(base).port))
        if any(high - low <= rank.parallel.kv_stream_count for low, high in pairwise(ports)):
            raise ValueError(f"ports {ports} are too near")


class LocalOffsets(Plan):
    """Offsets by the rank on its node."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        per_node = max(1, rank.parallel.kv_stream_count // rank.num_nodes)
        return super().place(kind, base, index % per_node, rank)


class OffsetsByTpRank(Plan):
    """Offsets by the rank within its stage."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        return super().place(kind, base, rank.parallel.tp_rank if index else 0, rank)


class OffsetsByDevice(Plan):
    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        return super().place(kind, base, rank.parallel.gpu_id, rank)


class OffsetsByDpRank(Plan):
    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        return super().place(kind, base, rank.parallel.dp_rank or 0, rank)


class ReplayAtTheBase(Plan):
    """Every replica listens for replay requests at one address."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        return base if kind == "replay" else super().place(kind, base, index, rank)


class LoadOfEveryRank(Plan):
    """Gates events, but not the load."""

    def bind(self, rank: TopologyRank, bases: Mapping[str, str]) -> dict[str, str]:
        bound = super().bind(rank, bases)
        if "load" in bases and rank.parallel.pp_rank == 0:
            bound["load"] = self.place("load", bases["load"], rank.parallel.kv_stream_index, rank)
        return bound


class LoadOfTheFirst(Plan):
    """Only the first replica reports its load."""

    def bind(self, rank: TopologyRank, bases: Mapping[str, str]) -> dict[str, str]:
        bound = super().bind(rank, bases)
        if rank.parallel.kv_stream_index:
            bound.pop("load", None)
        return bound


class AlwaysReplays(Plan):
    """Listens for replay requests without being asked to."""

    def bind(self, rank: TopologyRank, bases: Mapping[str, str]) -> dict[str, str]:
        bound = super().bind(rank, bases)
        if bound and "replay" not in bound:
            bound["replay"] = str(Endpoint.parse(bound["events"]).offset(50))
        return bound


class Interleaves(Plan):
    """Gives each stream its own three neighbouring ports. Its readers still compute base + rank."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        return super().place(kind, base, 3 * index, rank)


class SubstringPlan(Plan):
    """Looks for words in an address."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        if "inproc" in base or "ipc" in base:
            return f"{base}_dp{index}" if index else base
        return super().place(kind, base, index, rank)


class SuffixesRankZero(Plan):
    """Adds a suffix to the path of the first stream, too."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        return super().place(kind, base, index, rank) if base.startswith("tcp") else f"{base}_dp{index}"


class OnlyWildcards(Plan):
    """Replaces the host of an address by a wildcard."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        endpoint = Endpoint.parse(super().place(kind, base, index, rank))
        return str(endpoint.with_host("*")) if endpoint.transport == "tcp" else str(endpoint)


class Ipv4Only(Plan):
    """Takes an address apart at its first colon."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        if not base.startswith("tcp"):
            return super().place(kind, base, index, rank)
        match = re.fullmatch(r"tcp://([^:]*):(\d+)", base)
        if match is None:
            raise ValueError(f"{base} is no address")
        return f"tcp://{match[1]}:{int(match[2]) + index if int(match[2]) else 0}"


class LosesBrackets(Plan):
    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        return super().place(kind, base, index, rank).replace("[", "").replace("]", "")


class PortZeroPlusRank(Plan):
    """Offsets port 0, as SGLang 0.5.23 does."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        if base.endswith(":0"):
            return f"{base[:-1]}{index}"
        return super().place(kind, base, index, rank)


class RefusesPortZero(Plan):
    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        super().refuse(rank, bases)
        for base in bases.values():
            if base.endswith(":0"):
                raise ValueError(f"{base} has no port")


class NextFreePort(Plan):
    """Gives out the next port of a list, in order of the calls."""

    def __init__(self) -> None:
        self.number = 0

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        endpoint = Endpoint.parse(base)
        if not endpoint.port:
            return super().place(kind, base, index, rank)
        self.number += 1
        return str(endpoint.offset(self.number % 50))


class RaisesKeyErrors(Plan):
    """Refuses with whatever error comes up."""

    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        try:
            super().refuse(rank, bases)
        except ValueError as error:
            raise KeyError(str(error)) from error


class SaysNothing(Plan):
    """Refuses without a reason."""

    def refuse(self, rank: TopologyRank, bases: Mapping[str, str]) -> None:
        try:
            super().refuse(rank, bases)
        except ValueError as error:
            raise ValueError from error


class SilentlyOff(Plan):
    """Publishes nothing if an address is bad."""

    def bind(self, rank: TopologyRank, bases: Mapping[str, str]) -> dict[str, str]:
        try:
            return super().bind(rank, bases)
        except ValueError:
            return {}


class DropsTheBadOne(Plan):
    """Leaves out the kinds whose address is bad."""

    def bind(self, rank: TopologyRank, bases: Mapping[str, str]) -> dict[str, str]:
        good = {}
        for kind, base in bases.items():
            try:
                Endpoint.parse(base)
            except ConfigError:
                continue
            good[kind] = base
        return super().bind(rank, good) if "events" in good else {}


class RefusesOnItsOwnRank(Unchecked):
    """Checks only the ports of its own stream: the first replica starts before the last one fails."""

    def place(self, kind: str, base: str, index: int, rank: TopologyRank) -> str:
        return str(Endpoint.parse(base).offset(index))


class DialsTheBase(Plan):
    """Readers dial the base of every stream."""

    def dial(self, bases: Mapping[str, str], stream: int, num_streams: int, host: str) -> dict[str, str]:
        return super().dial(bases, 0, num_streams, host)


class DialsTheWildcard(Plan):
    def dial(self, bases: Mapping[str, str], stream: int, num_streams: int, host: str) -> dict[str, str]:
        return {kind: str(Endpoint.parse(base).offset(stream)) for kind, base in bases.items()}


class DialsTheWorkerAlways(Plan):
    """Readers replace a concrete host by the worker's."""

    def dial(self, bases: Mapping[str, str], stream: int, num_streams: int, host: str) -> dict[str, str]:
        dialed = super().dial(bases, stream, num_streams, host)
        return {
            kind: str(Endpoint.parse(at).with_host(host)) if at.startswith("tcp") else at for kind, at in dialed.items()
        }


class DialsIpv6WithoutBrackets(Plan):
    def dial(self, bases: Mapping[str, str], stream: int, num_streams: int, host: str) -> dict[str, str]:
        dialed = super().dial(bases, stream, num_streams, host)
        return {kind: at.replace("[", "").replace("]", "") for kind, at in dialed.items()}


class DialsReplayNextToEvents(Plan):
    """Readers take the replay port to be the event port + 1."""

    def dial(self, bases: Mapping[str, str], stream: int, num_streams: int, host: str) -> dict[str, str]:
        dialed = super().dial(bases, stream, num_streams, host)
        if "replay" in dialed and dialed["events"].startswith("tcp"):
            dialed["replay"] = str(Endpoint.parse(dialed["events"]).offset(1))
        return dialed


class DialsNoLoad(Plan):
    def dial(self, bases: Mapping[str, str], stream: int, num_streams: int, host: str) -> dict[str, str]:
        return {kind: at for kind, at in super().dial(bases, stream, num_streams, host).items() if kind != "load"}


BROKEN: dict[type[Plan], str] = {
    Unchecked: "ports_beyond_the_last_are_refused",
    Wraps: "ports_beyond_the_last_are_refused",
    OffByOne: "ports_beyond_the_last_are_refused",
    TooStrict: "ports_beyond_the_last_are_refused",
    ComparesBases: "overlapping_ranges_are_refused",
    ComparesTexts: "overlapping_ranges_are_refused",
    ReplayAndLoadUnchecked: "overlapping_ranges_are_refused",
    RefusesOnOneNode: "overlapping_ranges_are_refused",
    LocalOffsets: "each_stream_has_its_own_addresses",
    OffsetsByTpRank: "ports_are_base_plus_rank",
    OffsetsByDevice: "ports_are_base_plus_rank",
    OffsetsByDpRank: "each_stream_has_its_own_addresses",
    ReplayAtTheBase: "each_stream_has_its_own_addresses",
    LoadOfEveryRank: "each_stream_has_its_own_addresses",
    LoadOfTheFirst: "each_stream_has_its_own_addresses",
    AlwaysReplays: "only_configured_kinds_are_bound",
    Interleaves: "readers_dial_what_publishers_bind",
    SubstringPlan: "every_form_of_address_is_planned",
    SuffixesRankZero: "readers_dial_what_publishers_bind",
    OnlyWildcards: "every_form_of_address_is_planned",
    Ipv4Only: "every_form_of_address_is_planned",
    LosesBrackets: "every_form_of_address_is_planned",
    PortZeroPlusRank: "port_0_stays_0",
    RefusesPortZero: "port_0_stays_0",
    NextFreePort: "each_rank_plans_alone",
    RaisesKeyErrors: "bad_addresses_are_refused",
    SaysNothing: "bad_addresses_are_refused",
    SilentlyOff: "bad_addresses_are_refused",
    DropsTheBadOne: "bad_addresses_are_refused",
    DialsTheBase: "readers_dial_what_publishers_bind",
    DialsTheWildcard: "readers_dial_what_publishers_bind",
    DialsTheWorkerAlways: "readers_dial_what_publishers_bind",
    DialsIpv6WithoutBrackets: "readers_dial_what_publishers_bind",
    DialsReplayNextToEvents: "readers_dial_what_publishers_bind",
    DialsNoLoad: "readers_dial_what_publishers_bind",
}
"""Broken plans, and a check that finds each."""


def test_the_plan_of_the_variants_passes() -> None:
    assert failed(Plan(), EndpointPromises()) == {}


@pytest.mark.broken_variants
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_plan_is_found(broken: type[Plan]) -> None:
    check: Any = getattr(checks, f"check_{BROKEN[broken]}")
    with pytest.raises(ConformanceError):
        check(broken(), EndpointPromises())


def test_a_refusal_may_come_from_one_rank() -> None:
    """A rank that checks only its own ports passes: the last one refuses, and the engine does not start."""
    checks.check_ports_beyond_the_last_are_refused(RefusesOnItsOwnRank(), EndpointPromises())
    with pytest.raises(ConformanceError):
        checks.check_overlapping_ranges_are_refused(RefusesOnItsOwnRank(), EndpointPromises())


def test_promises_leave_out_what_a_plan_does_not_have() -> None:
    narrow = EndpointPromises(kinds=("events",), transports=("tcp",), adds_rank=False, chooses_ports=False)

    class Narrow(RefusesPortZero, SuffixesRankZero, LoadOfTheFirst):
        """None of the three matters for one kind over tcp with fixed ports."""

    assert failed(Narrow(), narrow) == {}


def test_the_default_engine_of_the_page_binds_its_bases() -> None:
    [rank] = make_topology().ranks
    assert KitPlan().bind(rank, {"events": "tcp://*:5557"}) == {"events": "tcp://*:5557"}
