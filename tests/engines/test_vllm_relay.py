"""A relay in front of vLLM's own publisher: it knows what it heard, and says so where that is not all.

The prompts have no twins side by side: of several copies of one block, vLLM's own stream tells the removal of one as
that of all, and no relay can know better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm_in_process import WINDOW, Engine, prompts

from observability import discover
from observability.kv_stream import StreamState

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def put_back(engine: Engine) -> Iterator[None]:
    """Other tests find the plugin's publisher."""
    yield
    engine.publish_by(engine.open())


def publish_by_vllms_own(engine: Engine, name: str) -> str:
    """Let vLLM's publisher take the events from here on; returns its endpoints, as a relay is given them."""
    address = f"ipc://{engine.folder}/{name}"
    publisher = engine.open_vllms_own(endpoint=address, replay_endpoint=f"{address}r")
    assert type(publisher).__module__ == "vllm.distributed.kv_events"
    engine.publish_by(publisher)
    return f"{address},{address}r"


def test_a_reader_that_joins_the_relay_late_has_the_whole_pool(
    engine: Engine, start_relay: Callable, read_relay: Callable
) -> None:
    """The window of vLLM's publisher has passed several times by then. Then it stays equal, while the pool evicts."""
    relay = start_relay(publish_by_vllms_own(engine, "early"))
    first = read_relay(relay.url)
    asked = prompts(seed=11)
    for _ in range(4 * WINDOW):
        engine.generate([next(asked)])
    assert len(engine.pool()) > 40
    assert first.is_whole(engine.pool())
    late = read_relay(relay.url)
    for _ in range(20):
        assert late.is_whole(engine.pool())
        for _ in range(4):
            engine.generate([next(asked)])
    stats = late.subscriber.stats()[0]
    assert stats.blocks_removed > 100
    assert (stats.gaps, stats.decode_errors) == (0, 0)
    assert relay.get("/health") == {"status": "ok"}


def test_a_relay_that_joins_after_the_window_never_says_that_it_knows_all(
    engine: Engine, start_relay: Callable, read_relay: Callable
) -> None:
    source = publish_by_vllms_own(engine, "passed")
    asked = prompts(seed=12)
    for _ in range(4 * WINDOW):
        engine.generate([next(asked)])
    relay = start_relay(source)
    reader = read_relay(relay.url)
    for _ in range(10):
        before = engine.pool()
        for _ in range(4):
            engine.generate([next(asked)])
        pool, newest = engine.pool(), engine.pool() - before
        assert newest
        assert reader.comes_to(
            lambda state, held, pool=pool, newest=newest: state is StreamState.PARTIAL and newest <= held <= pool
        )
    assert StreamState.LIVE not in reader.states
    assert "partial" in relay.get("/health")["problem"]


def test_the_relays_live_batches_are_vllms_own_bytes(
    engine: Engine, start_relay: Callable, read_relay: Callable
) -> None:
    """Whatever fields vLLM's version has; the relay's clear of the start is heard by nobody here."""
    source = publish_by_vllms_own(engine, "bytes")
    relay = start_relay(source)
    reader = read_relay(relay.url)
    asked = prompts(seed=13)
    with zmq.Context() as context, context.socket(zmq.SUB) as direct, context.socket(zmq.SUB) as relayed:
        for socket, endpoint in ((direct, source.partition(",")[0]), (relayed, str(discover(relay.url)[0].events))):
            socket.linger = 0
            socket.rcvtimeo = 20_000
            socket.subscribe(b"")
            socket.connect(endpoint)
        while not all(socket.poll(100) for socket in (direct, relayed)):
            engine.generate([next(asked)])
        for _ in range(WINDOW):
            engine.generate([next(asked) for _ in range(2)])
        assert reader.is_whole(engine.pool())
        told, passed_on = ([socket.recv_multipart()[-1] for _ in range(WINDOW)] for socket in (direct, relayed))
    both = [payload for payload in told if payload in passed_on]  # one of the two was connected first
    assert len(both) > WINDOW // 2
    first = passed_on.index(both[0])
    assert passed_on[first : first + len(both)] == both
