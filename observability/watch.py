"""Print the live events of any engine with this wire format, one line per event."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import attrs
import msgspec

from observability.kv_stream import (
    StreamState,
    UnreachableError,
    discover,
    escape_unprintable,
    open_subscriber,
    static_address,
)
from scheduler_components import BlockRemoved, BlockStored, ConfigError, DecodeError, KVCacheEvent
from scheduler_components.kv_events import CurveClientKeys, DecodedBatch, StreamAddress

__all__ = ["EventPrinter", "WatchOptions", "watch_streams"]

_POLL_S = 0.1
_WARN_AFTER_S = 2.0  # a publisher on another continent accepts a connection sooner
_UINT64_MASK = (1 << 64) - 1


@attrs.frozen(kw_only=True)
class WatchOptions:
    """Options of ``watch_streams``.

    Attributes:
        as_json: one JSON object per line instead of text. Token ids are readable prompts, so neither form shows them.
        history: also replay earlier and missed batches.
        replay_endpoint, topic: for a bare endpoint; a worker advertises its own.
        keys: for publishers that authenticate clients.
        api_key: for workers whose HTTP server requires a key.
        max_events: stop after this many events; duration_s: stop after this many seconds. None does not stop.
    """

    as_json: bool = False
    history: bool = False
    replay_endpoint: str | None = None
    topic: str | None = None
    keys: CurveClientKeys | None = None
    api_key: str | None = attrs.field(default=None, repr=False)
    max_events: int | None = None
    duration_s: float | None = None


def _addresses_of(target: str, options: WatchOptions) -> tuple[StreamAddress, ...]:
    """Return the streams of ``target``, which is the URL of a worker or the endpoint of one stream."""
    scheme, separator, _ = target.partition("://")
    if not separator or scheme not in ("http", "https", "tcp", "ipc"):
        raise ConfigError(
            "target", target, "is neither a URL nor an endpoint", "give http://host:port or tcp://host:port"
        )
    if scheme in ("http", "https"):
        addresses = discover(target, api_key=options.api_key)
        if options.topic is not None:
            addresses = tuple(attrs.evolve(address, topic=options.topic) for address in addresses)
    else:
        addresses = (static_address(target, replay=options.replay_endpoint, topic=options.topic or ""),)
    return addresses if options.history else tuple(attrs.evolve(address, replay=None) for address in addresses)


def watch_streams(
    target: str,
    out: TextIO,
    options: WatchOptions | None = None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Print the events of the streams of ``target``; return the number of events printed.

    Args:
        target: the URL of a worker, or the endpoint of one stream.
        out: receives the lines and is flushed after each one.
        should_stop: polled ten times per second. When it ends the watch, streams that did not answer are no error.

    Raises:
        ConfigError: the target is neither, or its endpoint cannot be dialled.
        StartError, NoStreamsError, DecodeError: as ``discover``.
        UnreachableError: the watch ended, by its duration or by Ctrl-C, and no stream had accepted a connection.
    """
    wanted = options or WatchOptions()
    printer = EventPrinter(out, as_json=wanted.as_json, max_events=wanted.max_events)
    addresses = _addresses_of(target, wanted)
    start_s = clock()
    stop_at_s = start_s + wanted.duration_s if wanted.duration_s is not None else math.inf
    warn_at_s = start_s + _WARN_AFTER_S
    try:
        with open_subscriber(addresses, listener=printer, keys=wanted.keys) as subscriber:
            while not printer.is_done and (now_s := clock()) < stop_at_s:
                if should_stop():
                    return printer.num_events
                if now_s >= warn_at_s:
                    warn_at_s = math.inf
                    printer.note_silence(addresses)
                subscriber.poll(_POLL_S)
    except KeyboardInterrupt:
        _check_answered(printer, addresses)
        raise
    _check_answered(printer, addresses)
    return printer.num_events


def _check_answered(printer: EventPrinter, addresses: Iterable[StreamAddress]) -> None:
    """Raise an UnreachableError if no stream has accepted a connection."""
    if not printer.answering:
        endpoints = " or ".join(str(address.events) for address in addresses)
        raise UnreachableError(endpoints, "accepted no connection", "check that a publisher listens there")


class EventPrinter:
    """A ``StreamListener`` that writes a line for each event, gap, error and change of state.

    Args:
        out: receives the lines.
        as_json: write objects with ``kind``, ``rank`` and the fields of the kind, instead of text.
        max_events: number of events to write.

    Attributes:
        num_events: number of events written.
        answering: ranks whose streams have accepted a connection.
    """

    def __init__(self, out: TextIO, *, as_json: bool = False, max_events: int | None = None) -> None:
        self.num_events = 0
        self.answering: set[int] = set()
        self._out = out
        self._as_json = as_json
        self._max_events = max_events

    @property
    def is_done(self) -> bool:
        """Whether ``max_events`` were written."""
        return self._max_events is not None and self.num_events >= self._max_events

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        """Write each event, then each error."""
        for event in batch.events:
            if self.is_done:
                return
            self.num_events += 1
            facts = {"seq": seq, "ts": batch.ts, "replayed": replayed, **_facts(event)}
            self._write(
                _KINDS.get(type(event), "cleared"),
                rank,
                facts,
                _event_text(seq, event) + (" replayed" if replayed else ""),
            )
        for error in batch.errors:
            self._write_note("error", rank, f"#{seq} one event is unreadable: {error.reason}", seq=seq)

    def on_batch_unreadable(self, rank: int, seq: int, error: DecodeError) -> None:
        """Write that a whole batch was lost."""
        self._write_note("error", rank, f"#{seq} is unreadable: {error.reason}", seq=seq)

    def on_gap(self, rank: int, expected: int, seq: int) -> None:
        """Write which batches are missing."""
        self._write_note("gap", rank, f"batches {expected} to {seq - 1} did not come", expected=expected, seq=seq)

    def on_view_cleared(self, rank: int, reason: str) -> None:
        """Write why the view was cleared."""
        self._write_note("reset", rank, reason)

    def on_snapshot_begin(self, rank: int) -> None:
        """Write that the events that follow are the whole state."""
        self._write_note("snapshot", rank, "a snapshot of all blocks begins")

    def on_snapshot_end(self, rank: int, *, was_used: bool) -> None:
        """Write whether the snapshot was used."""
        text = "the snapshot replaces what was known" if was_used else "the snapshot was cut, and is forgotten"
        self._write_note("snapshot_end", rank, text, was_used=was_used)

    def note_silence(self, addresses: Iterable[StreamAddress]) -> None:
        """Write which streams have accepted no connection so far."""
        for address in addresses:
            if address.rank not in self.answering:
                text = f"{address.events} accepts no connection; trying again until this command ends"
                self._write_note("unreachable", address.rank, text, endpoint=str(address.events))

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:
        """Write the new state."""
        if new not in (StreamState.CONNECTING, StreamState.DEAD):
            self.answering.add(rank)
        self._write_note("state", rank, f"is {new}", state=str(new), was=str(old))

    def _write_note(self, kind: str, rank: int, text: str, **facts: object) -> None:
        self._write(kind, rank, {**facts, "text": text}, f"-- {text}")

    def _write(self, kind: str, rank: int, facts: dict[str, Any], text: str) -> None:
        if self._as_json:
            line = msgspec.json.encode({"kind": kind, "rank": rank, **facts}).decode()
        else:
            line = escape_unprintable(f"rank {rank:<3} {text}")
        self._out.write(line + "\n")
        self._out.flush()


_KINDS = {BlockStored: "stored", BlockRemoved: "removed"}


def _facts(event: KVCacheEvent) -> dict[str, object]:
    """Return the fields that are set, without the tokens."""
    facts = {name: getattr(event, name) for name in event.__struct_fields__}
    if isinstance(event, BlockStored):
        facts["num_tokens"] = len(facts.pop("token_ids"))
    return {name: value for name, value in facts.items() if value is not None}


def _event_text(seq: int, event: KVCacheEvent) -> str:
    if isinstance(event, BlockStored):
        parent = "root" if event.parent_block_hash is None else _short(event.parent_block_hash)
        return (
            f"#{seq:<8} stored  {len(event.block_hashes):>5} blocks {len(event.token_ids):>7} tokens"
            f"  {event.medium or 'GPU':<10} {_range(event.block_hashes)} after {parent}"
        )
    if isinstance(event, BlockRemoved):
        return (
            f"#{seq:<8} removed {len(event.block_hashes):>5} blocks {'':>14}"
            f"  {event.medium or 'GPU':<10} {_range(event.block_hashes)}"
        )
    return f"#{seq:<8} cleared all blocks"


def _range(hashes: Iterable[int]) -> str:
    first, *rest = tuple(hashes) or (None,)
    if first is None:
        return "-"
    return f"{_short(first)}..{_short(rest[-1])}" if rest else _short(first)


def _short(block_hash: int) -> str:
    return f"{block_hash & _UINT64_MASK:016x}"[:8]
