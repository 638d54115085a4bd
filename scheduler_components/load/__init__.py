"""Load: queues that count their tokens, and the gauge that reports to dispatchers how busy a replica is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports
from scheduler_components.load.token_counted_queue import CountedQueue, DispatchLedger, TokenCountedQueue

if TYPE_CHECKING:
    from scheduler_components.load.zmq_load import open_zmq_load_reader, open_zmq_load_sink

__all__ = [
    "CountedQueue",
    "DispatchLedger",
    "TokenCountedQueue",
    "open_zmq_load_reader",
    "open_zmq_load_sink",
]

__getattr__ = lazy_exports(__name__, {"scheduler_components.load.zmq_load": "open_zmq_load_reader open_zmq_load_sink"})
