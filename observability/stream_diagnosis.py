"""What is wrong with one followed stream, judged from what its subscriber saw."""

from __future__ import annotations

from collections import defaultdict

from observability.finding import Finding, Severity
from observability.kv_stream.discovery import StreamAddress
from observability.kv_stream.instructions import StreamState
from observability.kv_stream.listener import NullListener
from observability.kv_stream.stats import StreamStats
from scheduler_components.kv_events.codec import DecodedBatch
from scheduler_components.kv_events.events import BlockStored

__all__ = ["BatchInspector", "diagnose_stream"]

_MAX_SIZES = 8
"""Block sizes remembered a rank: enough to show that they differ."""

_MAX_HONEST_LAG_S = 60.0


class BatchInspector(NullListener):
    """A ``StreamListener`` that notes which block sizes each rank really sends."""

    def __init__(self) -> None:
        self.block_sizes: dict[int, set[int]] = defaultdict(set)

    def batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:  # noqa: ARG002 - port
        """Note the sizes of a batch."""
        sizes = self.block_sizes[rank]
        if len(sizes) < _MAX_SIZES:
            sizes.update(event.block_size for event in batch.events if isinstance(event, BlockStored))


def diagnose_stream(address: StreamAddress, stats: StreamStats, block_sizes: set[int]) -> list[Finding]:
    """Judge one stream whose ports are open.

    Args:
        address: as advertised; stats: after some seconds of following it; block_sizes: those of its events.
    """
    findings = [*_judge_extension(address, stats), _judge_state(address, stats)]
    name = f"rank {address.rank}"
    if stats.replays_unanswered:
        findings.append(
            Finding(
                Severity.ERROR,
                f"{name}: the replay channel {address.replay} gave no end marker in time",
                "check that the port is the publisher's replay ROUTER, and that it is not overloaded; consumers such "
                "as Dynamo stay deaf without the marker",
            )
        )
    if address.block_size is not None and block_sizes - {address.block_size}:
        sizes = ", ".join(map(str, sorted(block_sizes)))
        findings.append(
            Finding(
                Severity.ERROR,
                f"{name}: events have blocks of {sizes} tokens, {address.block_size} are advertised",
                "advertise the size that the cache uses: routers hash prompts by it and will match nothing",
            )
        )
    findings += _judge_content(name, stats)
    return findings


def _judge_extension(address: StreamAddress, stats: StreamStats) -> list[Finding]:
    name = f"rank {address.rank}"
    if stats.is_extended:
        return [Finding(Severity.OK, f"{name}: the publisher's digest proves the view ({stats.verified} times so far)")]
    if address.replay is None or not stats.replays_asked or stats.replays_unanswered:
        return []
    return [
        Finding(
            Severity.OK,
            f"{name}: the publisher has no digest (SGLang's and vLLM's have none): followed by numbers and payloads",
        )
    ]


def _judge_state(address: StreamAddress, stats: StreamStats) -> Finding:
    name = f"rank {address.rank}"
    if stats.state is StreamState.LIVE and (stats.last_seq >= 0 or not stats.is_extended):
        held = f"{name}: live at batch {stats.last_seq}, {stats.blocks_held} blocks held"
        return Finding(Severity.OK, held)
    if stats.state in (StreamState.LIVE, StreamState.SYNCING) and not stats.replays_unanswered:
        return Finding(
            Severity.OK,
            f"{name}: connected, and nothing was published yet",
            "send the worker a request and look again to see events",
        )
    if stats.state is StreamState.PARTIAL and address.replay is None:
        return Finding(
            Severity.WARNING,
            f"{name}: no replay channel is advertised, so whoever joins late or misses a batch stays partial",
            "give the publisher a replay_endpoint",
        )
    if stats.state is StreamState.PARTIAL and not stats.replays_unanswered and not stats.decode_errors:
        return Finding(
            Severity.WARNING,
            f"{name}: history before the replay window is gone, so whoever joins late stays partial",
            "raise buffer_steps, or flush the cache once the readers are there",
        )
    if stats.state in (StreamState.CONNECTING, StreamState.DEAD):
        return Finding(
            Severity.ERROR,
            f"{name}: {address.events} takes connections and is no ZeroMQ publisher that can be read",
            "check that the port is the event publisher's, and give key files if the stream asks for keys",
        )
    return Finding(Severity.WARNING, f"{name}: still {stats.state} at batch {stats.last_seq}", "look again")


def _judge_content(name: str, stats: StreamStats) -> list[Finding]:
    findings = []
    if stats.decode_errors or stats.bad_frames:
        findings.append(
            Finding(
                Severity.ERROR,
                f"{name}: {stats.decode_errors} batches or events and {stats.bad_frames} messages are unreadable"
                f" ({stats.last_error or 'not the frames of this wire'})",
                "check that publisher and readers speak the same version of the event schema",
            )
        )
    if stats.rank_mismatches:
        findings.append(
            Finding(
                Severity.ERROR,
                f"{name}: {stats.rank_mismatches} batches name another rank",
                "check the publishers' endpoint offsets: two ranks share or swap their ports",
            )
        )
    if stats.gaps and stats.losses:
        findings.append(
            Finding(
                Severity.WARNING,
                f"{name}: {stats.gaps} gaps, and not all of what was missed could be had",
                "raise the publisher's hwm and buffer_steps",
            )
        )
    if stats.unknown_media:
        findings.append(
            Finding(
                Severity.WARNING,
                f"{name}: {stats.unknown_media} events name a medium that routers do not know",
                "publish GPU, CPU, CPU_PINNED, DISK, EXTERNAL or STORAGE",
            )
        )
    if stats.lag_s is not None and abs(stats.lag_s) > _MAX_HONEST_LAG_S:
        findings.append(
            Finding(
                Severity.WARNING,
                f"{name}: the last batch is stamped {stats.lag_s:.0f} s ago",
                "check the two machines' clocks, or what holds the publisher's batches back",
            )
        )
    return findings
