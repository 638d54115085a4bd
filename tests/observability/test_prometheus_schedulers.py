"""What Prometheus reads is the newest report of each rank, under the catalogue's names, on the injected registry."""

from __future__ import annotations

import prometheus_client
import pytest
from kit.scheduler_stats import make_stats
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from observability import PrometheusSink
from observability.catalog import SCHEDULER_METRICS, read_number
from scheduler_components import ConfigError, MetricsEmitter, OutputStreamer, ParallelState
from scheduler_components.metrics import RequestLatencyRecorder
from scheduler_components.quiesce import QuiesceState
from scheduler_components.testing import ListOutputSink
from scheduler_components.values import (
    LoadSnapshot,
    LoraLoad,
    MemoryTag,
    PublisherStats,
    QueueLoad,
    QuiesceStats,
    SchedulerCounters,
    SchedulerStats,
    TierStats,
    TokenOutput,
)


def read(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"pp_rank": "0", "tp_rank": "0", "dp_rank": "0", **labels})


def test_a_report_is_read_under_sglangs_names() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry).record(make_stats(num_running_reqs=3, num_waiting_reqs=2, token_usage=0.5))
    assert read(registry, "sglang:num_running_reqs") == 3
    assert read(registry, "sglang:num_queue_reqs") == 2
    assert read(registry, "sglang:token_usage") == 0.5


def test_every_metric_of_the_catalogue_is_exposed_and_the_text_can_be_parsed() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry).record(make_stats(queues=QueueLoad()))
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    for metric in SCHEDULER_METRICS:
        # The others are of parts that not every engine has.
        if read_number(metric, make_stats(queues=QueueLoad())) is not None:
            family = families["sglang:" + metric.name.removesuffix("_total")]
            assert family.type == metric.kind
            assert family.documentation == metric.help
            assert [sample.name for sample in family.samples] == ["sglang:" + metric.name]


def test_counters_are_counters() -> None:
    registry = CollectorRegistry()
    stats = SchedulerStats(
        labels=ParallelState().metric_labels,
        load=LoadSnapshot(),
        counters=SchedulerCounters(prompt_tokens_total=70, num_retractions_total=2),
        tiers=TierStats(host_hit_tokens=16),
        publisher=PublisherStats(batches_sent=5, last_sequence=4),
    )
    PrometheusSink(registry).record(stats)
    assert read(registry, "sglang:prompt_tokens_total") == 70
    assert read(registry, "sglang:num_retracted_requests_total") == 2
    assert read(registry, "sglang:hicache_host_hit_tokens_total") == 16
    assert read(registry, "sglang:kv_events_batches_sent_total") == 5
    assert read(registry, "sglang:kv_events_last_sequence") == 4


def test_histograms_read_as_prometheus_client_writes_its_own() -> None:
    values = [0.0, 0.001, 0.05, 0.1, 0.100001, 3.0, 1e6]
    latencies = RequestLatencyRecorder()
    own = CollectorRegistry()
    bounds = latencies.stats().queue.bounds
    expected = prometheus_client.Histogram("sglang:queue_time_seconds", "doc", registry=own, buckets=bounds)
    for value in values:
        latencies.histograms.queue.observe(value)
        expected.observe(value)
    registry = CollectorRegistry()
    PrometheusSink(registry, vllm_names=True).record(
        SchedulerStats(labels=ParallelState().metric_labels, load=LoadSnapshot(), latencies=latencies.stats())
    )
    for suffix in ("count", "sum"):
        name = f"sglang:queue_time_seconds_{suffix}"
        assert read(registry, name) == own.get_sample_value(name)
    for bound in (*(str(float(bound)) for bound in bounds), "+Inf"):
        name = "sglang:queue_time_seconds_bucket"
        assert read(registry, name, le=bound) == own.get_sample_value(name, {"le": bound})
    assert read(registry, "vllm:request_queue_time_seconds_count") == len(values)
    text = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["sglang:queue_time_seconds"].type == "histogram"


def labels_of(page: str, family: str) -> list[tuple[dict[str, str], float]]:
    """Return the samples of one family with all of their labels, as a gateway reads them."""
    return [
        (sample.labels, sample.value)
        for found in text_string_to_metric_families(page)
        for sample in found.samples
        if found.name == family
    ]


@pytest.mark.parametrize("prefix", ["sglang:", "vllm:"])
def test_the_gateway_reads_pool_and_adapters(prefix: str) -> None:
    """The model-server contract: block size and number of blocks as labels, adapters with the time of the report."""
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, prefix=prefix, vllm_names=True)
    lora = LoraLoad(1, 4, 0.25, ("sql", "chat"), ("legal",))
    sink.record(make_stats(0, page_size=16, max_total_num_tokens=1_600, lora=lora, timestamp=1_700_000_000.5))
    sink.record(make_stats(1, page_size=32, max_total_num_tokens=1_600, lora=LoraLoad(0, 4, 0.0)))
    page = generate_latest(registry).decode()
    for name, size, count in ((f"{prefix}cache_config_info", "page_size", "num_pages"),
                              ("vllm:cache_config_info", "block_size", "num_gpu_blocks")):  # fmt: skip
        found = [(labels["dp_rank"], labels[size], labels[count], value) for labels, value in labels_of(page, name)]
        assert found == [("0", "16", "100", 1.0), ("1", "32", "50", 1.0)]
    (busy, at), (idle, _) = labels_of(page, "vllm:lora_requests_info")
    assert at == 1_700_000_000.5
    assert (busy["max_lora"], busy["running_lora_adapters"], busy["waiting_lora_adapters"]) == (
        "4",
        "sql,chat",
        "legal",
    )
    assert (idle["running_lora_adapters"], idle["waiting_lora_adapters"]) == ("", "")
    # Adapters that are gone leave nothing behind: a rank has one sample at a time.
    sink.record(make_stats(0, page_size=16, max_total_num_tokens=1_600, lora=LoraLoad(0, 4, 0.0)))
    assert len(labels_of(generate_latest(registry).decode(), "vllm:lora_requests_info")) == 2


def test_an_engine_that_does_not_say_its_pool_has_no_info_of_it() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry).record(make_stats(max_total_num_tokens=0))
    assert "_info" not in generate_latest(registry).decode()


def test_parts_that_an_engine_has_not_are_not_exposed() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry).record(make_stats())
    text = generate_latest(registry).decode()
    assert "lora" not in text
    assert "hicache" not in text
    assert read(registry, "sglang:num_paused_reqs") is None


def test_a_rank_that_stopped_reporting_shows_as_a_growing_age() -> None:
    registry, now = CollectorRegistry(), [100.0]
    sink = PrometheusSink(registry, clock=lambda: now[0])
    sink.record(make_stats(timestamp=99.0, num_running_reqs=7))
    assert read(registry, "sglang:load_age_seconds") == 1.0
    now[0] = 500.0
    assert read(registry, "sglang:load_age_seconds") == 401.0
    assert read(registry, "sglang:num_running_reqs") == 7
    now[0] = 50.0
    assert read(registry, "sglang:load_age_seconds") == 0.0


def test_labels_are_bounded_and_what_is_refused_is_counted() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, max_ranks=2)
    for dp_rank in (0, 1, 2, 3, 0, 1):
        sink.record(make_stats(dp_rank, num_running_reqs=dp_rank + 1))
    text = generate_latest(registry).decode()
    assert text.count("sglang:num_running_reqs{") == 2
    assert registry.get_sample_value("sglang:metrics_reports_refused_total") == 2


def test_prefix_and_model_name_are_settings() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry, prefix="my_", model_name="tiny").record(make_stats(num_running_reqs=1))
    assert read(registry, "my_num_running_reqs", model_name="tiny") == 1


def test_vllms_names_say_the_same() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry, vllm_names=True).record(make_stats(num_running_reqs=3, token_usage=0.25))
    assert read(registry, "sglang:num_running_reqs") == read(registry, "vllm:num_requests_running") == 3
    assert read(registry, "vllm:kv_cache_usage_perc") == 0.25
    assert read(registry, "vllm:prefix_cache_queries_total") == 0


def test_a_name_that_both_flavours_share_is_exposed_once() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry, prefix="vllm:", vllm_names=True).record(make_stats())
    assert generate_latest(registry).decode().count("# TYPE vllm:prompt_tokens_total ") == 1


def test_two_sinks_of_one_prefix_on_one_registry_are_refused() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry)
    with pytest.raises(ConfigError, match="prefix"):
        PrometheusSink(registry)
    PrometheusSink(registry, prefix="other_")


@pytest.mark.parametrize("prefix", ["9lives", "a-b", "a b", "é"])
def test_a_prefix_that_no_name_can_begin_with_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        PrometheusSink(CollectorRegistry(), prefix=prefix)


def test_close_leaves_the_registry_and_may_be_called_twice() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    sink.close()
    sink.close()
    assert generate_latest(registry) == b""
    PrometheusSink(registry)


def test_the_global_registry_is_left_alone() -> None:
    PrometheusSink(CollectorRegistry()).record(make_stats())
    assert "sglang" not in generate_latest(REGISTRY).decode()


def states_of(quiesce: QuiesceStats | None) -> dict[str, float | None]:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, vllm_names=True)
    labels = (("dp_rank", "0"),)
    sink.record(SchedulerStats(labels, LoadSnapshot(), quiesce=quiesce))
    return {
        state: registry.get_sample_value(f"vllm:{name}", dict(labels) | {"sleep_state": state})
        for name in ("engine_sleep_state",)
        for state in ("awake", "weights_offloaded", "discard_all")
    }


@pytest.mark.parametrize(
    ("state", "samples"),
    [
        (QuiesceState(), (1, 0, 0)),
        (QuiesceState(released=frozenset({MemoryTag.KV_CACHE})), (0, 0, 0)),
        (QuiesceState(released=frozenset(MemoryTag)), (0, 1, 0)),
        (QuiesceState(released=frozenset(MemoryTag), has_weights=False), (0, 0, 1)),
        (QuiesceState(has_weights=False), (0, 0, 1)),
    ],
)
def test_each_state_is_told(state: QuiesceState, samples: tuple[int, int, int]) -> None:
    assert tuple(states_of(state.stats()).values()) == samples


def test_an_engine_that_takes_no_orders_tells_none() -> None:
    assert set(states_of(None).values()) == {None}


class Idle:
    def get_loads(self) -> LoadSnapshot:
        return LoadSnapshot()


class FinishedRequest:
    rid, finish_reason, stream_interval, num_output_tokens = "a", "length", 1, 3

    def output_since(self, start: int) -> TokenOutput:
        return TokenOutput((7, 8, 9)[start:])


def test_a_report_of_an_idle_scheduler_has_the_newest_counters_of_the_streamer() -> None:
    registry, outputs = CollectorRegistry(), ListOutputSink()
    streamer = OutputStreamer(sink=outputs)
    emitter = MetricsEmitter(
        parallel=ParallelState(), load=Idle(), sink=PrometheusSink(registry, prefix=""), sources={"outputs": streamer}
    )

    def value(name: str) -> float | None:
        emitter.emit()
        return registry.get_sample_value(name, dict(ParallelState().metric_labels))

    assert (value("output_steps_delayed_total"), value("output_ends_held")) == (0, 0)
    outputs.is_full = True
    streamer.stream([FinishedRequest()])
    assert (value("output_steps_delayed_total"), value("output_ends_held")) == (1, 1)
    outputs.is_full = False
    streamer.flush()
    assert (value("output_tokens_sent_total"), value("output_ends_held")) == (3, 0)
    outputs.is_full = True
    streamer.stream([FinishedRequest()])
    streamer.close()
    assert (value("output_ends_dropped_total"), value("output_tokens_dropped_total")) == (1, 3)
