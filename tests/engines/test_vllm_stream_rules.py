"""The transcribed offsets of ``kit/engine_stream_rules.py`` are those of vLLM."""

from __future__ import annotations

import inspect

import pytest
from kit.engine_stream_rules import offset_vllm_endpoint

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.v1.core.sched.scheduler import Scheduler

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(
    "base", ["tcp://*:5557", "tcp://*:0", "inproc://cache", "tcp://inproc-3:1", "tcp://[::]:65535"]
)
@pytest.mark.parametrize("rank", range(3))
def test_the_offsets_are_vllms(base: str, rank: int) -> None:
    assert ZmqEventPublisher.offset_endpoint_port(base, rank) == offset_vllm_endpoint(base, rank)


def test_ipc_is_refused_by_both() -> None:
    for offset in (ZmqEventPublisher.offset_endpoint_port, offset_vllm_endpoint):
        with pytest.raises(ValueError, match="must contain 'inproc' or 'tcp'"):
            offset("ipc:///tmp/kv", 1)


def test_the_index_is_that_of_the_replica() -> None:
    made = " ".join(inspect.getsource(Scheduler.__init__).split())
    assert "self.kv_events_config, self.parallel_config.data_parallel_index, )" in made
