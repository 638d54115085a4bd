"""What looks at schedulers: the metric catalogue and its exporters, the stream's subscriber, HTTP answers, watch and
doctor.

Everything is imported when it is first asked for: Prometheus, starlette, httpx and pyzmq are needed only by what uses
them. ``observability.kv_stream`` has the parts of the subscriber, ``observability.testing`` the test kit,
``observability.grafana`` the dashboard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names

if TYPE_CHECKING:
    from observability.catalog import (
        CATALOG,
        EVERY_METRIC,
        HISTOGRAMS,
        INFOS,
        LOG_CATALOG,
        OUTPUT_METRICS,
        RELAY_CATALOG,
        SECTIONS,
        SGLANG_PREFIX,
        STATES,
        STREAM_CATALOG,
        STREAM_STATE,
        InfoMetric,
        Metric,
        Section,
        StateMetric,
        render_markdown,
        render_stream_markdown,
    )
    from observability.conformance import ConformanceReport, RuleResult, StreamReport, examine_conformance
    from observability.conformance_files import badge_json, junit_xml
    from observability.doctor import (
        CheckResult,
        DoctorOptions,
        Severity,
        diagnose_stream,
        examine,
        exit_code,
        report_json,
    )
    from observability.http_app import StatusSource, error_response, status_routes
    from observability.http_kv_pool import PoolReadingSource, kv_pool_route
    from observability.kv_pool_page import PoolPage, PoolPlaceCount, PoolUnreadableError, fetch_pool
    from observability.kv_stream import (
        AsyncSubscriber,
        StreamListener,
        StreamState,
        StreamStats,
        Subscriber,
        bare_address,
        discover,
        open_async_subscriber,
        open_subscriber,
    )
    from observability.log_sink import LogSink
    from observability.prometheus_page import render_metrics
    from observability.prometheus_schedulers import (
        OutputCollector,
        PrometheusBoard,
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
    from observability.watch import LinePrinter, WatchOptions, watch_streams

__all__ = [
    # metrics out of a scheduler
    "PrometheusSink",
    "PrometheusBoard",
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
    "PoolReadingSource",
    "PoolPage",
    "PoolPlaceCount",
    # following streams
    "discover",
    "bare_address",
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
    "LinePrinter",
    "examine",
    "DoctorOptions",
    "CheckResult",
    "Severity",
    "exit_code",
    "report_json",
    "diagnose_stream",
    "examine_conformance",
    "junit_xml",
    "badge_json",
    "fetch_pool",
    "PoolUnreadableError",
    "ConformanceReport",
    "StreamReport",
    "RuleResult",
    # the catalogue
    "InfoMetric",
    "Metric",
    "Section",
    "StateMetric",
    "SECTIONS",
    "CATALOG",
    "HISTOGRAMS",
    "INFOS",
    "STATES",
    "OUTPUT_METRICS",
    "EVERY_METRIC",
    "STREAM_CATALOG",
    "RELAY_CATALOG",
    "LOG_CATALOG",
    "STREAM_STATE",
    "SGLANG_PREFIX",
    "render_markdown",
    "render_stream_markdown",
]

__getattr__ = lazy_names(
    __name__,
    {
        "observability.catalog": (
            "CATALOG EVERY_METRIC HISTOGRAMS INFOS LOG_CATALOG OUTPUT_METRICS RELAY_CATALOG SECTIONS SGLANG_PREFIX "
            "STATES STREAM_CATALOG STREAM_STATE InfoMetric Metric Section StateMetric render_markdown "
            "render_stream_markdown"
        ),
        "observability.conformance": "ConformanceReport RuleResult StreamReport examine_conformance",
        "observability.conformance_files": "badge_json junit_xml",
        "observability.doctor": "CheckResult DoctorOptions Severity diagnose_stream examine exit_code report_json",
        "observability.http_app": "StatusSource error_response status_routes",
        "observability.http_kv_pool": "PoolReadingSource kv_pool_route",
        "observability.kv_pool_page": "PoolPage PoolPlaceCount PoolUnreadableError fetch_pool",
        "observability.kv_stream": (
            "AsyncSubscriber StreamListener StreamState StreamStats Subscriber bare_address discover "
            "open_async_subscriber open_subscriber"
        ),
        "observability.log_sink": "LogSink",
        "observability.prometheus_page": "render_metrics",
        "observability.prometheus_schedulers": (
            "OutputCollector PrometheusBoard PrometheusSink RankLabels RankOutputs RankOutputsSource ReportBoard"
        ),
        "observability.prometheus_streams": (
            "LogCollector LogStatsSource RelayCollector RelayStatsSource StreamCollector StreamStatsSource"
        ),
        "observability.watch": "LinePrinter WatchOptions watch_streams",
    },
)
