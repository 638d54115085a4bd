"""The page of ``/metrics``, in one of Prometheus's two text formats and with the same names in both.

Prometheus allows the colon of ``sglang:`` and ``vllm:`` in both formats. But prometheus-client 0.23 and later replaces
it in the samples of an OpenMetrics page (not in their TYPE lines), unless the request accepts ``escaping=allow-utf-8``.
Prometheus 2.x does not send that. It would store ``sglang_...`` without types, and dashboards and alerts would find
nothing. So the escaping that a request accepts is ignored: every Prometheus can store these names as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_components._internal.extras import naming_extras

with naming_extras:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import choose_encoder

__all__ = ["render_metrics"]

_OPENMETRICS = "application/openmetrics-text"
_OPENMETRICS_VERSION = "1.0.0"
# choose_encoder reads version and escaping from this; 0.21 and 0.22 have no escaping, and no argument for it.
_render_openmetrics, _ = choose_encoder(f"{_OPENMETRICS};version={_OPENMETRICS_VERSION};escaping=allow-utf-8")

_CONTENT_TYPES = {
    _OPENMETRICS: f"{_OPENMETRICS}; version={_OPENMETRICS_VERSION}; charset=utf-8",
    "text/plain": "text/plain; version=0.0.4; charset=utf-8",  # 1.0.0 only adds quoted names, which are not used
}


def render_metrics(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Return the page of ``registry`` and its content type.

    The format is OpenMetrics 1.0.0 if ``accept`` names it and does not prefer ``text/plain``, and Prometheus's text
    format 0.0.4 otherwise. Use this if another server than ``status_routes`` serves ``/metrics``.

    Rendering takes about 1 ms per rank. Do it on a thread if a server with an event loop scrapes many ranks.

    Args:
        registry: provides the metrics.
        accept: the ``Accept`` header of the request.
    """
    quality = {_OPENMETRICS: 0.0, "text/plain": 0.0}
    for media_type, value in _offers(accept):
        quality[media_type] = max(quality[media_type], value)
    if 0.0 < quality[_OPENMETRICS] >= quality["text/plain"]:
        return _render_openmetrics(registry), _CONTENT_TYPES[_OPENMETRICS]
    return generate_latest(registry), _CONTENT_TYPES["text/plain"]


def _offers(accept: str) -> Iterator[tuple[str, float]]:
    """Yield the supported formats of a header and their qualities. A quality that is not a number is skipped."""
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
