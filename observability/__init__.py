"""What looks at schedulers: the metric catalogue and its exporters, the stream's subscriber, HTTP answers, watch and
doctor.

Everything is imported when it is first asked for: Prometheus, starlette, httpx and pyzmq are needed only by what uses
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names

if TYPE_CHECKING:
    from observability.catalog import (
        CATALOG,
        EVERY_METRIC,
        HISTOGRAMS,
        OUTPUT_METRICS,
        PAGES_UNREAD,
        RANKS_REFUSED,
        SGLANG_PREFIX,
        STREAM_CATALOG,
        STREAM_STATE,
        Metric,
        render_markdown,
        render_stream_markdown,
    )
    from observability.conformance import ConformanceReport, RuleResult, examine_conformance
    from observability.doctor import DoctorOptions, Finding, Severity, diagnose_stream, examine, exit_code
    from observability.http_app import error_response, status_routes
    from observability.kv_stream import (
        AsyncSubscriber,
        BlockView,
        StreamListener,
        StreamState,
        StreamStats,
        Subscriber,
        discover,
        open_async_subscriber,
        open_subscriber,
    )
    from observability.log_sink import LogSink, describe_stats
    from observability.prometheus_page import render_metrics
    from observability.prometheus_reports import (
        OutputCollector,
        PrometheusBoard,
        PrometheusSink,
        RankLabels,
        RankOutputs,
        ReportBoard,
    )
    from observability.prometheus_streams import StreamCollector
    from observability.watch import LinePrinter, WatchOptions, addresses_of, watch_streams

__all__ = [
    "AsyncSubscriber",
    "BlockView",
    "ConformanceReport",
    "DoctorOptions",
    "Finding",
    "LinePrinter",
    "LogSink",
    "Metric",
    "OutputCollector",
    "PrometheusBoard",
    "PrometheusSink",
    "RankLabels",
    "RankOutputs",
    "ReportBoard",
    "RuleResult",
    "Severity",
    "StreamCollector",
    "StreamListener",
    "StreamState",
    "StreamStats",
    "Subscriber",
    "WatchOptions",
    "CATALOG",
    "EVERY_METRIC",
    "HISTOGRAMS",
    "OUTPUT_METRICS",
    "PAGES_UNREAD",
    "RANKS_REFUSED",
    "SGLANG_PREFIX",
    "STREAM_CATALOG",
    "STREAM_STATE",
    "addresses_of",
    "describe_stats",
    "diagnose_stream",
    "discover",
    "error_response",
    "examine",
    "examine_conformance",
    "exit_code",
    "open_async_subscriber",
    "open_subscriber",
    "render_markdown",
    "render_metrics",
    "render_stream_markdown",
    "status_routes",
    "watch_streams",
]

__getattr__ = lazy_names(
    __name__,
    {
        "observability.catalog": (
            "CATALOG EVERY_METRIC HISTOGRAMS OUTPUT_METRICS PAGES_UNREAD RANKS_REFUSED SGLANG_PREFIX "
            "STREAM_CATALOG STREAM_STATE Metric render_markdown render_stream_markdown"
        ),
        "observability.conformance": "ConformanceReport RuleResult examine_conformance",
        "observability.doctor": "DoctorOptions Finding Severity diagnose_stream examine exit_code",
        "observability.http_app": "error_response status_routes",
        "observability.log_sink": "LogSink describe_stats",
        "observability.prometheus_page": "render_metrics",
        "observability.prometheus_reports": (
            "OutputCollector PrometheusBoard PrometheusSink RankLabels RankOutputs ReportBoard"
        ),
        "observability.prometheus_streams": "StreamCollector",
        "observability.watch": "LinePrinter WatchOptions addresses_of watch_streams",
        "observability.kv_stream": (
            "AsyncSubscriber BlockView StreamListener StreamState StreamStats Subscriber discover "
            "open_async_subscriber open_subscriber"
        ),
    },
)
