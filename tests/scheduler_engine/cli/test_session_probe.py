"""The probe distinguishes a ZMQ socket from a closed port and from other listeners."""

from __future__ import annotations

import asyncio
import socket

import pytest
import zmq

from observability.kv_stream import static_address
from scheduler_components.kv_events import StreamAddress
from scheduler_engine.cli.run_report import is_zmq_listening, probe_ports

pytestmark = pytest.mark.sockets

HOST = "127.0.0.1"


def test_a_zmq_socket_is_recognized() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        port = publisher.bind_to_random_port(f"tcp://{HOST}")
        assert asyncio.run(is_zmq_listening(HOST, port))


def test_a_closed_port_is_not_a_zmq_socket() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    assert not asyncio.run(is_zmq_listening(HOST, port))


def test_another_protocol_is_not_a_zmq_socket() -> None:
    async def scenario() -> bool:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
            writer.close()

        server = await asyncio.start_server(greet, HOST, 0)
        async with server:
            return await is_zmq_listening(HOST, server.sockets[0].getsockname()[1])

    assert not asyncio.run(scenario())


def test_every_candidate_port_is_dialled_but_those_of_the_replay() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        port = publisher.bind_to_random_port(f"tcp://{HOST}", min_port=20_000, max_port=40_000)
        address = static_address(f"tcp://{HOST}:{port}", replay=f"tcp://{HOST}:{port + 1}")
        probe = asyncio.run(probe_ports([address], world_size=3))
    assert probe is not None
    assert probe.probed == (port, port + 2)
    assert port in probe.speaking
    assert probe.advertised == {port}


def test_streams_on_ports_of_the_system_are_not_probed() -> None:
    """What their neighbours are says nothing of the engine."""
    addresses = [static_address(f"tcp://{HOST}:{port}", rank=rank) for rank, port in enumerate((40_001, 40_007))]
    assert asyncio.run(probe_ports(addresses, world_size=4)) is None


def test_streams_that_are_not_on_tcp_are_not_probed() -> None:
    address: StreamAddress = static_address("ipc:///tmp/stream")
    assert asyncio.run(probe_ports([address], world_size=4)) is None
