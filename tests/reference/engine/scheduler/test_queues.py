"""An id stays in use until its abort is streamed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components import ConfigError


def test_an_id_is_in_use_until_its_abort_is_streamed(make_bench: Callable) -> None:
    bench = make_bench()
    bench.submit("r", range(5))
    bench.scheduler.abort("r")
    with pytest.raises(ConfigError, match="in flight"):
        bench.submit("r", range(5))
    bench.drain()
    bench.submit("r", range(5))
