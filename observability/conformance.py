"""Check the streams of a live engine against the rules of the wire, and report as text and JSON.

``check_conformance`` listens to any engine with this wire format, by its URL or by one endpoint. The rules and the
verifier are in ``scheduler_components.testing``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec

from observability.kv_pool_client import fetch_kv_pool
from observability.kv_stream import NoStreamsError, discover, escape_unprintable, static_address
from scheduler_components import ConfigError, DecodeError
from scheduler_components.kv_events import Endpoint, StreamAddress
from scheduler_components.testing import stream_verifier
from scheduler_components.testing.rules import RULES, Violation
from scheduler_components.testing.zmq_stream_probe import ProbeOptions, probe_streams

__all__ = [
    "ConformanceReport",
    "RuleResult",
    "StreamReport",
    "check_conformance",
]

_MAX_SEEN = 3
_EXTENSION = {True: "yes", False: "no", None: "not asked"}
_FRAMINGS = {2: "seed", 3: "topic"}
_ENGINE_RULES = ("descriptor", "reachable")
_POOL_RULES = ("pool-missing", "pool-extra")


class RuleResult(msgspec.Struct, frozen=True):
    """One rule on one stream.

    Attributes:
        id, rule, weight, holds, harms, hint: as in ``RULES``; ``rule`` is its name.
        status: ``kept``, ``broken``, or ``not judged`` if no message could have broken it.
        count: number of violations; seen: the first few of them, in words.
    """

    id: str
    rule: str
    status: str
    weight: str
    holds: str
    harms: str
    hint: str
    count: int = 0
    seen: tuple[str, ...] = ()


class StreamReport(msgspec.Struct, frozen=True):
    """The facts of one stream, and the result of every rule."""

    rank: int
    endpoint: str
    facts: stream_verifier.StreamFacts
    rules: tuple[RuleResult, ...]


class ConformanceReport(msgspec.Struct, frozen=True):
    """All streams of one target.

    Attributes:
        target: target as the user wrote it.
        reachable: at least one stream accepts connections. Always true for ipc, which cannot be checked.
        conforms: no rule of weight ``error`` is broken.
        engine: results of the rules of the whole engine.
        streams: one report per stream.
    """

    target: str
    reachable: bool
    conforms: bool
    engine: tuple[RuleResult, ...]
    streams: tuple[StreamReport, ...]

    @classmethod
    def of(
        cls,
        target: str,
        judged: Iterable[str],
        broken: Iterable[Violation],
        streams: Iterable[StreamReport],
        *,
        reachable: bool = True,
    ) -> ConformanceReport:
        engine = tuple(each for each in _results(tuple(broken), frozenset(judged)) if each.rule in _ENGINE_RULES)
        reports = tuple(streams)
        results = [*engine, *(each for report in reports for each in report.rules)]
        conforms = not any(each.status == "broken" and each.weight == "error" for each in results)
        return cls(target, reachable, conforms, engine, reports)

    @property
    def exit_code(self) -> int:
        """0: conforms, possibly with warnings. 1: does not. 3: no stream accepts connections. 4: differs from the pool.

        4 takes precedence over 1. 2 is reserved for an invalid command line.
        """
        if not self.reachable:
            return 3
        if self._differs_from_pool:
            return 4
        return 0 if self.conforms else 1

    @property
    def _differs_from_pool(self) -> bool:
        results = (each for report in self.streams for each in report.rules)
        return any(each.status == "broken" and each.rule in _POOL_RULES for each in results)

    def to_json(self) -> str:
        """Return the fields as one indented JSON object."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def lines(self) -> Iterator[str]:
        """Yield the report for a terminal: per stream its facts, the broken rules with hints, and counts."""
        yield from _broken_rules(self.engine)
        for stream in self.streams:
            yield f"stream {stream.rank}  {escape_unprintable(stream.endpoint)}"
            yield from (f"  {line}" for line in _facts(stream.facts))
            yield from (f"  {line}" for line in _broken_rules(stream.rules))
            yield from (f"  {line}" for line in _summary(stream.rules))
        untrue = ": a stream and its pool differ" if self._differs_from_pool else ""
        yield f"{escape_unprintable(self.target)}: " + ("conforms" if self.conforms else f"does NOT conform{untrue}")


def build_stream_report(address: StreamAddress, judged: stream_verifier.StreamVerdict) -> StreamReport:
    """Return the result of every rule for one stream."""
    results = tuple(each for each in _results(judged.violations, judged.judged) if each.rule not in _ENGINE_RULES)
    return StreamReport(address.rank, str(address.events), judged.facts, results)


def _results(violations: tuple[Violation, ...], judged: frozenset[str]) -> Iterator[RuleResult]:
    seen: dict[str, list[str]] = {}
    for violation in violations:
        seen.setdefault(violation.rule, []).append(violation.seen)
    for name, rule in RULES.items():
        times = seen.get(name, [])
        status = "broken" if times else "kept" if name in judged else "not judged"
        yield RuleResult(
            id=rule.id,
            rule=name,
            status=status,
            weight=rule.weight,
            holds=rule.holds,
            harms=rule.harms,
            hint=rule.hint,
            count=len(times),
            seen=tuple(times[:_MAX_SEEN]),
        )


def _broken_rules(results: Iterable[RuleResult]) -> Iterator[str]:
    for result in results:
        if result.status != "broken":
            continue
        times = "once" if result.count == 1 else f"{result.count} times"
        yield f"{result.weight.upper():<7} {result.id} {result.rule}: {result.holds}; broken {times}"
        yield from (f"          {escape_unprintable(seen)}" for seen in result.seen)
        if result.count > len(result.seen):
            yield f"          and {result.count - len(result.seen)} more"
        yield f"          harm: {result.harms}"
        yield f"          -> {result.hint}"


def _summary(rules: Iterable[RuleResult]) -> Iterator[str]:
    statuses = {each.rule: each.status for each in rules}
    unjudged = [rule for rule, status in statuses.items() if status == "not judged" and rule not in _POOL_RULES]
    note = f"; not judged, because no message could break them: {', '.join(unjudged)}" if unjudged else ""
    yield f"{list(statuses.values()).count('kept')} rules kept{note}"
    if all(statuses[rule] == "not judged" for rule in _POOL_RULES):
        yield "not compared with the pool itself: that needs --oracle, and an engine that serves /kv_pool"


def _facts(facts: stream_verifier.StreamFacts) -> Iterator[str]:
    yield (
        f"{facts.live_batches} batches live and {facts.replayed_batches} more by replay, {facts.events} events, "
        f"numbers {facts.first_sequence} to {facts.last_sequence}; {facts.blocks} blocks stand"
    )
    framing = " and ".join(_FRAMINGS[count] for count in facts.replay_frames) or "unseen"
    chain = "unseen"
    if facts.chained_blocks:
        kept = facts.chained_blocks - facts.off_chain_blocks
        chain = f"{kept} of {facts.chained_blocks} blocks on SGLang's page chain"
    yield (
        f"dialect {'+'.join(facts.dialects) or 'unseen'}; replay framing {framing}; extended replay "
        f"{_EXTENSION[facts.speaks_extension]}; hashes: {chain}"
    )
    if facts.pool_readings:
        yield f"compared with the pool {facts.pool_readings} times, {facts.pool_blocks:,} blocks in all"
    if not facts.knows_history:
        yield "the first batches are not available, so orphans and unknown removals could not be verified"


# --- the examination ---

_CONNECT_S = 2.0


def check_conformance(
    target: str,
    options: ProbeOptions | None = None,
    *,
    replay_endpoint: str | None = None,
    topic: str | None = None,
    block_size: int | None = None,
    oracle: str | None = None,
    api_key: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ConformanceReport:
    """Check an engine by what its streams send.

    Args:
        target: a worker's URL, whose ``/server_info`` describes the streams, or one PUB endpoint.
        options: how long to listen.
        replay_endpoint, block_size: for a bare endpoint; a worker advertises its own.
        topic: for a bare endpoint; None checks no topic.
        oracle: URL of an engine with ``/kv_pool``, whose pools are compared with the streams.
        api_key: for workers whose HTTP server requires a key.
        clock: monotonic seconds.

    Raises:
        ConfigError: the target or an option is invalid.
        UnreachableError: the worker does not answer, or (KvPoolUnreadableError) the oracle does not.
        StartError: the server has no ``/server_info``.
    """
    judged, broken = {"reachable"}, []
    if "://" in target and target.partition("://")[0] in ("tcp", "ipc"):
        addresses: tuple[StreamAddress, ...] = (static_address(target, replay=replay_endpoint, topic=topic or ""),)
        wanted = [stream_verifier.AdvertisedStream(0, None if topic is None else topic.encode(), block_size)]
    else:
        for field, value in (("replay_endpoint", replay_endpoint), ("topic", topic), ("block_size", block_size)):
            if value is not None:
                raise ConfigError(field, value, "belongs to a bare endpoint", "take it out: the worker advertises it")
        judged.add("descriptor")
        try:
            addresses = discover(target, api_key=api_key)
        except (NoStreamsError, DecodeError) as error:
            return ConformanceReport.of(target, judged, [Violation("descriptor", str(error))], ())
        wanted = [
            stream_verifier.AdvertisedStream(each.rank, each.topic.encode(), each.block_size) for each in addresses
        ]
        if any(each.block_size is None for each in addresses):
            broken.append(Violation("descriptor", "no block_size is advertised: routers cannot hash prompts"))
    closed = dict(_closed_ports(addresses))
    broken += closed.values()
    reachable = any(address.events not in closed for address in addresses)
    read_pool = None if oracle is None else partial(fetch_kv_pool, oracle, api_key=api_key)
    if read_pool is not None:
        read_pool(addresses[0].rank)  # so that an oracle that does not answer is reported before listening
    records = probe_streams(addresses, options or ProbeOptions(), read_pool=read_pool, clock=clock)
    streams = [
        build_stream_report(address, stream_verifier.verify_stream(record, expected))
        for address, record, expected in zip(addresses, records, wanted, strict=True)
    ]
    return ConformanceReport.of(target, judged, broken, streams, reachable=reachable)


def _closed_ports(addresses: tuple[StreamAddress, ...]) -> Iterator[tuple[Endpoint, Violation]]:
    for address in addresses:
        for endpoint in (address.events, address.replay):
            if endpoint is not None and (problem := _dial(endpoint)):
                yield endpoint, Violation("reachable", f"rank {address.rank}: {endpoint}: {problem}")


def _dial(endpoint: Endpoint) -> str:
    """Connect and disconnect; return the problem, or an empty string. The probe checks ipc paths."""
    if endpoint.transport != "tcp":
        return ""
    try:
        socket.create_connection((endpoint.host, endpoint.port or 0), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""
