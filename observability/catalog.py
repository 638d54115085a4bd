"""The catalogue of metrics: name, meaning and path of each value.

The fields of the statistics describe their metrics (``values.stats``, ``values.load``, ``kv_stream.stream_stats``), and
the catalogue gives them paths, an order and headings. Collectors export exactly ``METRIC_GROUPS``. The documentation
and the dashboard are generated from it.

Names are SGLang's if SGLang (0.5.23) has the metric and follow its style otherwise, so that dashboards and routers for
SGLang can read them. ``vllm_names`` are the names of the same metric in vLLM (0.33.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Literal, get_args, get_type_hints

import attrs
import msgspec
from msgspec.structs import replace

from observability.kv_stream import LogStats, RelayedStreamStats, StreamStats
from scheduler_components.values import HistogramSnapshot, SchedulerStats
from scheduler_components.values.metric import Metric, counter, gauge

__all__ = [
    "InfoMetric",
    "Metric",
    "MetricGroup",
    "METRIC_GROUPS",
    "SCHEDULER_METRICS",
    "SCHEDULER_HISTOGRAMS",
    "LOAD_AGE_METRIC",
    "REPORTS_REFUSED",
    "PAGE_READS_FAILED",
    "INFO_METRICS",
    "STATE_METRICS",
    "StateMetric",
    "ALL_METRICS",
    "STREAM_STATE_METRIC",
    "LOG_METRICS",
    "LOG_PREFIX",
    "STREAM_METRICS",
    "SGLANG_PREFIX",
    "VLLM_PREFIX",
    "STREAM_PREFIX",
    "RELAY_METRICS",
    "RELAY_PREFIX",
    "read_histogram",
    "read_number",
    "render_markdown",
    "render_stream_markdown",
]

SGLANG_PREFIX = "sglang:"
VLLM_PREFIX = "vllm:"
STREAM_PREFIX = "kv_stream_"
RELAY_PREFIX = "kv_relay_"
LOG_PREFIX = "kv_log_"
PROXY_PREFIX = "kv_proxy_"


@cache
def _steps(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))


def _find(stats: object, path: str) -> object:
    value: object = stats
    for attribute in _steps(path):
        value = getattr(value, attribute)
        if value is None:
            return None
    return value


def read_number(metric: Metric, stats: object) -> float | None:
    """Return the value in ``stats``; None if the engine lacks this part (no LoRA, no disaggregation)."""
    value = _find(stats, metric.path)
    assert value is None or isinstance(value, int | float), f"{metric.path} is {value!r}"
    return value


def read_histogram(metric: Metric, stats: object) -> HistogramSnapshot | None:
    """Return the histogram in ``stats`` of a metric of this kind; None if the engine has none."""
    value = _find(stats, metric.path)
    assert value is None or isinstance(value, HistogramSnapshot), f"{metric.path} is {value!r}"
    return value


@attrs.frozen(kw_only=True)
class InfoMetric:
    """A gauge whose labels carry the information. Each rank has one sample.

    Attributes:
        name: without prefix; the same in vLLM.
        help: one sentence for users.
        path: path of the value; empty for a value of 1.
        labels: label and path of its value; a tuple of texts is joined by commas.
    """

    name: str
    help: str
    labels: tuple[tuple[str, str], ...]
    path: str = ""

    def read(self, stats: SchedulerStats) -> tuple[dict[str, str], float] | None:
        """Return labels and value; None if the engine lacks this part or leaves it at 0."""
        found = {label: _find(stats, path) for label, path in self.labels}
        if any(value is None or value == 0 for value in found.values()):
            return None
        value = _find(stats, self.path) if self.path else 1
        assert isinstance(value, int | float), f"{self.path} is {value!r}"
        texts = {label: ",".join(each) if isinstance(each, tuple) else str(each) for label, each in found.items()}
        return texts, value


@attrs.frozen(kw_only=True)
class StateMetric:
    """A gauge with one sample per state, 1 for each active one; the same in vLLM.

    Attributes:
        name: without prefix.
        help: one sentence for users.
        label: label with the name of the state.
        flags: each state and the path of its flag.
    """

    name: str
    help: str
    label: str
    flags: tuple[tuple[str, str], ...]

    def read(self, stats: SchedulerStats) -> dict[str, float] | None:
        """Return the value of each state; None if the engine lacks this part."""
        found = {state: _find(stats, path) for state, path in self.flags}
        values = {state: float(value) for state, value in found.items() if isinstance(value, int | float)}
        return values or None


StatsKind = Literal["step", "collector", "stream", "relay", "log", "proxy", "replica"]


@attrs.frozen
class MetricGroup:
    """The metrics of one subject.

    Attributes:
        title: heading in the documentation.
        stats_kind: the struct of the paths: ``step`` is ``SchedulerStats``, ``stream`` is ``StreamStats``, ``relay`` is
            ``RelayedStreamStats``, ``log`` is ``LogStats``. ``proxy`` and ``replica`` are the counters of a proxy and
            of each replica behind it. A collector itself computes the metrics of ``collector``.
        metrics: in the order of the documentation.
    """

    title: str
    stats_kind: StatsKind
    metrics: tuple[Metric, ...]


def _metrics_in(stats: type[msgspec.Struct], prefix: str = "") -> Iterator[Metric]:
    """Yield the metrics of the fields of a struct and of the structs in it, in order."""
    for name, hint in get_type_hints(stats, include_extras=True).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                yield from _metrics_in(kind, f"{prefix}{name}.")
        yield from (
            replace(each, path=prefix + name) for each in getattr(hint, "__metadata__", ()) if isinstance(each, Metric)
        )


def _at_paths(**metrics: Metric) -> tuple[Metric, ...]:
    return tuple(replace(metric, path=path) for path, metric in metrics.items())


_STEP_METRICS = {metric.path: metric for metric in _metrics_in(SchedulerStats)}


def _step_group(title: str, *prefixes: str) -> MetricGroup:
    """Return a group of the fields below each prefix, without those of the structs in it and those of other groups."""
    paths = [
        path
        for prefix in prefixes
        for path in _STEP_METRICS
        if path.startswith(prefix) and "." not in path.removeprefix(prefix)
    ]
    return MetricGroup(title, "step", tuple(_STEP_METRICS.pop(path) for path in paths))


LOAD_AGE_METRIC = gauge("load_age_seconds", "seconds", "Age of the load snapshot of the gauges.")
"""Computed at a scrape. It grows for a rank that has stopped reporting."""

REPORTS_REFUSED = replace(
    counter("metrics_reports_refused_total", "reports", "Reports of ranks beyond the limit of the sink."),
    is_per_rank=False,
)
"""Counted by a ``PrometheusSink``: reports of new ranks beyond ``max_ranks``."""

PAGE_READS_FAILED = replace(
    counter(
        "metrics_pages_unread_total",
        "reads",
        "Reads of a rank's metrics page without a complete report: none is written yet, or the page was refused.",
    ),
    is_per_rank=False,
)
"""Counted by a ``MetricsBoardCollector``. The ranks of these reads keep their last values."""

_TOTALS = _step_group("Totals", "counters.", "load.total_", "load.decode_moments.")

# fmt: off
METRIC_GROUPS: tuple[MetricGroup, ...] = (
    _step_group("Load", "load."),
    _step_group("Held requests", "load.queues."),
    _step_group("Prefill and decode instances", "load.disaggregation."),
    _step_group("LoRA, speculation, memory", "load.lora.", "load.speculative.", "load.memory."),
    _TOTALS,
    # SGLang counts tokens here. These metrics count pages and have other names; page_size converts between them.
    _step_group("Hierarchical cache", "tiers."),
    _step_group("Input", "receiver."),
    _step_group("Pools", "pools."),
    _step_group("Integrity", "integrity.", "decisions."),
    _step_group("KV events", "publisher."),
    _step_group("Quiesce", "quiesce."),
    _step_group("Batches", "batching."),
    _step_group("Telemetry", "forward_passes.", "spans."),
    _step_group("Latencies", "latencies."),
    _step_group("Outputs", "outputs."),
    _step_group("Waiting rooms and time limits", "rooms.", "deadlines."),
    _step_group("Sessions", "sessions."),
    _step_group("LoRA adapters", "adapters."),
    _step_group("Grammars", "grammars."),
    MetricGroup("Reports", "collector", (LOAD_AGE_METRIC, REPORTS_REFUSED, PAGE_READS_FAILED)),
    MetricGroup("Followed streams", "stream", tuple(_metrics_in(StreamStats))),
    MetricGroup("Streams written to a broker", "log", tuple(_metrics_in(LogStats))),
    MetricGroup("Relayed streams", "relay",
        tuple(metric for metric in _metrics_in(RelayedStreamStats) if "." not in metric.path)),
    MetricGroup("Requests of a proxy", "proxy", _at_paths(
        open=gauge("kv_proxy_requests_open", "requests",
            "Requests that are open."),
        requests=counter("kv_proxy_requests_total", "requests",
            "Requests that were accepted."),
        refused=counter("kv_proxy_requests_refused_total", "requests",
            "Requests beyond the limit, or while the proxy was stopping."),
        unplaced=counter("kv_proxy_requests_unplaced_total", "requests",
            "Requests that no replica could take."),
        retried=counter("kv_proxy_retries_total", "attempts",
            "Attempts at another replica, after the first one of a request had failed."),
        cut=counter("kv_proxy_answers_cut_total", "answers",
            "Answers that ended early because an engine failed, or because other answers filled the memory."),
        answers_refused=counter("kv_proxy_answers_refused_total", "answers",
            "Answers that were not passed on whole, because other answers filled the memory."),
        unknown_prompts=counter("kv_proxy_prompts_unknown_total", "prompts",
            "Prompts routed by load alone, because no engine returned their tokens."),
    )),
    MetricGroup("Replicas of a proxy", "replica", _at_paths(
        is_up=gauge("kv_proxy_replica_is_up", "flag",
            "1 while the replica gets requests."),
        picks=counter("kv_proxy_replica_picks_total", "requests",
            "Requests that were sent to the replica."),
        prompt_blocks=counter("kv_proxy_replica_prompt_blocks_total", "blocks",
            "Whole blocks of the prompts of these requests."),
        cached_blocks=counter("kv_proxy_replica_cached_blocks_total", "blocks",
            "The part of these blocks that counted as cached there."),
        failures=counter("kv_proxy_replica_failures_total", "requests",
            "Requests that the replica failed to answer."),
    )),
)
# fmt: on
"""Every metric."""

assert not _STEP_METRICS, f"metrics without a group: {', '.join(_STEP_METRICS)}"


def _metrics_of(kind: StatsKind) -> tuple[Metric, ...]:
    return tuple(metric for group in METRIC_GROUPS if group.stats_kind == kind for metric in group.metrics)


SCHEDULER_METRICS = tuple(metric for metric in _metrics_of("step") if metric.kind != "histogram")
"""Read from ``SchedulerStats`` and labelled with ``ParallelState.metric_labels``."""

SCHEDULER_HISTOGRAMS = tuple(metric for metric in _metrics_of("step") if metric.kind == "histogram")
"""Request times, labelled as ``SCHEDULER_METRICS`` and with the bound of the bucket."""

# fmt: off
INFO_METRICS = (
    InfoMetric(
        name="cache_config_info",
        help="The KV pool: tokens per page and pages, by SGLang's labels and by vLLM's.",
        labels=(
            ("page_size", "load.page_size"), ("num_pages", "load.num_pages"),
            ("block_size", "load.page_size"), ("num_gpu_blocks", "load.num_pages"),
        ),
    ),
    InfoMetric(
        name="lora_requests_info",
        help="Adapters of running and waiting requests, and adapter slots; the value is the time of the report.",
        path="load.timestamp",
        labels=(
            ("max_lora", "load.lora.slots_total"),
            ("running_lora_adapters", "load.lora.running_adapters"),
            ("waiting_lora_adapters", "load.lora.waiting_adapters"),
        ),
    ),
)
"""Read by the model-server protocol of Kubernetes' gateway, from ``SchedulerStats``."""

STATE_METRICS = (
    StateMetric(
        name="engine_sleep_state",
        help="awake is 1 while all memory is held; weights_offloaded is 1 while the weights are on the host; "
        "discard_all is 1 while they are discarded.",
        label="sleep_state",
        flags=(
            ("awake", "quiesce.is_awake"),
            ("weights_offloaded", "quiesce.has_weights_offloaded"),
            ("discard_all", "quiesce.has_discarded_all"),
        ),
    ),
)
"""States of an engine, as in vLLM, from ``SchedulerStats``."""

# fmt: on

ALL_METRICS = (*SCHEDULER_METRICS, *SCHEDULER_HISTOGRAMS, *_metrics_of("collector"))
"""All metrics of schedulers, which the dashboard draws; without those of streams."""

STREAM_STATE_METRIC = _metrics_of("stream")[0]
"""The state of a followed stream: one flag per state."""

STREAM_METRICS = _metrics_of("stream")[1:]
"""Read from ``StreamStats`` and labelled with the ``rank``, as ``STREAM_STATE_METRIC``."""

LOG_METRICS = _metrics_of("log")
"""Read from ``LogStats`` and labelled with the ``rank``."""

RELAY_METRICS = _metrics_of("relay") + tuple(
    replace(metric, name=RELAY_PREFIX + metric.name.removeprefix("kv_"))
    for metric in SCHEDULER_METRICS
    if metric.path.startswith("publisher.")
)
"""Read from ``RelayedStreamStats`` of each stream that a relay publishes, and labelled with the ``rank``."""


PROXY_METRICS = _metrics_of("proxy")
"""Read from the counters of a proxy, without labels."""

REPLICA_METRICS = _metrics_of("replica")
"""Read from the counters of each replica behind a proxy, and labelled with its ``engine`` and ``rank``."""


def render_markdown() -> str:
    """Return the catalogue of schedulers as Markdown: one heading and one table per group."""
    lines: list[str] = []
    for group in METRIC_GROUPS:
        if group.stats_kind in ("step", "collector"):
            lines += ["", f"## {group.title}", ""]
            lines += ["| Metric | Kind | Unit | Meaning | vLLM's name |", "| --- | --- | --- | --- | --- |"]
            lines += map(_row, group.metrics)
    lines += ["", "## For Kubernetes' gateway", ""]
    lines += ["| Metric | Kind | Labels | Meaning | vLLM's name |", "| --- | --- | --- | --- | --- |"]
    for info in INFO_METRICS:
        labels = ", ".join(f"`{label}`" for label, _ in info.labels)
        name = f"`{VLLM_PREFIX}{info.name}`"
        lines.append(f"| `{SGLANG_PREFIX}{info.name}` | gauge | {labels} | {info.help} | {name} |")
    lines += ["", "## States", ""]
    lines += ["| Metric | Kind | Label and its values | Meaning | vLLM's name |", "| --- | --- | --- | --- | --- |"]
    for state in STATE_METRICS:
        values = f"`{state.label}`: " + ", ".join(f"`{each}`" for each, _ in state.flags)
        name = f"`{VLLM_PREFIX}{state.name}`"
        lines.append(f"| `{SGLANG_PREFIX}{state.name}` | gauge | {values} | {state.help} | {name} |")
    return "\n".join(lines[1:]) + "\n"


def _row(metric: Metric) -> str:
    vllm_names = ", ".join(f"`{VLLM_PREFIX}{name}`" for name in metric.vllm_names)
    return f"| `{SGLANG_PREFIX}{metric.name}` | {metric.kind} | {metric.unit} | {metric.help} | {vllm_names} |"


def render_stream_markdown() -> str:
    """Return the Markdown tables of followed, relayed and logged streams, and of proxies."""
    titled = (
        ("Relayed streams", RELAY_METRICS),
        ("Streams written to a broker", LOG_METRICS),
        ("Requests of a proxy", PROXY_METRICS),
        ("Replicas of a proxy", REPLICA_METRICS),
    )
    others = "".join(f"\n## {title}\n\n{_plain_table(metrics)}" for title, metrics in titled)
    return f"{_plain_table((STREAM_STATE_METRIC, *STREAM_METRICS))}{others}"


def _plain_table(metrics: tuple[Metric, ...]) -> str:
    lines = ["| Metric | Kind | Unit | Meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.help} |" for metric in metrics]
    return "\n".join(lines) + "\n"
