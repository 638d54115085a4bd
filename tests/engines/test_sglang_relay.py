"""A relay in front of an SGLang without the plugin: it knows what it heard, and says so where that is not all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with sglang")

from sglang_workload import prompts, resident_blocks, run

from observability.kv_stream import StreamState

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]


def test_who_was_there_from_the_start_knows_all_and_who_came_later_says_so(
    sglang_servers: Callable, start_relay: Callable, read_relay: Callable
) -> None:
    """The window of SGLang's publisher has passed by the time that the second relay joins."""
    server = sglang_servers(SGLANG_PLUGINS="probe")
    early = start_relay(server.url)
    first = read_relay(early.url)
    texts = run(server, prompts(60, seed=1))
    expected = resident_blocks(server, texts)
    assert len(expected) > 80
    assert first.is_whole(expected)
    assert read_relay(early.url).is_whole(expected)

    passed = start_relay(server.url)
    partial = read_relay(passed.url)
    assert partial.comes_to(lambda state, _: state is StreamState.PARTIAL)
    before = expected
    texts += run(server, prompts(5, seed=2))
    expected = resident_blocks(server, texts)
    assert first.is_whole(expected)
    assert read_relay(early.url).is_whole(expected)
    newest = expected - before
    assert newest
    assert partial.comes_to(lambda state, held: state is StreamState.PARTIAL and newest <= held < expected)
    assert StreamState.LIVE not in partial.states
    assert "partial" in passed.get("/health")["problem"]
    assert early.get("/health") == {"status": "ok"}
