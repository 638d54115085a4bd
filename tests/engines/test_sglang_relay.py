"""A relay of an SGLang without the plugin: complete if it was there from the start, otherwise marked partial."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with sglang")

from sglang_workload import prompts, resident_blocks, run

from observability.kv_stream import StreamState

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]


def test_an_early_relay_is_complete_and_a_late_relay_is_partial(
    sglang_servers: Callable, start_relay: Callable, read_relay: Callable
) -> None:
    """The second relay starts after SGLang's replay buffer has dropped the first batches."""
    server = sglang_servers(SGLANG_PLUGINS="probe")
    early = start_relay(server.url)
    first = read_relay(early.url)
    texts = run(server, prompts(60, seed=1))
    expected = resident_blocks(server, texts)
    assert len(expected) > 80
    assert first.becomes_live_with(expected)
    assert read_relay(early.url).becomes_live_with(expected)

    late = start_relay(server.url)
    partial = read_relay(late.url)
    assert partial.reaches(lambda state, _: state is StreamState.PARTIAL)
    before = expected
    texts += run(server, prompts(5, seed=2))
    expected = resident_blocks(server, texts)
    assert first.becomes_live_with(expected)
    assert read_relay(early.url).becomes_live_with(expected)
    newest = expected - before
    assert newest
    assert partial.reaches(lambda state, held: state is StreamState.PARTIAL and newest <= held < expected)
    assert StreamState.LIVE not in partial.states
    assert "partial" in late.get("/health")["problem"]
    assert early.get("/health") == {"status": "ok"}
