"""The page of ``/metrics``: a reader gets one of Prometheus's two text forms, always with the same names.

Prometheus allows the colon of ``sglang:`` and ``vllm:`` in both forms. But prometheus-client 0.23 and later replaces it
in the samples of an OpenMetrics page (not in their TYPE lines), unless the reader asks for ``escaping=allow-utf-8``.
Prometheus 2.x does not ask for that. It would store ``sglang_...`` without types, and dashboards and alerts would find
nothing. So what a reader asks of escaping is ignored: every Prometheus can store these names as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder

__all__ = ["render_metrics"]

_OPENMETRICS = "application/openmetrics-text"
_OPENMETRICS_VERSION = "1.0.0"
# The client library's encoder is chosen by a question of our own. It reads nothing but version and escaping from it;
# 0.21 and 0.22 have no escaping, and no argument for it.
_render_openmetrics, _ = choose_encoder(f"{_OPENMETRICS};version={_OPENMETRICS_VERSION};escaping=allow-utf-8")

_CONTENT_TYPES = {
    _OPENMETRICS: f"{_OPENMETRICS}; version={_OPENMETRICS_VERSION}; charset=utf-8",
    # 1.0.0 would add quoted names alone, and there are none.
    "text/plain": "text/plain; version=0.0.4; charset=utf-8",
}


def render_metrics(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Return the page of ``registry`` and its content type.

    OpenMetrics 1.0.0 for a reader that names it and does not prefer ``text/plain``; Prometheus's text format 0.0.4 for
    all others. Names are those of the registry in both: serve it by this where another server than ``status_routes``
    answers ``/metrics``.

    Args:
        registry: what is exposed.
        accept: the request's ``Accept`` header, or nothing.
    """
    quality = {_OPENMETRICS: 0.0, "text/plain": 0.0}
    for media_type, value in _offers(accept):
        quality[media_type] = max(quality[media_type], value)
    if 0.0 < quality[_OPENMETRICS] >= quality["text/plain"]:
        return _render_openmetrics(registry), _CONTENT_TYPES[_OPENMETRICS]
    return generate_latest(registry), _CONTENT_TYPES["text/plain"]


def _offers(accept: str) -> Iterator[tuple[str, float]]:
    """The forms that a header names and this page has, each with its quality. A quality that is no number is none."""
    for offer in accept.lower().split(","):
        media_type, *parameters = offer.replace(" ", "").split(";")
        values = dict(parameter.partition("=")[::2] for parameter in parameters)
        if media_type not in _CONTENT_TYPES:
            continue
        if media_type == _OPENMETRICS and values.get("version", _OPENMETRICS_VERSION) != _OPENMETRICS_VERSION:
            continue
        try:
            yield media_type, float(values.get("q", "1"))
        except ValueError:
            continue
