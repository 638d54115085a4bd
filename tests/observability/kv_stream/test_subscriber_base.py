"""A subscriber refuses two streams of one rank."""

from __future__ import annotations

import pytest

from observability.kv_stream import open_subscriber, static_address
from scheduler_components import ConfigError

pytestmark = pytest.mark.sockets


def test_two_streams_of_one_rank_are_refused() -> None:
    with pytest.raises(ConfigError, match="name a rank twice"):
        open_subscriber([static_address("tcp://127.0.0.1:5557"), static_address("tcp://127.0.0.1:5558")])
    with pytest.raises(ConfigError, match="number of streams"):
        open_subscriber([])
