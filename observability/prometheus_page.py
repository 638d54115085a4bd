"""The page of ``/metrics``: a reader gets one of Prometheus's two text forms, always with the same names.

Prometheus allows the colon of ``sglang:`` and ``vllm:`` in both forms. But prometheus-client 0.23 and later replaces it
in the samples of an OpenMetrics page (not in their TYPE lines), unless the reader asks for ``escaping=allow-utf-8``.
Prometheus 2.x does not ask for that. It would store ``sglang_...`` without types, and dashboards and alerts would find
nothing. So what a reader asks of escaping is ignored: every Prometheus can store these names as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

__all__ = ["PageLabels", "render_metrics"]

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
        return _render(registry, is_openmetrics=True), _CONTENT_TYPES[_OPENMETRICS]
    return _render(registry, is_openmetrics=False), _CONTENT_TYPES["text/plain"]


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


# --- the lines ---

# The client library takes 7 us per line, with the GIL: 1.6 ms per rank. Most families are plain: gauges, counters and
# histograms whose samples are a name, labels and a value. Their lines are written here, in the library's own bytes. All
# else (time stamps, exemplars, names outside the old character set) is left to the library, a family at a time.

_format_value: Callable[[float], str] = floatToGoString

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_SUFFIXES = ("_created", "_gsum", "_gcount")
"""What the text format makes families of their own of."""

_NO_EXTRAS = Sample("", {}, 0.0)[3:]
_END = "# EOF\n"


class PageLabels(dict[str, str]):
    """Labels of many samples, whose text is made once. They must not change.

    Attributes:
        text: in braces, as on a page; nothing for no labels; None where the library has to write them.
    """

    __slots__ = ("text",)

    def __init__(self, labels: dict[str, str]) -> None:
        super().__init__(labels)
        self.text = _label_text(labels)


class _OneFamily(Collector):
    def __init__(self, family: MetricFamily) -> None:
        self._family = family

    def collect(self) -> Iterable[MetricFamily]:
        return (self._family,)


def _render(registry: CollectorRegistry, *, is_openmetrics: bool) -> bytes:
    write: Callable[[_OneFamily], bytes] = _render_openmetrics if is_openmetrics else generate_latest
    parts: list[str] = []
    for family in registry.collect():
        lines = _plain_lines(family, is_openmetrics)
        if lines is None:
            parts.append(write(_OneFamily(family)).decode().removesuffix(_END))
        else:
            parts += lines
    if is_openmetrics:
        parts.append(_END)
    return "".join(parts).encode()


def _plain_lines(family: MetricFamily, is_openmetrics: bool) -> list[str] | None:
    """The lines of a plain family; None for one that the library has to write."""
    name, kind = family.name, family.type
    if kind not in ("gauge", "counter", "histogram") or family.unit or not _is_plain(name):
        return None
    told = _escape(family.documentation) if is_openmetrics else _escape_help(family.documentation)
    if kind == "counter" and not is_openmetrics:
        name += "_total"
    lines = [f"# HELP {name} {told}\n# TYPE {name} {kind}\n"]
    checked = name
    for sample in family.samples:
        name, labels, value = sample[:3]
        text = labels.text if isinstance(labels, PageLabels) else _label_text(labels)
        if text is None or sample[3:] != _NO_EXTRAS or not (name is checked or _is_plain(name)):
            return None
        checked = name
        lines.append(f"{name}{text} {_format_value(value)}\n")
    return lines


@lru_cache(maxsize=4_096)
def _is_plain(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and not name.endswith(_RESERVED_SUFFIXES)


def _label_text(labels: dict[str, str]) -> str | None:
    if not labels:
        return ""
    if not all(map(_LABEL.fullmatch, labels)):
        return None
    return "{" + ",".join([f'{name}="{_escape(value)}"' for name, value in sorted(labels.items())]) + "}"


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape(text: str) -> str:
    return _escape_help(text).replace('"', r"\"")
