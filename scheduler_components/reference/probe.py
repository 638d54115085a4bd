"""Asks from outside which ports have a ZMQ socket behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from observability.kv_stream.discovery import StreamAddress
from scheduler_components.reference.verdict import PortProbe

__all__ = ["probe_ports", "speaks_zmq"]

_GREETING_S = 2.0
_SIGNATURE_BYTES = 10  # of ZMTP 3: 0xff, eight bytes of padding, 0x7f


async def probe_ports(addresses: Iterable[StreamAddress], world_size: int) -> PortProbe | None:
    """Dial one port a rank, from the first stream's on; None when a stream is not on tcp.

    An engine that let every rank publish, which is the mistake to be found, would answer on all of them. Ports
    that are advertised for replay or load are left out.
    """
    streams = list(addresses)
    events = [address.events for address in streams]
    first = events[0]
    if any(endpoint.port is None for endpoint in events) or first.port is None:
        return None
    others = {side.port for address in streams for side in (address.replay, address.load) if side is not None}
    probed = tuple(port for port in range(first.port, first.port + world_size) if port not in others)
    answers = await asyncio.gather(*(speaks_zmq(first.host, port) for port in probed))
    return PortProbe(
        probed=probed,
        speaking=frozenset(port for port, answer in zip(probed, answers, strict=True) if answer),
        advertised=frozenset(endpoint.port for endpoint in events if endpoint.port is not None),
    )


async def speaks_zmq(host: str, port: int) -> bool:
    """True when a peer at ``host:port`` greets as ZMQ does; the connection is closed at once."""
    try:
        async with asyncio.timeout(_GREETING_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                signature = await reader.readexactly(_SIGNATURE_BYTES)
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    return signature[0] == 0xFF and signature[-1] == 0x7F
