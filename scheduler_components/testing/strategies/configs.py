"""Texts of ``--kv-events-config``: sound ones, and ones with one mistake."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from scheduler_components.kv_events.codec import DIALECTS
from scheduler_components.kv_events.config import REPLAY_FRAMINGS, SEQ_BASES

__all__ = ["bad_config_texts", "config_texts"]

_COUNTS = st.integers(1, 2**31 - 1)
_STREAMS = 64
_MISTAKES: dict[str, list[Any]] = {
    "publisher": ["", 5, None],
    "endpoint": ["tcp://*", "*:5557", "tcp://*:65536", 5557],
    "replay_endpoint": ["tcp://*:5557", "udp://*:1", ""],
    "buffer_steps": [-1, "10", 1.5, True, 2**31],
    "hwm": [0, -1, "1"],
    "max_queue_size": [0, None],
    "topic": [None, 7, "\ud800"],
    "dialect": ["Array", "protobuf", None],
    "bind": ["true", 1],
    "replay_framing": ["seeds", ""],
    "seq_base": ["one", 0],
    "load_endpoint": ["tcp://*:5557", "nonsense"],
    "buffer_bytes": [0, "1G"],
    "endpiont": ["tcp://*:5557"],
}


@st.composite
def config_texts(draw: st.DrawFn) -> str:
    """A sound configuration of a ZMQ publisher, valid for up to 64 streams; each setting is there or left out."""
    settings = draw(
        st.fixed_dictionaries(
            {"publisher": st.just("zmq")},
            optional={
                "endpoint": st.integers(1024, 9000).map(lambda port: f"tcp://*:{port}"),
                "replay_endpoint": st.integers(9000 + _STREAMS, 20_000).map(lambda port: f"tcp://*:{port}"),
                "load_endpoint": st.integers(20_000 + _STREAMS, 40_000).map(lambda port: f"tcp://127.0.0.1:{port}"),
                "buffer_steps": _COUNTS,
                "hwm": _COUNTS,
                "max_queue_size": _COUNTS,
                "topic": st.text(st.characters(codec="utf-8"), max_size=8),
                "dialect": st.sampled_from(DIALECTS),
                "bind": st.sampled_from([None, True]),
                "replay_framing": st.sampled_from(REPLAY_FRAMINGS),
                "seq_base": st.sampled_from(SEQ_BASES),
                "buffer_bytes": st.integers(1, 2**40),
            },
        )
    )
    return json.dumps(settings)


def bad_config_texts() -> st.SearchStrategy[tuple[str, str]]:
    """(The setting that is wrong, a configuration that is sound but for it)."""
    pairs = [(name, value) for name, values in _MISTAKES.items() for value in values]
    return st.sampled_from(pairs).map(
        lambda pair: (pair[0], json.dumps({"publisher": "zmq", "endpoint": "tcp://*:5557"} | {pair[0]: pair[1]}))
    )
