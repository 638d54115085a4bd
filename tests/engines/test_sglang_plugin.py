"""Inside a real SGLang: the plugin's publisher replaces SGLang's own.

The probe reads the cached prefixes of SGLang's radix tree. A reader must hold the hashes of their pages.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with sglang")

import sglang.srt.disaggregation.kv_events as sglang_events
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sglang_workload import prompts, resident_blocks, run

from observability import discover, open_subscriber
from observability.kv_stream import StreamState
from scheduler_components.engines.sglang import SglangPlugin

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

PLUGIN = {"SGLANG_PLUGINS": "scheduler_components,probe"}
DEADLINE_S = 120.0


def check_late_joiner(server, expected: dict[int, set[int]]) -> None:
    """Check that a new reader becomes live with the expected blocks of each rank."""
    with open_subscriber(discover(server.url)) as subscriber:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            subscriber.poll(0.05)
            stats = subscriber.stats()
            is_live = all(stats[rank].state is StreamState.LIVE for rank in expected)
            if is_live and all(subscriber.blocks(rank) == blocks for rank, blocks in expected.items()):
                return
            found = {rank: len(subscriber.blocks(rank)) for rank in expected}
            assert time.monotonic() < deadline_s, (stats, found, {rank: len(b) for rank, b in expected.items()})


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [((), 1), (("--tp-size", "2"), 1), (("--dp-size", "2", "--load-balance-method", "round_robin"), 2)],
    ids=["one rank", "TP 2", "DP 2"],
)
def test_a_late_joiner_gets_all_blocks_beyond_the_replay_buffer(
    sglang_servers: Callable, arguments: tuple[str, ...], ranks: int
) -> None:
    server = sglang_servers(*arguments, **PLUGIN, SGLANG_CPU_OMP_THREADS_BIND="0|1" if arguments else "")
    texts = run(server, prompts(60 * ranks, seed=1))
    expected = {rank: resident_blocks(server, texts, rank) for rank in range(ranks)}
    assert all(len(blocks) > 80 for blocks in expected.values())
    check_late_joiner(server, expected)


def test_without_the_plugin_a_late_joiner_stays_partial(sglang_servers: Callable) -> None:
    server = sglang_servers(SGLANG_PLUGINS="probe")
    expected = resident_blocks(server, run(server, prompts(60, seed=1)))
    with open_subscriber(discover(server.url)) as subscriber:
        deadline_s = time.monotonic() + DEADLINE_S
        while subscriber.stats()[0].state is not StreamState.PARTIAL:
            subscriber.poll(0.05)
            assert time.monotonic() < deadline_s, subscriber.stats()
        assert subscriber.blocks(0) < expected


# The wire, byte by byte, compared with SGLang's own structs and publisher.

HASHES = st.integers(-(2**63), 2**63 - 1)
MEDIA = st.one_of(st.none(), st.sampled_from(list(sglang_events.StorageMedium)), st.sampled_from(["GPU", "CPU_PINNED"]))
NAMES = st.one_of(st.none(), st.text(max_size=5))


@st.composite
def stored(draw: st.DrawFn) -> object:
    size, hashes = draw(st.integers(1, 4)), draw(st.lists(HASHES, min_size=1, max_size=4))
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size * len(hashes), max_size=size * len(hashes)))
    parent, lora_id = draw(st.one_of(st.none(), HASHES)), draw(st.one_of(st.none(), st.integers(0, 9)))
    salt, session, lora = draw(NAMES), draw(NAMES), draw(NAMES)
    return sglang_events.BlockStored(
        hashes, parent, tokens, size, lora_id, draw(MEDIA), cache_salt=salt, session_id=session, lora_name=lora
    )


EVENTS = st.one_of(
    stored(),
    st.builds(sglang_events.BlockRemoved, st.lists(HASHES, min_size=1, max_size=4), MEDIA),
    st.builds(sglang_events.AllBlocksCleared),
)
BATCHES = st.lists(
    st.builds(sglang_events.KVEventBatch, ts=st.floats(0, 2e9), events=st.lists(EVENTS, min_size=1, max_size=5)),
    min_size=3,
    max_size=3,
)


class Wire:
    """The frames of a publisher as its readers receive them. Numbers count from the first batch after ``settle``."""

    def __init__(self, publisher: object, context: zmq.Context) -> None:
        self._publisher, self.source = publisher, publisher.describe_local_source(16)
        self._live, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._live.subscribe("")
        self._live.connect(self.source["endpoint"])
        self._replay.connect(self.source["replay_endpoint"])
        self._next = 0

    def settle(self) -> None:
        """Publish until the reader receives a batch, because a subscription needs time to arrive."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not self._live.poll(50):
            assert time.monotonic() < deadline_s
            self._publish(sglang_events.KVEventBatch(ts=0.0, events=[sglang_events.AllBlocksCleared()]))
        while self._receive()[1] != self._next - 1:
            pass

    def published(self, batches: list) -> list:
        """Publish batches; return their live frames, and the replay from the second batch on."""
        first = self._next
        for batch in batches:
            self._publish(copy.deepcopy(batch))
        live = [(topic, number - first, payload) for topic, number, payload in (self._receive() for _ in batches)]
        self._replay.send_multipart([b"", (first + 1).to_bytes(8, "big")])
        answers = []
        while not answers or answers[-1][-2] != sglang_events.ZmqEventPublisher.END_SEQ:
            assert self._replay.poll(DEADLINE_S * 1_000)
            answers.append(self._replay.recv_multipart())
        numbered = [[*head, int.from_bytes(number, "big") - first, payload] for *head, number, payload in answers[:-1]]
        return [live, numbered, answers[-1]]

    def _publish(self, batch: object) -> None:
        self._publisher.publish(batch)
        self._next += 1

    def _receive(self) -> tuple[bytes, int, bytes]:
        assert self._live.poll(DEADLINE_S * 1_000)
        topic, number, payload = self._live.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), payload


@pytest.fixture(scope="module")
def wires(free_block: Callable) -> Iterator[tuple[Wire, Wire]]:
    """Open SGLang's publisher and the plugin's with the same settings."""
    made = []
    with zmq.Context() as context, ExitStack() as stack:
        for open_publisher in (
            sglang_events.EventPublisherFactory.create,
            partial(SglangPlugin(environ={}).create_publisher, None, None),
        ):
            port = free_block(12)
            config = {
                "publisher": "zmq",
                "endpoint": f"tcp://127.0.0.1:{port}",
                "replay_endpoint": f"tcp://127.0.0.1:{port + 10}",
                "bind": True,
                "topic": "kv@pod",
            }
            publisher = open_publisher(json.dumps(config), 1)
            stack.callback(publisher.shutdown)
            made.append(Wire(publisher, context))
            stack.callback(context.destroy, linger=0)
            assert made[-1].source["endpoint"] == f"tcp://127.0.0.1:{port + 1}"
            made[-1].settle()
        yield tuple(made)


# Without shrinking, which would take minutes over real sockets.
@settings(
    deadline=None,
    max_examples=100,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batches=BATCHES)
def test_frames_and_replays_equal_those_of_sglangs_own_publisher(wires: tuple[Wire, Wire], batches: list) -> None:
    theirs, ours = wires
    assert theirs.published(batches) == ours.published(batches)


def test_both_publishers_describe_their_source_alike(wires: tuple[Wire, Wire]) -> None:
    theirs, ours = wires
    assert theirs.source.keys() == ours.source.keys()
    for name in ("dp_rank", "topic", "block_size"):
        assert theirs.source[name] == ours.source[name]
