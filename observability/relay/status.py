"""The HTTP status of a relay (a ``StatusSource``), and the configuration of its publishers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from observability.kv_stream import RelayedStreamStats, StreamState
from observability.relay.zmq_relay import SourceStats, ZmqRelay
from observability.relay.zmq_sinks import RelaySinks
from scheduler_components import ConfigError, __version__
from scheduler_components.kv_events import KVEventsConfig
from scheduler_components.values import LoadSnapshot

__all__ = ["RelayStatus", "parse_relay_config"]


def parse_relay_config(text: str) -> KVEventsConfig:
    """Parse the value of ``--kv-events-config`` with the defaults of a relay.

    The default publisher is ``zmq``, because a relay exists to publish. Numbers begin at the clock, so that readers
    without the extension notice a restart. The dialect is ``native``: events are forwarded as the received bytes.

    Raises:
        ConfigError: as ``KVEventsConfig.from_cli``, or the publisher is not ``zmq``.
    """
    settings = KVEventsConfig.from_cli(text)
    given = settings.model_fields_set
    settings = settings.changed(
        publisher=settings.publisher if "publisher" in given else "zmq",
        seq_base=settings.seq_base if "seq_base" in given else "clock",
        dialect=settings.dialect if "dialect" in given else "native",
    )
    if settings.publisher != "zmq":
        raise ConfigError("publisher", settings.publisher, "is not a publisher of a relay", 'give "zmq"')
    return settings


@dataclass(slots=True, kw_only=True)
class RelayStatus:
    """The ``StatusSource`` of a relay.

    Attributes:
        sinks: the sinks of the relay.
        block_size: tokens per block as the operator gave it; None to report that of the events.
    """

    relay: ZmqRelay
    sinks: RelaySinks
    block_size: int | None = None

    def health_problem(self) -> str | None:
        """Return which sources are not live, and their states; None if every source is live."""
        return "; ".join(_problems(self.relay.source_stats())) or None

    def server_info(self) -> Mapping[str, Any]:
        """Return the descriptor of the published streams, the state of each stream, and the age of newest batches."""
        sources, streams = self.relay.source_stats(), self.relay.stream_stats()
        info = {"version": __version__, "relay": _relay_info(sources, streams), **self._descriptor(streams)}
        problems = _problems(sources)
        if problems and info["kv_events"] is not None:
            known = [str(info["kv_events_warning"])] if "kv_events_warning" in info else []
            info["kv_events_warning"] = "; ".join([*known, *problems])
        return info

    def _descriptor(self, streams: Sequence[RelayedStreamStats]) -> dict[str, object]:
        if not streams:
            return {"kv_events": None, "kv_events_error": "no source has answered yet, so nothing is relayed"}
        sizes = {stream.block_size for stream in streams} - {None}
        seen = sizes.pop() if len(sizes) == 1 else None
        return self.sinks.server_info(self.block_size or seen, streams[-1].rank + 1)

    def model_info(self) -> Mapping[str, Any]:
        """Return ``relay`` as the model path: a relay has no model."""
        return {"model_path": "relay"}

    def load_snapshots(self) -> Sequence[LoadSnapshot]:
        """Return nothing: a relay has no load."""
        return ()


def _problems(sources: Sequence[SourceStats]) -> list[str]:
    problems = []
    for each in sources:
        if each.problem:
            problems.append(f"{each.source} is not relayed: {each.problem}")
        problems += [
            f"stream {rank} of {each.source} is {stats.state}"
            for rank, stats in each.streams.items()
            if stats.state is not StreamState.LIVE
        ]
    return problems


def _relay_info(sources: Sequence[SourceStats], streams: Sequence[RelayedStreamStats]) -> dict[str, Any]:
    return {
        "sources": [
            {
                "source": each.source,
                "problem": each.problem or None,
                "streams": {str(rank): stats.state.value for rank, stats in each.streams.items()},
                "newest_batch_age_s": {str(rank): stats.newest_batch_age_s for rank, stats in each.streams.items()},
            }
            for each in sources
        ],
        "streams": {str(each.rank): each.state.value for each in streams},
    }
