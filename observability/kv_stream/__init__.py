"""Following KV-event streams: discovery, cursors, subscribers and the view of who holds which block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from observability.kv_stream.cursor import NO_EPOCH, DigestCursor, PlainCursor, Position, StreamCursor
from observability.kv_stream.follower import (
    BatchApplier,
    BatchEffect,
    FollowPolicy,
    NullListener,
    StreamFollower,
    StreamListener,
    StreamPosition,
    StreamStats,
)
from observability.kv_stream.instructions import (
    Apply,
    ApplyStaged,
    AskReplay,
    BeginStaging,
    Clear,
    DropStaging,
    Instruction,
    RetryLater,
    StreamState,
    SwapInStaged,
    token_of,
)
from observability.kv_stream.view import BlockView
from scheduler_components._lazy import lazy_names
from scheduler_components.events import Tier, tier_of

if TYPE_CHECKING:
    from observability.kv_stream.discovery import (
        NoStreamsError,
        addresses_in,
        bare_address,
        discover,
        fetch_json,
        fetch_page,
        printable,
        worker_url,
    )
    from observability.kv_stream.zmq_async_subscriber import AsyncSubscriber, open_async_subscriber
    from observability.kv_stream.zmq_subscriber import Subscriber, open_subscriber

__all__ = [
    "Apply",
    "ApplyStaged",
    "AskReplay",
    "AsyncSubscriber",
    "BatchApplier",
    "BatchEffect",
    "BeginStaging",
    "BlockView",
    "Clear",
    "DigestCursor",
    "DropStaging",
    "FollowPolicy",
    "Instruction",
    "NoStreamsError",
    "NullListener",
    "PlainCursor",
    "Position",
    "RetryLater",
    "StreamCursor",
    "StreamFollower",
    "StreamListener",
    "StreamPosition",
    "StreamState",
    "StreamStats",
    "Subscriber",
    "SwapInStaged",
    "Tier",
    "NO_EPOCH",
    "addresses_in",
    "bare_address",
    "discover",
    "fetch_json",
    "fetch_page",
    "open_async_subscriber",
    "open_subscriber",
    "printable",
    "tier_of",
    "token_of",
    "worker_url",
]

__getattr__ = lazy_names(
    __name__,
    {
        "observability.kv_stream.discovery": (
            "NoStreamsError addresses_in bare_address discover fetch_json fetch_page printable worker_url"
        ),
        "observability.kv_stream.zmq_async_subscriber": "AsyncSubscriber open_async_subscriber",
        "observability.kv_stream.zmq_subscriber": "Subscriber open_subscriber",
    },
)
