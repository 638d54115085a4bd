"""The transcribed rules of ``kit/engine_stream_rules.py`` are those of SGLang, over the whole space of topologies."""

from __future__ import annotations

import inspect

import pytest
from kit.engine_stream_rules import SGLANG_EVENTS, offset_sglang_endpoint

pytest.importorskip("sglang", reason="`make engines` makes an environment with sglang")

from sglang.srt.disaggregation import kv_events
from sglang.srt.managers.scheduler_components import metrics_reporter
from sglang.srt.observability import metrics_collector

from scheduler_components.testing import topologies

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def test_the_gate_and_the_index_of_events_are_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    for topology in topologies():
        for rank in topology.ranks:
            parallel = rank.parallel
            monkeypatch.setattr(kv_events, "get_parallel", lambda parallel=parallel: parallel)
            assert kv_events.is_kv_publisher_rank("{}") == SGLANG_EVENTS.rule(parallel)
            found = kv_events.select_kv_publisher_dp_rank(
                parallel.attn_dp_size, parallel.attn_dp_rank, parallel.dp_rank
            )
            assert found == SGLANG_EVENTS.index(parallel)


@pytest.mark.parametrize(
    "base", ["tcp://*:5557", "tcp://*:0", "inproc://cache", "tcp://inproc-3:1", "tcp://[::]:65535"]
)
@pytest.mark.parametrize("rank", range(3))
def test_the_offsets_are_sglangs(base: str, rank: int) -> None:
    assert kv_events.ZmqEventPublisher.offset_endpoint_port(base, rank) == offset_sglang_endpoint(base, rank)


def test_ipc_is_refused_by_both() -> None:
    for offset in (kv_events.ZmqEventPublisher.offset_endpoint_port, offset_sglang_endpoint):
        with pytest.raises(ValueError, match="must contain 'inproc' or 'tcp'"):
            offset("ipc:///tmp/kv", 1)


def test_the_gates_of_metrics_and_forward_passes_are_written_as_transcribed() -> None:
    metrics = " ".join(inspect.getsource(metrics_collector.SchedulerMetricsCollector.init_new).split())
    assert "is_stats_logging_rank = ( parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0 )" in metrics
    passes = " ".join(inspect.getsource(metrics_reporter.SchedulerMetricsReporter._init_fpm).split())
    assert "get_parallel().attn_tp_rank == 0 and get_parallel().pp_rank == get_parallel().pp_size - 1 )" in passes
    assert "get_parallel().dp_rank if get_parallel().dp_rank is not None else 0" in passes
