"""The page that compares runs: titles are escaped, equal runs give equal pages."""

from __future__ import annotations

import pytest

from scheduler_components.simulation import LeastLoaded, RoundRobin
from scheduler_components.simulation.report_page import render_page
from tests.simulation.test_report import report_of


def test_a_page_compares_runs() -> None:
    pytest.importorskip("matplotlib")
    reports = [report_of("<one>", RoundRobin()), report_of("two", LeastLoaded())]
    page = render_page(reports)
    assert page == render_page(reports)
    assert page.count("&lt;one&gt;") >= 2
    assert "<one>" not in page
    assert "6 of 6" in page
    assert "<svg" in page
