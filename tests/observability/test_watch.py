"""Watching prints one line per event, and a line for whatever is wrong; never a prompt, never a control character."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability import WatchOptions, watch_streams
from observability.kv_stream import StreamState, UnreachableError
from observability.watch import EventPrinter
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, ConfigError, DecodeError, KVEventBatch
from scheduler_components.kv_events import DecodedBatch, KVEventsConfig, ZmqEventPublisher

pytestmark = pytest.mark.sockets

STORED = BlockStored((-1, 2), 7, (901, 902, 903, 904), 2, None, "CPU", "adapter")
REMOVED = BlockRemoved((255,))


@pytest.fixture
def publisher() -> Iterator[ZmqEventPublisher]:
    publisher = ZmqEventPublisher(
        0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv", config=KVEventsConfig(bind=True)
    )
    yield publisher
    publisher.shutdown()


def lines_of(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_prints_one_line_per_event() -> None:
    out = io.StringIO()
    printer = EventPrinter(out)
    printer.on_batch_applied(1, 17, DecodedBatch(5.0, (STORED, REMOVED, AllBlocksCleared()), 1), replayed=False)
    stored, removed, cleared = lines_of(out)
    assert " ".join(stored.split()) == "rank 1 #17 stored 2 blocks 4 tokens CPU ffffffff..00000000 after 00000000"
    assert " ".join(removed.split()) == "rank 1 #17 removed 1 blocks GPU 00000000"
    assert " ".join(cleared.split()) == "rank 1 #17 cleared all blocks"
    assert printer.num_events == 3


def test_prints_what_is_wrong() -> None:
    out = io.StringIO()
    printer = EventPrinter(out)
    printer.on_gap(0, 5, 8)
    printer.on_view_cleared(0, "history is gone")
    printer.on_state_changed(0, StreamState.LIVE, StreamState.PARTIAL)
    printer.on_snapshot_begin(0)
    printer.on_snapshot_end(0, was_used=True)
    printer.on_snapshot_end(0, was_used=False)
    printer.on_batch_unreadable(0, 9, DecodeError("truncated"))
    printer.on_batch_applied(0, 10, DecodedBatch(5.0, (), 0, (DecodeError("no hashes"),)), replayed=False)
    assert [line.partition("-- ")[2] for line in lines_of(out)] == [
        "batches 5 to 7 did not come",
        "history is gone",
        "is partial",
        "a snapshot of all blocks begins",
        "the snapshot replaces what was known",
        "the snapshot was cut, and is forgotten",
        "#9 is unreadable: truncated",
        "#10 one event is unreadable: no hashes",
    ]


def test_json_lines_carry_the_facts_and_no_prompt() -> None:
    out = io.StringIO()
    printer = EventPrinter(out, as_json=True)
    printer.on_batch_applied(1, 17, DecodedBatch(5.0, (STORED,), 1), replayed=True)
    printer.on_gap(1, 18, 20)
    stored, gap = (json.loads(line) for line in lines_of(out))
    assert stored == {
        "kind": "stored",
        "rank": 1,
        "seq": 17,
        "ts": 5.0,
        "replayed": True,
        "block_hashes": [-1, 2],
        "parent_block_hash": 7,
        "block_size": 2,
        "medium": "CPU",
        "lora_name": "adapter",
        "num_tokens": 4,
    }
    assert (gap["kind"], gap["expected"], gap["seq"]) == ("gap", 18, 20)
    assert "901" not in out.getvalue()


@given(medium=st.text(), reason=st.text())
@settings(deadline=None)
def test_a_peer_cannot_steer_the_terminal(medium: str, reason: str) -> None:
    out = io.StringIO()
    printer = EventPrinter(out)
    printer.on_batch_applied(0, 1, DecodedBatch(0.0, (BlockRemoved((1,), medium),), 0), replayed=False)
    printer.on_batch_unreadable(0, 2, DecodeError(reason))
    text = out.getvalue()
    assert text.count("\n") == 2
    assert all(line.isprintable() for line in text.split("\n"))


def test_stops_after_so_many_events(publisher: ZmqEventPublisher) -> None:
    for seq in range(10):
        publisher.publish(KVEventBatch(ts=1.0, events=(BlockStored((seq,), None, (1,), 1, None),)))
    out = io.StringIO()
    options = WatchOptions(
        history=True, replay_endpoint=publisher.replay_endpoint, topic="kv", max_events=4, as_json=True
    )
    assert watch_streams(publisher.endpoint, out, options) == 4
    events = [line for line in map(json.loads, lines_of(out)) if line["kind"] == "stored"]
    assert [(event["seq"], event["replayed"]) for event in events] == [(seq, True) for seq in range(4)]


def test_without_history_it_is_not_said_that_there_is_no_replay_channel(publisher: ZmqEventPublisher) -> None:
    out = io.StringIO()
    options = WatchOptions(topic="kv", replay_endpoint=publisher.replay_endpoint)
    watch_streams(publisher.endpoint, out, options, should_stop=lambda: "is partial" in out.getvalue())
    assert "earlier batches are unknown" in out.getvalue()
    assert "no replay" not in out.getvalue()


@pytest.fixture
def publish_more(publisher: ZmqEventPublisher) -> Callable[[], bool]:
    """Publishes one removal each time that watching asks whether to stop, and stops it in the end."""
    asked = itertools.count()

    def publish() -> bool:
        publisher.publish(KVEventBatch(ts=1.0, events=(REMOVED,)))
        return next(asked) > 500

    return publish


def check_only_live_removals(out: io.StringIO) -> None:
    events = [line for line in lines_of(out) if "#" in line]
    assert len(events) == 2
    assert all("removed" in line and "replayed" not in line for line in events)


def test_shows_only_live_events_without_history(publisher: ZmqEventPublisher, publish_more: Callable[[], bool]) -> None:
    publisher.publish(KVEventBatch(ts=1.0, events=(BlockStored((99,), None, (1,), 1, None),)))
    publisher.idle()  # it is sent before anybody listens
    out = io.StringIO()
    watch_streams(publisher.endpoint, out, WatchOptions(topic="kv", max_events=2), should_stop=publish_more)
    check_only_live_removals(out)


def test_stops_on_request_or_when_time_is_up(publisher: ZmqEventPublisher) -> None:
    assert watch_streams(publisher.endpoint, io.StringIO(), should_stop=lambda: True) == 0
    out = io.StringIO()
    options = WatchOptions(duration_s=3.0)
    assert watch_streams(publisher.endpoint, out, options, clock=lambda: 9.0 if out.getvalue() else 0.0) == 0
    assert "is partial" in out.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
def test_an_endpoint_that_accepts_no_connection_is_named_and_ends_in_an_error(as_json: bool) -> None:
    out, ticks = io.StringIO(), itertools.count()
    options = WatchOptions(duration_s=5.0, as_json=as_json)
    with pytest.raises(UnreachableError, match=r"^tcp://127.0.0.1:1: accepted no connection"):
        watch_streams("tcp://127.0.0.1:1", out, options, clock=lambda: float(next(ticks)))
    [line] = lines_of(out)
    assert "tcp://127.0.0.1:1 accepts no connection; trying again" in line
    assert not as_json or json.loads(line)["kind"] == "unreachable"


def test_ctrl_c_on_an_endpoint_that_accepts_no_connection_is_an_error() -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(UnreachableError):
        watch_streams("tcp://127.0.0.1:1", io.StringIO(), should_stop=interrupt)


def test_ctrl_c_on_a_stream_that_answers_is_none(publisher: ZmqEventPublisher) -> None:
    out = io.StringIO()

    def interrupt() -> bool:
        if out.getvalue():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        watch_streams(publisher.endpoint, out, should_stop=interrupt)


@pytest.fixture
def worker(serve: Callable[[dict[str, tuple[int, bytes]]], str], publisher: ZmqEventPublisher) -> Callable[[str], str]:
    """The URL of a worker that advertises the publisher's ports, and the topic that is given."""

    def describe(topic: str) -> str:
        described = {
            "endpoint_host": "*",
            "endpoint_port_base": urlsplit(publisher.endpoint).port,
            "replay_endpoint_port_base": urlsplit(publisher.replay_endpoint).port,
            "topic": topic,
        }
        return serve({"/server_info": (200, json.dumps({"kv_events": described}).encode())})

    return describe


def test_a_url_is_discovered(
    publisher: ZmqEventPublisher, publish_more: Callable[[], bool], worker: Callable[[str], str]
) -> None:
    publisher.publish(KVEventBatch(ts=1.0, events=(BlockStored((99,), None, (1,), 1, None),)))
    publisher.idle()  # it is sent before anybody listens
    out = io.StringIO()
    watch_streams(worker("kv"), out, WatchOptions(max_events=2), should_stop=publish_more)
    check_only_live_removals(out)


def test_the_history_and_another_topic_of_a_url_can_be_asked_for(
    publisher: ZmqEventPublisher, publish_more: Callable[[], bool], worker: Callable[[str], str]
) -> None:
    publisher.publish(KVEventBatch(ts=1.0, events=(BlockStored((99,), None, (1,), 1, None),)))
    publisher.idle()  # it is sent before anybody listens
    out = io.StringIO()
    options = WatchOptions(history=True, topic="kv", as_json=True)
    watch_streams(
        worker("other"), out, options, should_stop=lambda: publish_more() or '"replayed":false' in out.getvalue()
    )
    events = [line for line in map(json.loads, lines_of(out)) if "seq" in line and "replayed" in line]
    assert (events[0]["kind"], events[0]["replayed"]) == ("stored", True)
    assert any(not event["replayed"] for event in events), "nothing live came under the topic that was asked for"


@pytest.mark.parametrize("target", ["", "localhost:5557", "udp://host:5557", "tcp://*:5557", "http://"])
def test_a_target_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(ConfigError):
        watch_streams(target, io.StringIO())
