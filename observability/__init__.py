"""What looks at schedulers: the metric catalogue and its exporters, the stream's subscriber, HTTP answers, watch and
doctor.

Everything is imported when it is first asked for: Prometheus, starlette, httpx and pyzmq are needed only by what uses
them. ``observability.kv_stream`` has the parts of the subscriber, ``observability.testing`` the test kit,
``observability.grafana`` the dashboard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports

if TYPE_CHECKING:
    from observability.catalog import (
        ALL_METRICS,
        INFO_METRICS,
        LOG_METRICS,
        METRIC_GROUPS,
        OUTPUT_METRICS,
        RELAY_METRICS,
        SCHEDULER_HISTOGRAMS,
        SCHEDULER_METRICS,
        SGLANG_PREFIX,
        STATE_METRICS,
        STREAM_METRICS,
        STREAM_STATE_METRIC,
        InfoMetric,
        Metric,
        MetricGroup,
        StateMetric,
        render_markdown,
        render_stream_markdown,
    )
    from observability.conformance import ConformanceReport, RuleResult, StreamReport, check_conformance
    from observability.conformance_files import badge_json, junit_xml
    from observability.doctor import (
        CheckResult,
        DoctorOptions,
        Severity,
        check_worker,
        diagnose_stream,
        exit_code,
        render_report_json,
    )
    from observability.http_kv_pool import KvPoolSource, kv_pool_route
    from observability.http_status import StatusSource, error_response, status_routes
    from observability.kv_pool_client import KvPoolPage, KvPoolPlace, KvPoolUnreadableError, fetch_kv_pool
    from observability.kv_stream import (
        AsyncSubscriber,
        StreamListener,
        StreamState,
        StreamStats,
        Subscriber,
        discover,
        open_async_subscriber,
        open_subscriber,
        static_address,
    )
    from observability.log_sink import LogSink
    from observability.prometheus_page import render_metrics
    from observability.prometheus_schedulers import (
        MetricsBoardCollector,
        OutputCollector,
        PrometheusSink,
        RankLabels,
        RankOutputs,
        RankOutputsSource,
        ReportBoard,
    )
    from observability.prometheus_streams import (
        LogCollector,
        LogStatsSource,
        RelayCollector,
        RelayStatsSource,
        StreamCollector,
        StreamStatsSource,
    )
    from observability.watch import EventPrinter, WatchOptions, watch_streams

__all__ = [
    # metrics out of a scheduler
    "PrometheusSink",
    "MetricsBoardCollector",
    "ReportBoard",
    "OutputCollector",
    "RankLabels",
    "RankOutputs",
    "RankOutputsSource",
    "render_metrics",
    "LogSink",
    # HTTP answers
    "StatusSource",
    "status_routes",
    "error_response",
    "kv_pool_route",
    "KvPoolSource",
    "KvPoolPage",
    "KvPoolPlace",
    # following streams
    "discover",
    "static_address",
    "open_subscriber",
    "Subscriber",
    "open_async_subscriber",
    "AsyncSubscriber",
    "StreamListener",
    "StreamState",
    "StreamStats",
    "StreamCollector",
    "StreamStatsSource",
    "RelayCollector",
    "RelayStatsSource",
    "LogCollector",
    "LogStatsSource",
    # looking at a worker
    "watch_streams",
    "WatchOptions",
    "EventPrinter",
    "check_worker",
    "DoctorOptions",
    "CheckResult",
    "Severity",
    "exit_code",
    "render_report_json",
    "diagnose_stream",
    "check_conformance",
    "junit_xml",
    "badge_json",
    "fetch_kv_pool",
    "KvPoolUnreadableError",
    "ConformanceReport",
    "StreamReport",
    "RuleResult",
    # the catalogue
    "InfoMetric",
    "Metric",
    "MetricGroup",
    "StateMetric",
    "METRIC_GROUPS",
    "SCHEDULER_METRICS",
    "SCHEDULER_HISTOGRAMS",
    "INFO_METRICS",
    "STATE_METRICS",
    "OUTPUT_METRICS",
    "ALL_METRICS",
    "STREAM_METRICS",
    "RELAY_METRICS",
    "LOG_METRICS",
    "STREAM_STATE_METRIC",
    "SGLANG_PREFIX",
    "render_markdown",
    "render_stream_markdown",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "observability.catalog": (
            "SCHEDULER_METRICS ALL_METRICS SCHEDULER_HISTOGRAMS INFO_METRICS LOG_METRICS OUTPUT_METRICS RELAY_METRICS "
            "METRIC_GROUPS SGLANG_PREFIX STATE_METRICS STREAM_METRICS STREAM_STATE_METRIC InfoMetric Metric "
            "MetricGroup StateMetric render_markdown render_stream_markdown"
        ),
        "observability.conformance": "ConformanceReport RuleResult StreamReport check_conformance",
        "observability.conformance_files": "badge_json junit_xml",
        "observability.doctor": (
            "CheckResult DoctorOptions Severity diagnose_stream check_worker exit_code render_report_json"
        ),
        "observability.http_status": "StatusSource error_response status_routes",
        "observability.http_kv_pool": "KvPoolSource kv_pool_route",
        "observability.kv_pool_client": "KvPoolPage KvPoolPlace KvPoolUnreadableError fetch_kv_pool",
        "observability.kv_stream": (
            "AsyncSubscriber StreamListener StreamState StreamStats Subscriber static_address discover "
            "open_async_subscriber open_subscriber"
        ),
        "observability.log_sink": "LogSink",
        "observability.prometheus_page": "render_metrics",
        "observability.prometheus_schedulers": (
            "OutputCollector MetricsBoardCollector PrometheusSink RankLabels RankOutputs RankOutputsSource ReportBoard"
        ),
        "observability.prometheus_streams": (
            "LogCollector LogStatsSource RelayCollector RelayStatsSource StreamCollector StreamStatsSource"
        ),
        "observability.watch": "EventPrinter WatchOptions watch_streams",
    },
)
