"""Dynamo's real relay and subscriber pass this kit's messages on. Runs where its wheel is installed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import kit
import pytest
from kit.waiting import wait_until

from scheduler_components import ParallelState
from scheduler_components.metrics import open_zmq_forward_pass_sink
from scheduler_components.metrics.forward_pass_metrics import decode_forward_pass, encode_forward_pass
from scheduler_components.testing.golden import forward_pass_vectors
from scheduler_components.values import ForwardPassMetrics, QueuedRequestMetrics, ScheduledRequestMetrics

pytest.importorskip("dynamo.llm", reason="`pip install ai-dynamo-runtime==1.6.1` has the relay")

READER = Path(kit.__file__).with_name("dynamo_forward_passes.py")

pytestmark = [pytest.mark.sockets, pytest.mark.processes]


def test_dynamos_relay_and_subscriber_read_the_bytes_and_its_publisher_writes_the_same() -> None:
    sink = open_zmq_forward_pass_sink("tcp://127.0.0.1:0", ParallelState())
    command = [sys.executable, str(READER), sink.endpoint]  # type: ignore[attr-defined]
    received: list[bytes] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        lines = reader.stdout

        def read() -> None:
            received.extend(bytes.fromhex(line) for line in lines if line != "ready\n")

        thread = threading.Thread(target=read)
        thread.start()
        try:
            probe = ForwardPassMetrics(worker_id="probe")
            wait_until(lambda: received, poll=lambda: (sink.send(probe), thread.join(0.01)))
            for vector in forward_pass_vectors():
                sink.send(vector.metrics)
            wanted = {vector.payload for vector in forward_pass_vectors()}
            wait_until(lambda: wanted <= set(received))

            def send_direct() -> None:  # until the subscription has arrived
                reader.stdin.write("direct\n")
                reader.stdin.flush()
                thread.join(0.05)

            def direct() -> list[bytes]:
                return [each for each in received if decode_forward_pass(each).worker_id == "direct"]

            wait_until(lambda: any(decode_forward_pass(each).wall_time for each in direct()), poll=send_direct)
        finally:
            reader.kill()
            thread.join()
            sink.close()
    theirs = next(each for each in direct() if decode_forward_pass(each).wall_time)
    counter_id = decode_forward_pass(theirs).counter_id
    scheduled, queued = ScheduledRequestMetrics(2, 72, 0.0, 32, 2, 30), QueuedRequestMetrics(2, 80, 0.0, 1, 70_000)
    assert theirs == encode_forward_pass(ForwardPassMetrics(1, "direct", 0, counter_id, 0.25, scheduled, queued))


def test_dynamos_tracker_keeps_the_newest_message_of_each_replica_of_a_known_worker() -> None:
    """The mode that Dynamo's planner uses: messages of a worker without a registered model are left out."""
    sink = open_zmq_forward_pass_sink("tcp://127.0.0.1:0", ParallelState())
    command = [sys.executable, str(READER), sink.endpoint, "track"]  # type: ignore[attr-defined]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracker:
        assert tracker.stdin is not None
        assert tracker.stdout is not None
        questions, answers = tracker.stdin, tracker.stdout

        def tracked() -> dict[tuple[str, int], bytes]:
            questions.write("stats\n")
            questions.flush()
            return {(name, rank): bytes.fromhex(payload) for name, rank, payload in json.loads(answers.readline())}

        try:
            worker = answers.readline().strip()
            sent: dict[tuple[str, int], bytes] = {}

            def send() -> None:  # until the relay has connected; each message replaces the last one of its replica
                for counter_id in (1, 2):
                    for name, rank in (("unknown", 0), (worker, 0), (worker, 1)):
                        scheduled = ScheduledRequestMetrics(1, 8 * (rank + 1))
                        metrics = ForwardPassMetrics(1, name, rank, counter_id, 0.25, scheduled)
                        sent[name, rank] = encode_forward_pass(metrics)
                        sink.send(metrics)

            send()
            known = {key: payload for key, payload in sent.items() if key[0] == worker}
            wait_until(lambda: tracked() == known, poll=send)
        finally:
            tracker.kill()
            sink.close()
