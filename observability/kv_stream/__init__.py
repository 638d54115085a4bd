"""Following KV-event streams: discovery, subscribers, and the view of who holds which block.

Most users need ``discover`` or ``static_address``, ``open_subscriber`` or ``open_async_subscriber``, and the
``Subscriber``'s queries. The cores (view, cursors, follower) have no sockets: use them under a transport of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from observability.kv_stream.cursor import (
    MAX_REPLAY_CREDIT,
    NO_EPOCH,
    DigestCursor,
    PlainCursor,
    Position,
    ReplayCredit,
    StreamCursor,
)
from observability.kv_stream.follower import (
    MAX_STREAMS,
    BatchApplier,
    BatchEffect,
    FollowPolicy,
    FrameParser,
    NullStreamListener,
    PayloadDecoder,
    ReplayChannel,
    StreamFollower,
    StreamListener,
    StreamPosition,
    StreamStats,
)
from observability.kv_stream.instructions import (
    STATE_TRANSITIONS,
    AbortStaging,
    Apply,
    ApplyStaged,
    Clear,
    CommitStaging,
    CursorCounters,
    Instruction,
    RetryLater,
    SendReplayRequest,
    StartStaging,
    StreamState,
    request_token,
)
from observability.kv_stream.view import BlockView, CountingView, RankSet, ViewCounters
from scheduler_components._lazy import lazy_exports
from scheduler_components.events import Tier, medium_tier

if TYPE_CHECKING:
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
    from observability.kv_stream.zmq_async_subscriber import AsyncSubscriber, open_async_subscriber
    from observability.kv_stream.zmq_subscriber import FairRLock, Subscriber, open_subscriber, wait_any

__all__ = [
    # where a worker's streams are
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
    "StreamState",
    "StreamPosition",
    "StreamStats",
    # who holds which block
    "BlockView",
    "CountingView",
    "RankSet",
    "ViewCounters",
    "Tier",
    "medium_tier",
    # the cores of a subscriber, for a transport of your own
    "StreamFollower",
    "ReplayChannel",
    "FrameParser",
    "BatchApplier",
    "PayloadDecoder",
    "BatchEffect",
    "StreamCursor",
    "DigestCursor",
    "PlainCursor",
    "Position",
    "NO_EPOCH",
    "ReplayCredit",
    "MAX_REPLAY_CREDIT",
    "MAX_STREAMS",
    "FairRLock",
    # what a cursor says
    "STATE_TRANSITIONS",
    "CursorCounters",
    "Instruction",
    "SendReplayRequest",
    "request_token",
    "Apply",
    "StartStaging",
    "ApplyStaged",
    "CommitStaging",
    "AbortStaging",
    "Clear",
    "RetryLater",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "observability.kv_stream.discovery": (
            "NoStreamsError UnreachableError parse_addresses static_address discover fetch_json fetch_page "
            "escape_unprintable parse_worker_url"
        ),
        "observability.kv_stream.zmq_async_subscriber": "AsyncSubscriber open_async_subscriber",
        "observability.kv_stream.zmq_subscriber": "FairRLock Subscriber open_subscriber wait_any",
    },
)
