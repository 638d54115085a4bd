"""The status page shows the engine, loads nothing from elsewhere and escapes what it shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from kit.status_engine import NOW, StatusEngine, ask, make_load

from observability.http_status_page import render_status_page

STREAMS = {
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "replay_endpoint_port_base": 5657,
    "dp_size": 2,
    "topic": "kv",
}


class Described(StatusEngine):
    info: Mapping[str, Any] = {"served_model_name": "tiny", "kv_events": STREAMS}

    def server_info(self) -> Mapping[str, Any]:
        return self.info


def test_the_page_shows_ranks_load_streams_and_links() -> None:
    answer = ask("/", Described(make_load(1, num_running_reqs=1234), make_load(0)))
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for shown in ("tiny", "healthy", "1,234", "1.5 s", "tcp://engine:5558", "tcp://engine:5658"):
        assert shown in answer.text
    assert "</a><a" not in answer.text, "a narrow screen cannot break the line between two links"
    for link in re.findall(r'href="([^"]*)"', answer.text):
        assert ask(link, Described()).status_code == 200


def test_the_page_loads_nothing_from_elsewhere_and_says_what_is_wrong() -> None:
    engine = Described()
    engine.problem = "rank 3 has said nothing for 12 s"
    page = ask("/", engine).text
    assert "rank 3 has said nothing for 12 s" in page
    assert "No rank has reported yet." in page
    assert not re.search(r"https?:|<script|<img|<link|@import|url\(", page)


@given(st.text(), st.text(), st.text(), st.text())
@example("<b>&\"'", "</title><script>", "</p><img src=x onerror=alert(1)>", "*<i>")
def test_the_page_escapes_what_it_shows(name: str, problem: str, reason: str, host: str) -> None:
    engine = Described()
    engine.problem = problem
    for described in ({"kv_events": None, "kv_events_error": reason}, {"kv_events": STREAMS | {"endpoint_host": host}}):
        engine.info = {"served_model_name": name} | described
        text = render_status_page("http://engine/", problem=problem, info=engine.info, loads=[make_load(0)], now=NOW)
        parser = Tags()
        parser.feed(text)
        assert parser.seen <= SAFE_TAGS
        assert parser.attributes <= {"lang", "charset", "name", "content", "http-equiv", "class", "href"}


SAFE_TAGS = {"html", "meta", "title", "style", "h1", "h2", "p", "span", "div", "table", "tr", "th", "td", "a"}


class Tags(HTMLParser):
    """The elements that a browser would make of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
