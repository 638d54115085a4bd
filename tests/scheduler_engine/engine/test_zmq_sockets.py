"""Messages reach a PULL socket that binds later, and an address that cannot be bound is a start error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq

from scheduler_components import StartError
from scheduler_engine.engine.zmq_sockets import bind_pull, connect_push

pytestmark = pytest.mark.sockets


def test_messages_sent_before_the_peer_binds_arrive(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    address = f"ipc://{tmp_path}/s"
    with context, connect_push(context, address) as push:
        push.send(b"first")
        with bind_pull(context, address, high_water_mark=10) as pull:
            assert pull.poll(10_000)
            assert pull.recv() == b"first"


def test_an_address_that_cannot_be_bound_is_a_start_error(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    try:
        with pytest.raises(StartError, match="set TMPDIR"):
            bind_pull(context, f"ipc://{tmp_path}/{'x' * 200}", high_water_mark=10)
    finally:
        context.destroy(linger=0)
