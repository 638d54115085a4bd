"""The report of a run: what must be true of the event streams after it, checked from evidence alone.

Pure. It compares what was gathered from outside (listening ports, the observer's view) with what the ranks say of
themselves (their caches), and names the differences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress

import attrs

from observability.kv_stream import StreamState, StreamStats
from scheduler_components.kv_events import StreamAddress
from scheduler_components.reference.cli.workload_driver import WorkloadCounters
from scheduler_components.reference.engine.messages import CacheDump, unpack_hashes

__all__ = [
    "Check",
    "RunFacts",
    "PortProbe",
    "RunReport",
    "ObservedStream",
    "TextComparison",
    "verify",
    "probe_ports",
    "is_zmq_listening",
]

_TIERS = ("device", "host", "storage")


@attrs.frozen(kw_only=True)
class ObservedStream:
    """One stream as the observer has seen it.

    Attributes:
        stats: its counters when it was last read.
        published_sequence: number of the last batch that its publisher sent.
        blocks, host_blocks, stored_blocks: hashes that the observer believes to be in the rank's cache, by tier.
    """

    stats: StreamStats
    published_sequence: int
    blocks: Set[int]
    host_blocks: Set[int] = frozenset()
    stored_blocks: Set[int] = frozenset()


@attrs.frozen(kw_only=True)
class PortProbe:
    """Who listens where a stream could be: one port per rank, from the advertised base on.

    Attributes:
        probed: ports that were dialled.
        speaking: those that answered in ZMQ's protocol.
        advertised: those that ``/server_info`` names.
    """

    probed: tuple[int, ...]
    speaking: frozenset[int]
    advertised: frozenset[int]


@attrs.frozen(kw_only=True)
class TextComparison:
    """What transformers says of the answers of a real model.

    Attributes:
        num_answers, num_tokens: that were compared.
        num_near_ties: tokens that differ where its arithmetic cannot tell the two apart.
        widest_gap: of their logits.
        noise: how far apart logits may be that are equal to its arithmetic.
        problems: of answers with other tokens, one sentence each.
    """

    num_answers: int
    num_tokens: int
    num_near_ties: int
    widest_gap: float
    noise: float
    problems: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class RunFacts:
    """All that a report rests on.

    Attributes:
        dp_size, pp_size, ranks_per_stage: the topology; a replica has so many ranks in each pipeline stage.
        owners: ranks that say that they opened a stream.
        probe: None where the streams are not on tcp ports of this machine.
        streams: one entry per stream; empty when nothing could be followed, and ``no_streams_reason`` says why.
        dumps: rank to its cache.
        counters: the workload's outcomes.
        texts: of a real model; None where the device is simulated, or nothing was said.
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
        """Each replica's first rank, by stream."""
        return [replica * self.ranks_per_stage for replica in range(self.dp_size)]

    def leader_rank(self, rank: int) -> int:
        """The first rank of a rank's replica."""
        return self.leaders[rank // self.ranks_per_stage % self.dp_size]


@attrs.frozen
class Check:
    """One thing that must be true, whether it is, and the facts in one line."""

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
    """Check everything that the evidence allows. Without streams to follow, only ranks and requests are checked."""
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
    """All ranks of a replica hold the same blocks and took the same decisions."""
    differing = []
    for rank in range(evidence.world_size):
        dump, expected = evidence.dumps[rank], evidence.dumps[evidence.leader_rank(rank)]
        same = (dump.step, dump.digest) == (expected.step, expected.digest)
        if not same or _held(dump) != _held(expected):
            differing.append(rank)
    facts = f"{evidence.world_size} ranks in {evidence.dp_size} replicas, each in lockstep with its leader"
    if differing:
        facts = f"ranks {differing} differ from the leaders of their replicas"
    return Check("replicas agree", not differing, facts)


def _held(dump: CacheDump) -> tuple[Set[int], Set[int], Set[int]]:
    """What a rank holds on each tier."""
    return unpack_hashes(dump.block_hashes), unpack_hashes(dump.host_hashes), unpack_hashes(dump.stored_hashes)


def _check_stream_count(evidence: RunFacts) -> Check:
    """Exactly one stream per replica, by what ranks say and by what answers on the ports."""
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
    """The observer's view of each stream is its leader's cache, block by block and tier by tier."""
    facts, passed = [], True
    for stream in evidence.streams:
        rank = stream.stats.rank
        held = _held(evidence.dumps[evidence.leaders[rank]])
        seen = (stream.blocks, stream.host_blocks, stream.stored_blocks)
        missing = sum(len(blocks - others) for blocks, others in zip(held, seen, strict=True))
        extra = sum(len(others - blocks) for blocks, others in zip(held, seen, strict=True))
        passed = passed and not missing and not extra
        counts = " + ".join(f"{len(blocks)} {tier}" for tier, blocks in zip(_TIERS, held, strict=True) if blocks)
        counts = counts.removesuffix(f" {_TIERS[0]}") or "0"  # nothing else: no need to say where
        facts.append(
            f"dp{rank}: {missing} missing and {extra} extra of {counts} blocks"
            if missing or extra
            else f"dp{rank}: {counts} blocks equal"
        )
    return Check("view equals cache", passed, "; ".join(facts))


def _check_texts(texts: TextComparison) -> Check:
    """Greedy text is what transformers makes of the same weights, whatever the cache did."""
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
    """Dial one port per rank, from the first stream's on; None when the streams are not on tcp, or not in a row.

    An engine that let every rank publish, which is the mistake to be found, would answer on all of them. Ports
    that are advertised for replay or load are left out.
    """
    streams = list(addresses)
    events = [address.events for address in streams]
    first = events[0]
    if first.port is None or [endpoint.port for endpoint in events] != list(
        range(first.port, first.port + len(events))
    ):
        return None  # ports that the system gave have neighbours that say nothing
    others = {side.port for address in streams for side in (address.replay, address.load) if side is not None}
    probed = tuple(port for port in range(first.port, first.port + world_size) if port not in others)
    answers = await asyncio.gather(*(is_zmq_listening(first.host, port) for port in probed))
    return PortProbe(
        probed=probed,
        speaking=frozenset(port for port, answer in zip(probed, answers, strict=True) if answer),
        advertised=frozenset(range(first.port, first.port + len(events))),
    )


async def is_zmq_listening(host: str, port: int) -> bool:
    """True when a peer at ``host:port`` greets as ZMQ does; the connection is closed at once."""
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
