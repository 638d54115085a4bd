"""Readers of Dynamo's real mocker, which never answers requests of the extension. Runs where its wheel is installed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kit
import pytest
from kit.waiting import wait_until

from observability import DoctorOptions, check_worker
from observability.doctor import Severity
from observability.kv_stream import FollowPolicy, StreamState, open_subscriber, static_address

pytest.importorskip("dynamo.llm", reason="`pip install ai-dynamo-runtime==1.6.1` has the mocker")

MOCKER = Path(kit.__file__).with_name("dynamo_mocker.py")

pytestmark = [pytest.mark.soak_only, pytest.mark.sockets, pytest.mark.processes]


def test_a_reader_of_the_mocker_is_live_soon(model_folder: Path, free_ports: Callable[[int], int]) -> None:
    events_port = free_ports(2)
    command = [sys.executable, str(MOCKER), str(model_folder), str(events_port), str(events_port + 1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mocker:
        assert mocker.stdin is not None
        assert mocker.stdout is not None
        lines = iter(mocker.stdout)

        def serve(count: int) -> None:
            mocker.stdin.write(f"{count}\n")
            mocker.stdin.flush()
            assert any(line == "served\n" for line in lines)

        try:
            assert any(line == "ready\n" for line in lines)
            replay = f"tcp://127.0.0.1:{events_port + 1}"
            address = static_address(f"tcp://127.0.0.1:{events_port}", replay=replay)
            with open_subscriber([address]) as early:
                wait_until(lambda: early.stats()[0].replays_asked >= 2, poll=lambda: early.poll(0.05))
                assert early.stats()[0].state is StreamState.SYNCING  # an empty answer proves nothing
                serve(10)
                wait_until(lambda: early.stats()[0].state is StreamState.LIVE, poll=lambda: early.poll(0.05))
                wait_until(lambda: len(early.blocks(0)) == 40, poll=lambda: early.poll(0.05))
            start_s = time.monotonic()
            with open_subscriber([address]) as late:
                wait_until(lambda: late.stats()[0].state is StreamState.LIVE, poll=lambda: late.poll(0.05))
                assert time.monotonic() - start_s < FollowPolicy().answer_timeout_s
                assert len(late.blocks(0)) == 40
                assert late.stats()[0].replays_unanswered == 0
            report = check_worker(str(address.events), DoctorOptions(replay_endpoint=replay))
            assert {each.severity for each in report} == {Severity.OK}
        finally:
            mocker.kill()
