"""Following KV-event streams: discovery, subscribers, and the view of who holds which block.

Most users need ``discover`` or ``bare_address``, ``open_subscriber`` or ``open_async_subscriber``, and the
``Subscriber``'s queries. The cores (view, cursors, follower) have no sockets: use them under a transport of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from observability.kv_stream.cursor import (
    NO_EPOCH,
    QUESTIONS_AT_ONCE,
    DigestCursor,
    PlainCursor,
    Position,
    QuestionCredit,
    StreamCursor,
)
from observability.kv_stream.follower import (
    MAX_STREAMS,
    BatchApplier,
    BatchEffect,
    FollowPolicy,
    FrameReader,
    NullListener,
    PayloadDecoder,
    ReplayChannel,
    StreamFollower,
    StreamListener,
    StreamPosition,
    StreamStats,
)
from observability.kv_stream.instructions import (
    STATE_CHANGES,
    Apply,
    ApplyStaged,
    AskReplay,
    BeginStaging,
    Clear,
    CursorCounters,
    DropStaging,
    Instruction,
    RetryLater,
    StreamState,
    SwapInStaged,
    token_of,
)
from observability.kv_stream.view import BlockView, CountingView, RankSet, ViewCounters
from scheduler_components._lazy import lazy_names
from scheduler_components.events import Tier, tier_of

if TYPE_CHECKING:
    from observability.kv_stream.discovery import (
        NoStreamsError,
        UnreachableError,
        addresses_in,
        bare_address,
        discover,
        fetch_json,
        fetch_page,
        printable,
        worker_url,
    )
    from observability.kv_stream.zmq_async_subscriber import AsyncSubscriber, open_async_subscriber
    from observability.kv_stream.zmq_subscriber import QueryLock, Subscriber, open_subscriber, wait_together

__all__ = [
    # where a worker's streams are
    "discover",
    "bare_address",
    "NoStreamsError",
    "UnreachableError",
    "addresses_in",
    "worker_url",
    "fetch_json",
    "fetch_page",
    "printable",
    # following them
    "open_subscriber",
    "Subscriber",
    "wait_together",
    "open_async_subscriber",
    "AsyncSubscriber",
    "FollowPolicy",
    "StreamListener",
    "NullListener",
    "StreamState",
    "StreamPosition",
    "StreamStats",
    # who holds which block
    "BlockView",
    "CountingView",
    "RankSet",
    "ViewCounters",
    "Tier",
    "tier_of",
    # the cores of a subscriber, for a transport of your own
    "StreamFollower",
    "ReplayChannel",
    "FrameReader",
    "BatchApplier",
    "PayloadDecoder",
    "BatchEffect",
    "StreamCursor",
    "DigestCursor",
    "PlainCursor",
    "Position",
    "NO_EPOCH",
    "QuestionCredit",
    "QUESTIONS_AT_ONCE",
    "MAX_STREAMS",
    "QueryLock",
    # what a cursor says
    "STATE_CHANGES",
    "CursorCounters",
    "Instruction",
    "AskReplay",
    "token_of",
    "Apply",
    "BeginStaging",
    "ApplyStaged",
    "SwapInStaged",
    "DropStaging",
    "Clear",
    "RetryLater",
]

__getattr__ = lazy_names(
    __name__,
    {
        "observability.kv_stream.discovery": (
            "NoStreamsError UnreachableError addresses_in bare_address discover fetch_json fetch_page printable "
            "worker_url"
        ),
        "observability.kv_stream.zmq_async_subscriber": "AsyncSubscriber open_async_subscriber",
        "observability.kv_stream.zmq_subscriber": "QueryLock Subscriber open_subscriber wait_together",
    },
)
