"""The page that compares runs: titles are escaped, equal runs give equal pages."""

from __future__ import annotations

import msgspec
import pytest

from scheduler_engine.simulation import LeastLoaded, RoundRobin, SimulationReport, TenantReport
from scheduler_engine.simulation.report_page import render_page
from tests.scheduler_engine.simulation.test_report import report_of


@pytest.fixture(scope="module")
def reports() -> list[SimulationReport]:
    """Two runs with different routers. The first one has many tenants, and hits in each tier."""
    pytest.importorskip("matplotlib")
    tenants = tuple(
        TenantReport(
            name=f"<tenant-{number}>",
            num_requests=number,
            prompt_tokens=1,
            generated_tokens=1,
            mean_queue_s=0.0,
            mean_ttft_s=0.25,
            p99_ttft_s=0.5,
            mean_e2e_s=1.0,
        )
        for number in range(1, 31)
    )
    rates = {"device": 0.3, "host": 0.2, "storage": 0.1}
    one, two = report_of("<one>", RoundRobin()), report_of("two", LeastLoaded())
    return [msgspec.structs.replace(one, tenants=tenants, hit_rate=rates), two]


@pytest.fixture(scope="module")
def page(reports: list[SimulationReport]) -> str:
    """Both runs. The plots of a page take half a second."""
    return render_page(reports)


@pytest.fixture(scope="module")
def page_of_one_run(reports: list[SimulationReport]) -> str:
    return render_page(reports[1:])


def test_a_page_compares_runs(page: str, page_of_one_run: str, reports: list[SimulationReport]) -> None:
    assert page == render_page(reports)
    assert page.count("&lt;one&gt;") >= 2
    assert "<one>" not in page
    assert "6 of 6" in page
    assert "<svg" in page
    assert "<h2>Tenants" in page
    assert "<h2>Tenants" not in page_of_one_run


def test_a_page_shows_the_tenants_with_the_most_requests_and_the_hit_rate_of_each_tier(page: str) -> None:
    assert "<td>&lt;tenant-30&gt;</td><td>30; 0.250 / 0.500 / 1.000</td><td></td>" in page
    assert page.count("&lt;tenant-") == 20
    assert "device 30.0%, host 20.0%, storage 10.0%" in page
    assert ">storage</text>" in page


def test_settings_that_differ_have_a_column_per_run_and_others_are_folded(page: str, page_of_one_run: str) -> None:
    different, equal = page.split("<h2>Settings</h2>")[1].split("<details><summary>Equal in all runs</summary>")
    assert "<td>router</td><td>RoundRobin</td><td>LeastLoaded</td>" in different
    assert "<td>page_size</td>" not in different
    assert "<td>page_size</td><td>4</td></tr>" in equal
    assert "<details open>" in page_of_one_run
    assert "<td>router</td><td>LeastLoaded</td></tr>" in page_of_one_run
