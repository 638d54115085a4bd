"""A relay of vLLM's own publisher: complete if it was there from the start, otherwise marked partial.

No two equal prompts run at the same time. vLLM's stream reports the removal of one copy of a block like the removal of
all copies, so a relay cannot tell them apart.
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
def plugin_publisher(engine: Engine) -> Iterator[None]:
    """Restore the plugin's publisher for other tests."""
    yield
    engine.publish_by(engine.open())


def publish_by_vllms_own(engine: Engine, name: str) -> str:
    """Publish with vLLM's own publisher from now on; return its endpoints in the form of a relay's option."""
    address = f"ipc://{engine.folder}/{name}"
    publisher = engine.open_vllms_own(endpoint=address, replay_endpoint=f"{address}r")
    assert type(publisher).__module__ == "vllm.distributed.kv_events"
    engine.publish_by(publisher)
    return f"{address},{address}r"


def test_a_late_reader_of_an_early_relay_gets_the_whole_pool(
    engine: Engine, start_relay: Callable, read_relay: Callable
) -> None:
    """The batches exceed the replay buffer of vLLM's publisher. The reader stays equal while the pool evicts."""
    relay = start_relay(publish_by_vllms_own(engine, "early"))
    first = read_relay(relay.url)
    asked = prompts(seed=11)
    for _ in range(4 * WINDOW):
        engine.generate([next(asked)])
    assert len(engine.pool()) > 40
    assert first.becomes_live_with(engine.pool())
    late = read_relay(relay.url)
    for _ in range(20):
        assert late.becomes_live_with(engine.pool())
        for _ in range(4):
            engine.generate([next(asked)])
    stats = late.subscriber.stats()[0]
    assert stats.blocks_removed > 100
    assert (stats.gaps, stats.decode_errors) == (0, 0)
    assert relay.get("/health") == {"status": "ok"}


def test_a_relay_that_starts_late_is_never_live(engine: Engine, start_relay: Callable, read_relay: Callable) -> None:
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
        assert reader.reaches(
            lambda state, held, pool=pool, newest=newest: state is StreamState.PARTIAL and newest <= held <= pool
        )
    assert StreamState.LIVE not in reader.states
    assert "partial" in relay.get("/health")["problem"]


def test_a_relay_forwards_the_payloads_of_vllm_unchanged(
    engine: Engine, start_relay: Callable, read_relay: Callable
) -> None:
    """This holds for all fields of the installed vLLM. The relay's initial clear precedes the subscription."""
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
        assert reader.becomes_live_with(engine.pool())
        direct_payloads, relayed_payloads = (
            [socket.recv_multipart()[-1] for _ in range(WINDOW)] for socket in (direct, relayed)
        )
    both = [payload for payload in direct_payloads if payload in relayed_payloads]  # one of the two was connected first
    assert len(both) > WINDOW // 2
    first = relayed_payloads.index(both[0])
    assert relayed_payloads[first : first + len(both)] == both
