"""Slow, greedy and many readers. Property: they do not affect the publisher's step, its memory or its other readers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import zmq

pytestmark = [pytest.mark.faults, pytest.mark.sockets, pytest.mark.processes]

Start = Callable[..., Any]
END = -1
MiB = 1024 * 1024
RECEIVE_MS = 40_000


def number(message: list[bytes]) -> int:
    return int.from_bytes(message[-2], "big", signed=True)


def read_answer(client: zmq.Socket[bytes]) -> list[int]:
    numbers = [number(client.recv_multipart())]
    while numbers[-1] != END:
        numbers.append(number(client.recv_multipart()))
    return numbers


def test_a_reader_that_pauses_gets_all_of_a_long_replay(start_publisher: Start, dial: Start) -> None:
    publisher = start_publisher(buffer_steps=20_000)
    publisher.ask("publish", 0, 10_000, 1_700)
    client = dial(zmq.DEALER, publisher.replay_endpoint, hwm=10)
    client.send_multipart([b"", bytes(8)])
    first = number(client.recv_multipart())
    while publisher.ask("stats")["batches_replayed"] < 64:
        pass
    publisher.ask("publish", 10_000, 12_000, 1_700)  # the pause is as long as all of this
    assert publisher.ask("stats")["replays_open"] == 1
    assert [first, *read_answer(client)] == [*range(10_000), END]


def test_live_goes_on_during_a_replay_storm(start_publisher: Start, dial: Start) -> None:
    publisher = start_publisher(buffer_steps=1_000_000)  # the replay buffer overtakes no answer
    publisher.ask("publish", 0, 1_000, 500)
    live = dial(zmq.SUB, publisher.endpoint, hwm=0)
    while not live.poll(5):
        publisher.ask("publish", 0, 1, 10)
    answers: list[list[int]] = []
    stopping = threading.Event()

    def storm(client: zmq.Socket[bytes]) -> None:
        while not stopping.is_set():
            client.send_multipart([b"", bytes(8)])
            answers.append(read_answer(client))

    threads = [threading.Thread(target=storm, args=(dial(zmq.DEALER, publisher.replay_endpoint),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(answers) < 12:
        publisher.ask("publish", 0, 10, 500)
    stopping.set()
    for thread in threads:
        thread.join()
    last = publisher.ask("stats")["last_sequence"]
    numbers = [number(live.recv_multipart())]
    while numbers[-1] != last:
        numbers.append(number(live.recv_multipart()))
    assert numbers == list(range(numbers[0], last + 1))
    for answer in answers:
        assert answer == [*range(answer[-2] + 1), END]


def test_readers_that_never_read_cost_their_share(start_publisher: Start, dial: Start) -> None:
    publisher = start_publisher()
    publisher.ask("publish", 0, 3_000, 10_000)
    before = publisher.ask("memory")
    clients = [dial(zmq.DEALER, publisher.replay_endpoint, hwm=1) for _ in range(30)]
    for client in clients:
        client.send_multipart([b"", bytes(8)])
    for client in clients:
        assert client.poll(RECEIVE_MS)
    # Until every queue on the path is full.
    replayed = -1
    while (now := publisher.ask("stats"))["batches_replayed"] != replayed:
        replayed = now["batches_replayed"]
        publisher.ask("publish", 0, 200, 10)
    assert (now["replays_open"], now["replays_served"]) == (30, 0)
    assert publisher.ask("memory") - before < 50 * MiB


def test_subscribers_that_never_read_share_one_queue(start_publisher: Start, dial: Start) -> None:
    publisher = start_publisher(hwm=1_000, replay_endpoint=None)
    silent = [dial(zmq.SUB, publisher.endpoint, hwm=1) for _ in range(30)]
    while publisher.ask("stats")["subscribers_seen"] < 30:
        publisher.ask("publish", 0, 1, 10)
    before = publisher.ask("memory")
    publisher.ask("publish", 0, 3_000, 10_000)
    while publisher.ask("stats")["batches_pending"]:
        pass  # the last group of a burst is sent soon after it
    assert publisher.ask("memory") - before < 50 * MiB
    assert len(silent) == 30


def test_shutdown_with_a_long_backlog_loses_nothing_of_a_prompt_reader(start_publisher: Start, dial: Start) -> None:
    publisher = start_publisher(hwm=200_000, replay_endpoint=None)
    reader = dial(zmq.SUB, publisher.endpoint, hwm=0)
    while not reader.poll(5):
        publisher.ask("publish", 0, 1, 10)
    publisher.begin("publish", 0, 100_000, 10)
    publisher.begin("close", 30.0)
    numbers = [number(reader.recv_multipart())]
    publisher.read()
    report = publisher.read()
    assert (report["batches_dropped"], report["was_cut"]) == (0, False)
    while numbers[-1] != report["batches_handed_over"] - 1:
        numbers.append(number(reader.recv_multipart()))
    assert numbers == list(range(numbers[0], report["batches_handed_over"]))
    assert len(numbers) >= 100_000


def test_a_deadline_that_cuts_a_slow_reader_is_reported(start_publisher: Start, dial: Start) -> None:
    publisher = start_publisher(replay_endpoint=None)
    slow = dial(zmq.SUB, publisher.endpoint, hwm=1)
    while not slow.poll(5):
        publisher.ask("publish", 0, 1, 10)
    publisher.ask("publish", 0, 3_000, 10_000)
    report = publisher.ask("close", 0.2)
    assert (report["batches_dropped"], report["was_cut"]) == (0, True)
    assert publisher.ask("close", 3_600.0) == report
