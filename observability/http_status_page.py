"""The page at ``/`` for users who open a worker's address in a browser.

It shows the load of the ranks, the advertised streams, and links to the other routes. It loads nothing from elsewhere,
has no script and escapes every text. The browser reloads it every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from observability.kv_stream import NoStreamsError, parse_addresses, parse_worker_url
from scheduler_components import ComponentError
from scheduler_components.values import LoadSnapshot

__all__ = ["LINKS", "PAGE_POLICY", "render_status_page"]

LINKS = ("/health", "/ready", "/server_info", "/model_info", "/v1/models", "/v1/loads", "/metrics")
"""The routes that the page links to."""

PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The content policy of the page: no script, no image, no other host."""

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem }
.ok { color: #15803d } .bad { color: #dc2626 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #8884; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
.streams th, .streams td { text-align: left }
th { font-weight: 600; color: #777 }
a { margin-right: 1rem }
"""

_LOAD_HEADINGS = ("dp rank", "running", "waiting", "KV tokens used", "of", "hit rate", "tokens/s", "report's age")
_STREAM_HEADINGS = ("dp rank", "events", "replay", "load gauge")


def render_status_page(
    url: str, *, problem: str | None, info: Mapping[str, Any], loads: Sequence[LoadSnapshot], now: float
) -> str:
    """Return the page as HTML.

    Args:
        url: URL of the page; its host replaces wildcards in the addresses of streams.
        problem: why the engine is not healthy; None if it is.
        info: the body of ``/server_info``.
        loads: the newest load of each rank that has reported.
        now: wall-clock seconds since the epoch.
    """
    name = str(info.get("served_model_name", "scheduler"))
    health = '<span class="ok">healthy</span>' if problem is None else f'<span class="bad">{escape(problem)}</span>'
    return "".join(
        (
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="refresh" content="5">',
            f"<title>{escape(name)}</title><style>{_STYLE}</style>",
            f"<h1>{escape(name)}</h1><p>{health}</p>",
            "<h2>Load</h2>",
            _table("load", _LOAD_HEADINGS, (_load_cells(load, now) for load in sorted(loads, key=_rank_of))),
            "<h2>KV-event streams</h2>",
            _streams(url, info),
            "<h2>Answers for programs</h2><p>",
            " ".join(f'<a href="{link}">{link}</a>' for link in LINKS),  # a narrow screen breaks lines at the spaces
            "</p></html>\n",
        )
    )


def _rank_of(load: LoadSnapshot) -> int:
    return load.dp_rank


def _load_cells(load: LoadSnapshot, now: float) -> Iterator[str]:
    yield str(load.dp_rank)
    yield f"{load.num_running_reqs:,}"
    yield f"{load.num_waiting_reqs:,}"
    yield f"{load.num_used_tokens:,}"
    yield f"{load.max_total_num_tokens:,}"
    yield f"{load.cache_hit_rate:.0%}"
    yield f"{load.gen_throughput:,.0f}"
    yield f"{max(0.0, now - load.timestamp):.1f} s"


def _streams(url: str, info: Mapping[str, Any]) -> str:
    try:
        addresses = parse_addresses(dict(info), parse_worker_url(url))
    except NoStreamsError as error:
        return f"<p>None: {escape(error.reason)}</p>"
    except ComponentError as error:
        return f'<p class="bad">{escape(str(error))}</p>'
    rows = (
        (str(each.rank), str(each.events), str(each.replay or "none"), str(each.load or "none")) for each in addresses
    )
    return _table("streams", _STREAM_HEADINGS, rows)


def _table(kind: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    if not body:
        return "<p>No rank has reported yet.</p>"
    return f'<div class="scroll"><table class="{kind}"><tr>{_cells("th", headings)}</tr>{body}</table></div>'


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
