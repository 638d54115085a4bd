"""Following all streams of a worker: one object, polled by one thread, read by any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Set
from types import TracebackType

import zmq

from observability.kv_stream.applier import BatchApplier
from observability.kv_stream.cursor import StreamCursor
from observability.kv_stream.discovery import MAX_STREAMS, StreamAddress
from observability.kv_stream.follower import FollowPolicy, StreamFollower
from observability.kv_stream.listener import NullListener, StreamListener
from observability.kv_stream.stats import StreamPosition, StreamStats
from observability.kv_stream.view import BlockView, Tier
from observability.kv_stream.zmq_stream import Dial, ZmqReplayChannel, ZmqStream
from scheduler_components.errors import ConfigError
from scheduler_components.kv_events.codec import BatchDecoder
from scheduler_components.kv_events.zmq_access import ClientKeys

__all__ = ["Subscriber", "open_subscriber"]

_SOCKETS_PER_STREAM = 4
"""SUB, its monitor's two ends, DEALER."""

_SPARE_SOCKETS = 64
"""A closed socket counts until libzmq has reaped it."""


class Subscriber:
    """Follows streams and keeps their view; made by ``open_subscriber``.

    ``poll`` and ``wait_until`` belong to one thread, which also closes. Queries and ``stats`` may be called from any
    thread: each takes a lock that ``poll`` holds only while it applies what has come.
    """

    def __init__(
        self,
        streams: dict[int, ZmqStream],
        view: BlockView,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float],
    ) -> None:
        self._streams = streams
        self._view = view
        self._context = context
        self._clock = clock
        self._lock = threading.Lock()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every socket; the view and the counters stay readable. Safe to call twice."""
        with self._lock:
            for stream in self._streams.values():
                stream.close()
        self._context.term()

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` for input, then apply what has come. True when anything had."""
        streams = self._streams.values()
        waiting = [(socket, zmq.POLLIN) for stream in streams for socket in stream.sockets()]
        due_in_s = min(stream.next_deadline_s for stream in streams) - self._clock()
        # poll() cuts to whole milliseconds: one more, or it would return just before the deadline.
        ready = zmq.zmq_poll(waiting, max(0, int(1000 * min(timeout_s, due_in_s + 0.001))))
        now_s = self._clock()
        for stream in streams:
            with self._lock:
                stream.take_turn(now_s)
        return bool(ready)

    def wait_until(self, rank: int, seq: int, timeout_s: float) -> bool:
        """Poll until the view of ``rank`` has batch ``seq`` and no recovery is under way; False after ``timeout_s``.

        The stream is ``LIVE`` or ``PARTIAL`` then; ask ``stats`` which. ``seq`` -1 waits for the first contact, after
        which it may also be ``SYNCING``: nothing was published yet.
        """
        cursor = self._streams[rank].follower.cursor
        deadline_s = self._clock() + timeout_s
        while not (cursor.settled and cursor.last_seq >= seq):
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return False
            self.poll(left_s)
        return True

    def positions(self) -> dict[int, StreamPosition]:
        """Where the view of each stream stands, by rank."""
        with self._lock:
            cursors = {rank: stream.follower.cursor for rank, stream in self._streams.items()}
            return {
                rank: StreamPosition(rank, cursor.state, cursor.last_seq, cursor.settled)
                for rank, cursor in cursors.items()
            }

    def stats(self) -> dict[int, StreamStats]:
        """Each stream's state and counters, by rank."""
        with self._lock:
            return {rank: self._stats_of(stream) for rank, stream in self._streams.items()}

    def _stats_of(self, stream: ZmqStream) -> StreamStats:
        cursor, applier = stream.follower.cursor, stream.follower.applier
        seen, done, blocks = cursor.counters, applier.counters, self._view.counters(applier.rank)
        return StreamStats(
            rank=applier.rank,
            endpoint=str(stream.address.events),
            state=cursor.state,
            is_extended=cursor.is_extended,
            last_seq=cursor.last_seq,
            batches=done.batches,
            events=done.events,
            blocks_stored=blocks.stored_blocks,
            blocks_removed=blocks.removed_blocks,
            blocks_held=self._view.block_count(applier.rank),
            gaps=seen.gaps,
            recovered=seen.recovered,
            losses=seen.losses,
            restarts=seen.restarts,
            verified=seen.verified,
            splices=seen.splices,
            snapshots=seen.snapshots,
            duplicates=seen.duplicates,
            replays_asked=seen.asks,
            replays_unanswered=seen.unanswered,
            replays_cut=seen.cut,
            disconnects=stream.disconnects,
            decode_errors=done.decode_errors,
            bad_frames=stream.bad_frames,
            rank_mismatches=done.rank_mismatches,
            unknown_removals=blocks.unknown_removals,
            unknown_media=blocks.unknown_media,
            lag_s=done.lag_s,
            last_error=done.last_error,
        )

    def blocks(self, rank: int, tier: Tier = Tier.DEVICE) -> Set[int]:
        """A copy of the hashes that ``rank`` holds on ``tier``."""
        with self._lock:
            return self._view.blocks(rank, tier)

    def deepest_prefix(self, hashes: Iterable[int], tier: Tier = Tier.DEVICE) -> dict[int, int]:
        """How many of a prompt's leading blocks each rank holds; see ``BlockView.deepest_prefix``."""
        with self._lock:
            return self._view.deepest_prefix(hashes, tier)

    def ranks_holding(self, block_hash: int, tier: Tier = Tier.DEVICE) -> tuple[int, ...]:
        """The ranks that hold one block on ``tier``."""
        with self._lock:
            return self._view.ranks_holding(block_hash, tier)


def open_subscriber(
    addresses: Iterable[StreamAddress],
    *,
    policy: FollowPolicy | None = None,
    listener: StreamListener | None = None,
    keys: ClientKeys | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> Subscriber:
    """Dial all streams and return their subscriber; use it in a ``with`` block, or close it.

    Nothing is waited for here: a publisher that is not there yet is dialled until it is.

    Args:
        addresses: from ``discover``, or ``bare_address``.
        policy: how long to wait for what.
        listener: is told of every batch and change of state.
        keys: for publishers that let in none but clients with keys (CURVE).
        clock: monotonic seconds, for deadlines; wall_clock: seconds since the epoch, for the lag.

    Raises:
        ConfigError: no address, or two with one rank.
    """
    wanted = tuple(addresses)
    if not 0 < len(wanted) <= MAX_STREAMS:
        raise ConfigError("addresses", len(wanted), "is not a number of streams", f"give 1 to {MAX_STREAMS} addresses")
    ranks = [address.rank for address in wanted]
    if len(set(ranks)) != len(ranks):
        raise ConfigError("addresses", ranks, "name a rank twice", "give each stream a rank of its own")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _SPARE_SOCKETS + _SOCKETS_PER_STREAM * len(wanted))
    dial = Dial(context, keys)
    view = BlockView()
    streams: dict[int, ZmqStream] = {}
    subscriber = Subscriber(streams, view, context, clock)
    try:
        for address in wanted:
            channel = ZmqReplayChannel(dial, address.replay)
            follower = StreamFollower(
                cursor=StreamCursor(has_replay=address.replay is not None),
                applier=BatchApplier(
                    rank=address.rank,
                    view=view,
                    decoder=BatchDecoder(),
                    listener=listener or NullListener(),
                    wall_clock=wall_clock,
                ),
                channel=channel,
                policy=policy or FollowPolicy(),
            )
            follower.begin(clock())
            streams[address.rank] = ZmqStream(dial, address, follower, channel)
            streams[address.rank].open()
    except BaseException:
        subscriber.close()
        raise
    return subscriber
