"""Verify a run: compare what an observer outside has seen with the caches of the ranks, and name the differences.

The observer has the listening ports and the view of each event stream. ``verify`` is pure; ``probe_ports`` connects to
the ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress

import attrs

from observability.kv_stream import StreamState, StreamStats
from scheduler_components.kv_events import StreamAddress
from scheduler_engine.cli.workload_driver import WorkloadCounters
from scheduler_engine.engine.messages import CacheDump, unpack_hashes

_TIERS = ("device", "host", "storage")


@attrs.frozen(kw_only=True)
class ObservedStream:
    """The observer's view of one stream.

    Attributes:
        stats: the stream's counters at the last read.
        published_sequence: number of the publisher's last batch.
        blocks, host_blocks, stored_blocks: hashes in the view of the rank's cache, by tier.
    """

    stats: StreamStats
    published_sequence: int
    blocks: Set[int]
    host_blocks: Set[int] = frozenset()
    stored_blocks: Set[int] = frozenset()


@attrs.frozen(kw_only=True)
class PortProbe:
    """The candidate ports of streams: one port per rank, starting at the advertised base.

    Attributes:
        probed: ports that were probed.
        speaking: ports that answered in ZMQ's protocol.
        advertised: ports that ``/server_info`` names.
    """

    probed: tuple[int, ...]
    speaking: frozenset[int]
    advertised: frozenset[int]


@attrs.frozen(kw_only=True)
class TextComparison:
    """The comparison of a real model's answers with transformers'.

    Attributes:
        num_answers, num_tokens: compared answers and tokens.
        num_near_ties: tokens that differ although their logits are equal within the noise.
        widest_gap: largest difference of the logits of a near tie.
        noise: largest difference of logits that rounding explains.
        problems: one sentence per answer with other tokens.
    """

    num_answers: int
    num_tokens: int
    num_near_ties: int
    widest_gap: float
    noise: float
    problems: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class RunFacts:
    """The evidence of a report.

    Attributes:
        dp_size, pp_size, ranks_per_stage: the topology; ``ranks_per_stage`` counts a replica's ranks per pipeline
            stage.
        owners: ranks that report an open stream.
        probe: the probed ports; None if the streams are not on tcp ports of this machine.
        streams: one entry per stream; empty without streams, for ``no_streams_reason``.
        dumps: the cache of each rank.
        counters: the outcomes of the workload.
        texts: the comparison of a real model's answers; None for a simulated device or without answers.
    """

    dp_size: int
    pp_size: int
    ranks_per_stage: int
    owners: frozenset[int]
    probe: PortProbe | None
    streams: Sequence[ObservedStream]
    dumps: Mapping[int, CacheDump]
    counters: WorkloadCounters
    no_streams_reason: str = ""
    texts: TextComparison | None = None

    @property
    def world_size(self) -> int:
        return self.pp_size * self.dp_size * self.ranks_per_stage

    @property
    def leaders(self) -> list[int]:
        """The first rank of each replica, by stream."""
        return [replica * self.ranks_per_stage for replica in range(self.dp_size)]

    def leader_rank(self, rank: int) -> int:
        """Return the first rank of a rank's replica."""
        return self.leaders[rank // self.ranks_per_stage % self.dp_size]


@attrs.frozen
class Check:
    """One check: its name, its result, and the facts in one line."""

    name: str
    passed: bool
    facts: str


@attrs.frozen
class RunReport:
    """All checks of a run."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def verify(evidence: RunFacts) -> RunReport:
    """Run every check that the evidence allows. Without streams, check ranks and requests only."""
    checks = [_check_requests(evidence), _check_replicas(evidence)]
    if evidence.no_streams_reason:
        checks.append(Check("streams", True, f"not checked: {evidence.no_streams_reason}"))
    else:
        checks += [_check_stream_count(evidence), _check_gaps(evidence), _check_views(evidence)]
    if evidence.texts is not None:
        checks.append(_check_texts(evidence.texts))
    return RunReport(tuple(checks))


def _check_requests(evidence: RunFacts) -> Check:
    counters = evidence.counters
    facts = f"{counters.sent} sent, {counters.finished} finished, "
    facts += f"{counters.refused.count} refused, {counters.failed.count} failed"
    passed = counters.finished > 0 and not counters.failed.count and counters.ended == counters.sent
    return Check("requests", passed, "; ".join([facts, *counters.failed.reasons[:1]]))


def _check_replicas(evidence: RunFacts) -> Check:
    """Check that all ranks of a replica hold equal blocks and made equal decisions."""
    differing = []
    for rank in range(evidence.world_size):
        dump, expected = evidence.dumps[rank], evidence.dumps[evidence.leader_rank(rank)]
        same = (dump.step, dump.digest) == (expected.step, expected.digest)
        if not same or _cached_blocks(dump) != _cached_blocks(expected):
            differing.append(rank)
    facts = f"{evidence.world_size} ranks in {evidence.dp_size} replicas, each in lockstep with its leader"
    if differing:
        facts = f"ranks {differing} differ from the leaders of their replicas"
    return Check("replicas agree", not differing, facts)


def _cached_blocks(dump: CacheDump) -> tuple[Set[int], Set[int], Set[int]]:
    """Return the block hashes of a rank by tier."""
    return unpack_hashes(dump.block_hashes), unpack_hashes(dump.host_hashes), unpack_hashes(dump.stored_hashes)


def _check_stream_count(evidence: RunFacts) -> Check:
    """Check for exactly one stream per replica, by the ranks' reports and by the ports that answer."""
    problems = []
    if evidence.owners != frozenset(evidence.leaders):
        problems.append(f"streams were opened by ranks {sorted(evidence.owners)}, expected {evidence.leaders}")
    if len(evidence.streams) != evidence.dp_size:
        problems.append(f"{len(evidence.streams)} streams are advertised")
    probe = evidence.probe
    if probe is not None and probe.speaking != probe.advertised:
        problems.append(f"ports {sorted(probe.speaking)} answer, {sorted(probe.advertised)} are advertised")
    facts = f"exactly {evidence.dp_size} streams for {evidence.world_size} ranks"
    if probe is not None:
        facts += f"; {len(probe.speaking)} of {len(probe.probed)} candidate ports answer"
    return Check("streams", not problems, "; ".join(problems) or facts)


def _check_gaps(evidence: RunFacts) -> Check:
    problems = [problem for stream in evidence.streams for problem in _stream_problems(stream)]
    batches = sum(stream.stats.batches for stream in evidence.streams)
    events = sum(stream.stats.events for stream in evidence.streams)
    return Check("no gap", not problems, "; ".join(problems) or f"{batches} batches, {events} events, all in sequence")


def _stream_problems(stream: ObservedStream) -> Iterator[str]:
    stats, name = stream.stats, f"stream {stream.stats.rank}"
    if stats.last_seq != stream.published_sequence:
        yield f"{name} was read to batch {stats.last_seq} of {stream.published_sequence}"
    if stats.state is not StreamState.LIVE and stream.published_sequence >= 0:
        yield f"{name} is {stats.state}"
    for counter in ("gaps", "losses", "restarts", "decode_errors", "bad_frames", "rank_mismatches"):
        if count := getattr(stats, counter):
            yield f"{name}: {count} {counter.replace('_', ' ')}"


def _check_views(evidence: RunFacts) -> Check:
    """Check that the observer's view of each stream equals its leader's cache, block by block and tier by tier."""
    facts, passed = [], True
    for stream in evidence.streams:
        rank = stream.stats.rank
        held = _cached_blocks(evidence.dumps[evidence.leaders[rank]])
        seen = (stream.blocks, stream.host_blocks, stream.stored_blocks)
        missing = sum(len(blocks - others) for blocks, others in zip(held, seen, strict=True))
        extra = sum(len(others - blocks) for blocks, others in zip(held, seen, strict=True))
        passed = passed and not missing and not extra
        counts = " + ".join(f"{len(blocks)} {tier}" for tier, blocks in zip(_TIERS, held, strict=True) if blocks)
        counts = counts.removesuffix(f" {_TIERS[0]}") or "0"  # omit the tier if there is only the device
        facts.append(
            f"dp{rank}: {missing} missing and {extra} extra of {counts} blocks"
            if missing or extra
            else f"dp{rank}: {counts} blocks equal"
        )
    return Check("view equals cache", passed, "; ".join(facts))


def _check_texts(texts: TextComparison) -> Check:
    """Check that greedy text equals that of transformers with the same weights."""
    facts = f"{texts.num_answers} answers of {texts.num_tokens} tokens compared with transformers'"
    if texts.num_near_ties:
        facts += (
            f", {texts.num_near_ties} near ties (logits at most {texts.widest_gap:.2g} apart; noise {texts.noise:.2g})"
        )
    passed = texts.num_answers > 0 and not texts.problems
    return Check("text", passed, "; ".join([facts, *texts.problems[:1]]))


_GREETING_S = 2.0
_SIGNATURE_BYTES = 10  # of ZMTP 3: 0xff, eight bytes of padding, 0x7f


async def probe_ports(addresses: Iterable[StreamAddress], world_size: int) -> PortProbe | None:
    """Probe one port per rank, starting at the first stream's; None unless the streams use consecutive tcp ports.

    An engine in which every rank publishes, the mistake that this check is for, would answer on all of them. The probe
    skips ports that are advertised for replay or load.
    """
    streams = list(addresses)
    events = [address.events for address in streams]
    first = events[0]
    if first.port is None or [endpoint.port for endpoint in events] != list(
        range(first.port, first.port + len(events))
    ):
        return None  # the neighbours of system-assigned ports prove nothing
    others = {side.port for address in streams for side in (address.replay, address.load) if side is not None}
    probed = tuple(port for port in range(first.port, first.port + world_size) if port not in others)
    answers = await asyncio.gather(*(is_zmq_listening(first.host, port) for port in probed))
    return PortProbe(
        probed=probed,
        speaking=frozenset(port for port, answer in zip(probed, answers, strict=True) if answer),
        advertised=frozenset(range(first.port, first.port + len(events))),
    )


async def is_zmq_listening(host: str, port: int) -> bool:
    """Return whether a peer at ``host:port`` sends ZMQ's greeting, then close the connection."""
    try:
        async with asyncio.timeout(_GREETING_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                signature = await reader.readexactly(_SIGNATURE_BYTES)
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    return signature[0] == 0xFF and signature[-1] == 0x7F
