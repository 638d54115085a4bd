"""SGLang's own encoder, decoder, counts and publisher of forward-pass metrics agree with this kit's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.waiting import wait_until

from scheduler_components.forward_pass_publisher import count_queued, count_scheduled
from scheduler_components.metrics import open_zmq_forward_pass_reader
from scheduler_components.metrics.forward_pass_metrics import decode_forward_pass, encode_forward_pass
from scheduler_components.testing.golden import ForwardPassVector, forward_pass_vectors
from scheduler_components.values import ForwardPassMetrics

theirs = pytest.importorskip("sglang.srt.observability.forward_pass_metrics", reason="make engines ENGINES=sglang")

pytestmark = [pytest.mark.engine, pytest.mark.sockets, pytest.mark.threads]


@pytest.mark.parametrize("vector", forward_pass_vectors(), ids=str)
def test_sglang_reads_and_writes_the_golden_bytes(vector: ForwardPassVector) -> None:
    decoded = theirs.decode(vector.payload)
    assert repr(decoded) == repr(vector.metrics)
    assert theirs.encode(decoded) == vector.payload == encode_forward_pass(vector.metrics)


def test_the_fields_and_their_defaults_are_sglangs() -> None:
    assert theirs.encode(theirs.ForwardPassMetrics()) == encode_forward_pass(ForwardPassMetrics())
    assert decode_forward_pass(theirs.encode(theirs.ForwardPassMetrics())) == ForwardPassMetrics()


@dataclass
class Req:
    """A request as SGLang's and as this kit's counts read it."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    start: int = 0
    end: int = 0
    is_prefill: bool = True
    origin_input_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origin_input_ids = [0] * self.num_prompt_tokens
        self.output_ids = [0] * self.num_output_tokens
        self.num_input_tokens = self.seqlen = self.num_prompt_tokens + self.num_output_tokens
        self.request = self


@pytest.fixture(scope="module")
def reporter() -> Any:
    """SGLang's reporter without its scheduler: the class that counts."""
    module = pytest.importorskip("sglang.srt.managers.scheduler_components.metrics_reporter")
    names = [name for name, value in vars(module).items() if hasattr(value, "_build_scheduled_request_metrics")]
    return getattr(module, names[0])


def batch_of(mode: str, reqs: list[Req]) -> Any:
    kinds = ("mixed", "extend", "decode")
    return SimpleNamespace(
        reqs=reqs,
        decoding_reqs=[],
        forward_mode=SimpleNamespace(**{f"is_{kind}": lambda kind=kind: kind == mode for kind in kinds}),
        prefill_stats=SimpleNamespace(
            num_new_seqs=len(reqs), log_input_tokens=sum(each.end - each.start for each in reqs)
        ),
        prefix_lens=[each.start for each in reqs],
        seq_lens_cpu=[each.end for each in reqs],
    )


def test_the_counts_of_a_pass_are_sglangs(reporter: Any) -> None:
    prefills = [Req(100, start=32, end=100), Req(7, end=7), Req(5_000, start=512, end=1_024)]
    decodes = [Req(20, 5, start=24, end=25, is_prefill=False), Req(900, 1, start=900, end=901, is_prefill=False)]
    for mode, reqs in (("extend", prefills), ("decode", decodes), ("idle", [])):
        counted = reporter._build_scheduled_request_metrics(SimpleNamespace(), batch_of(mode, reqs))
        ours = count_scheduled(reqs)
        assert [getattr(ours, name) for name in ours.__struct_fields__] == pytest.approx(
            [getattr(counted, name) for name in counted.__struct_fields__]
        )


def test_the_counts_of_a_queue_are_sglangs(reporter: Any) -> None:
    from sglang.srt.disaggregation.utils import DisaggregationMode

    waiting = [Req(30), Req(50), Req(11, 3), Req(2_000, 100), Req(4)]
    scheduler = SimpleNamespace(disaggregation_mode=DisaggregationMode.NULL, waiting_queue=waiting)
    counted = reporter._build_queued_request_metrics(SimpleNamespace(scheduler=scheduler))
    ours = count_queued(waiting)
    assert [getattr(ours, name) for name in ours.__struct_fields__] == pytest.approx(
        [getattr(counted, name) for name in counted.__struct_fields__]
    )


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    endpoint = f"ipc://{tmp_path}/fpm.0"
    publisher = theirs._FpmPublisherThread(endpoint, worker_id="sgl", dp_rank=3)
    yield publisher, endpoint
    publisher.shutdown()


def test_sglangs_publisher_is_read_with_its_heartbeats(publisher: tuple[Any, str]) -> None:
    thread, endpoint = publisher
    reader = open_zmq_forward_pass_reader([endpoint])
    found: list[ForwardPassMetrics] = []
    try:
        sent = theirs.ForwardPassMetrics(worker_id="sgl", dp_rank=3, wall_time=0.5)
        wait_until(lambda: found, poll=lambda: (thread.publish(sent), found.extend(reader.receive(0.01))))
        thread.set_idle(True)
        wait_until(lambda: not found[-1].wall_time, poll=lambda: found.extend(reader.receive(0.05)))
    finally:
        reader.close()
    assert found[-1] == ForwardPassMetrics(worker_id="sgl", dp_rank=3, counter_id=found[-1].counter_id)
    assert [each.counter_id for each in found] == list(range(found[0].counter_id, found[-1].counter_id + 1))
    assert (reader.missed, reader.bad) == (0, 0)
