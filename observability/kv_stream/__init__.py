"""Following KV-event streams: discovery, subscribers, and the view of which rank holds which block.

Most programs need ``discover`` or ``static_address``, ``open_subscriber`` or ``open_async_subscriber``, and the queries
of the ``Subscriber``. The cores (cursor, follower, applier, view) have no sockets, so that another transport can use
them. The instructions of a cursor are in the module ``instructions``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from observability.kv_stream.batch_applier import BatchApplier, NullStreamListener, StreamListener
    from observability.kv_stream.discovery import (
        NoStreamsError,
        UnreachableError,
        discover,
        escape_unprintable,
        fetch_json,
        fetch_page,
        parse_addresses,
        parse_worker_url,
        static_address,
    )
    from observability.kv_stream.follower import FollowPolicy, StreamFollower
    from observability.kv_stream.frames import FrameParser
    from observability.kv_stream.rank_set import RankSet
    from observability.kv_stream.stream_cursor import StreamCursor
    from observability.kv_stream.stream_state import StreamState
    from observability.kv_stream.stream_stats import LogStats, RelayedStreamStats, StreamPosition, StreamStats
    from observability.kv_stream.thread_fair_rlock import FairRLock
    from observability.kv_stream.view import BlockView, CountingView
    from observability.kv_stream.zmq_async_subscriber import AsyncSubscriber, open_async_subscriber
    from observability.kv_stream.zmq_subscriber import Subscriber, open_subscriber, wait_any
    from scheduler_components.events import Tier

__all__ = [
    # the addresses of a worker's streams
    "discover",
    "static_address",
    "NoStreamsError",
    "UnreachableError",
    "parse_addresses",
    "parse_worker_url",
    "fetch_json",
    "fetch_page",
    "escape_unprintable",
    # following them
    "open_subscriber",
    "Subscriber",
    "wait_any",
    "open_async_subscriber",
    "AsyncSubscriber",
    "FollowPolicy",
    "StreamListener",
    "NullStreamListener",
    "CountingView",
    "FairRLock",
    "StreamState",
    "StreamPosition",
    "StreamStats",
    "LogStats",
    "RelayedStreamStats",
    # which rank holds which block
    "BlockView",
    "RankSet",
    "Tier",
    # the cores of a subscriber, for another transport
    "StreamFollower",
    "FrameParser",
    "BatchApplier",
    "StreamCursor",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "observability.kv_stream.batch_applier": "BatchApplier NullStreamListener StreamListener",
        "observability.kv_stream.follower": "FollowPolicy StreamFollower",
        "observability.kv_stream.frames": "FrameParser",
        "observability.kv_stream.rank_set": "RankSet",
        "observability.kv_stream.stream_cursor": "StreamCursor",
        "observability.kv_stream.stream_state": "StreamState",
        "observability.kv_stream.stream_stats": "LogStats RelayedStreamStats StreamPosition StreamStats",
        "observability.kv_stream.view": "BlockView CountingView",
        "scheduler_components.events": "Tier",
        "observability.kv_stream.discovery": (
            "NoStreamsError UnreachableError parse_addresses static_address discover fetch_json fetch_page "
            "escape_unprintable parse_worker_url"
        ),
        "observability.kv_stream.thread_fair_rlock": "FairRLock",
        "observability.kv_stream.zmq_async_subscriber": "AsyncSubscriber open_async_subscriber",
        "observability.kv_stream.zmq_subscriber": "Subscriber open_subscriber wait_any",
    },
)
