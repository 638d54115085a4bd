"""A load gauge opens at the configured address for the allowed readers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from scheduler_components import ConfigError, GaugePacer, ParallelState, open_load_publisher
from scheduler_components.kv_events import CurveClientKeys, write_key_pair
from scheduler_components.load import open_zmq_load_reader
from scheduler_components.values import LoadSnapshot

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

Eventually = Callable[[Callable[[], object]], None]


@dataclass
class Load:
    running: int = 0
    dp_rank: int = 0

    def get_loads(self) -> LoadSnapshot:
        return LoadSnapshot(timestamp=time.time(), num_running_reqs=self.running, dp_rank=self.dp_rank)


def test_one_call_opens_each_ranks_gauge_at_its_port(free_ports: Callable[[int], int], eventually: Eventually) -> None:
    base = free_ports(2)
    config = f'{{"load_endpoint": "tcp://127.0.0.1:{base}"}}'
    worlds = [ParallelState.from_tp_rank(tp_rank, tp_size=4, attn_dp_size=2) for tp_rank in range(4)]
    publishers = [
        open_load_publisher(
            config,
            parallel=parallel,
            load=Load(running=4, dp_rank=parallel.kv_stream_index),
            pacer=GaugePacer(min_interval_s=0.0, heartbeat_s=0.001),
        )
        for parallel in worlds
    ]
    assert [len(publisher.sinks) for publisher in publishers] == [1, 0, 1, 0]
    reader = open_zmq_load_reader([f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + 1}"])

    def all_heard() -> bool:
        for publisher in publishers:
            publisher.publish_load()
        return reader.read(0.01).samples.keys() == {0, 1}

    eventually(all_heard)
    assert reader.view.samples[0].stat.num_running_reqs == 4
    reader.close()
    for publisher in publishers:
        publisher.close()
        publisher.close()


def test_only_readers_with_an_allowed_key_receive_the_load(
    tmp_path: Path, free_ports: Callable[[int], int], eventually: Eventually
) -> None:
    server_key, server_secret = write_key_pair(tmp_path / "server", "engine")
    _, reader_secret = write_key_pair(tmp_path / "clients", "router")
    endpoint = f"tcp://127.0.0.1:{free_ports(1)}"
    config = {
        "load_endpoint": endpoint,
        "auth": "required",
        "secret_key_file": str(server_secret),
        "client_keys_dir": str(tmp_path / "clients"),
    }
    publisher = open_load_publisher(
        json.dumps(config),
        parallel=ParallelState(),
        load=Load(running=4),
        pacer=GaugePacer(min_interval_s=0.0, heartbeat_s=0.001),
    )
    stranger = open_zmq_load_reader([endpoint])
    known = open_zmq_load_reader([endpoint], keys=CurveClientKeys.read(str(reader_secret), str(server_key)))

    def heard() -> bool:
        publisher.publish_load()
        stranger.read()
        return known.read(0.01).samples.keys() == {0} and known.reports.received > 20

    eventually(heard)
    assert stranger.reports.received == 0
    for opened in (stranger, known, publisher):
        opened.close()


@pytest.mark.parametrize("stall_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_stall_is_a_time_span(stall_s: float) -> None:
    with pytest.raises(ConfigError, match="stall_s"):
        open_zmq_load_reader(["tcp://127.0.0.1:5600"], stall_s=stall_s)
