"""Load: queues that know how many tokens they hold, and the gauge by which a replica says how loaded it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components.load.load_stat import (
    LOAD_HEARTBEAT_S,
    LOAD_TOPIC,
    MAX_LOAD_STAT_BYTES,
    LoadSample,
    LoadStat,
    LoadView,
    decode_load_stat,
    encode_load_stat,
    to_load_stat,
)
from scheduler_components.load.token_counted_queue import (
    CountedQueue,
    DispatchLedger,
    TokenCountedQueue,
    count_request_tokens,
    is_valid_dispatcher_name,
)
from scheduler_components.shm_board import ShmBoard

if TYPE_CHECKING:
    from scheduler_components.load.shm_load_board import open_shm_load_board, open_shm_load_sink
    from scheduler_components.load.zmq_load import (
        ZmqLoadReader,
        ZmqLoadSink,
        check_load_endpoint,
        open_zmq_load_reader,
        open_zmq_load_sink,
    )

__all__ = [
    "ShmBoard",
    "CountedQueue",
    "DispatchLedger",
    "LoadSample",
    "LoadStat",
    "LoadView",
    "TokenCountedQueue",
    "ZmqLoadReader",
    "ZmqLoadSink",
    "LOAD_HEARTBEAT_S",
    "LOAD_TOPIC",
    "MAX_LOAD_STAT_BYTES",
    "check_load_endpoint",
    "count_request_tokens",
    "decode_load_stat",
    "encode_load_stat",
    "is_valid_dispatcher_name",
    "to_load_stat",
    "open_shm_load_board",
    "open_shm_load_sink",
    "open_zmq_load_reader",
    "open_zmq_load_sink",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.load.shm_load_board": "open_shm_load_board open_shm_load_sink",
        "scheduler_components.load.zmq_load": (
            "ZmqLoadReader ZmqLoadSink check_load_endpoint open_zmq_load_reader open_zmq_load_sink"
        ),
    },
)
