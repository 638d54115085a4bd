"""Run all queries of dashboard and alerts on a real Prometheus: ``python docs/ask_prometheus.py URL [URL ...]``.

The script starts ``prometheus`` (from the path, or ``--prometheus FILE``) on loopback, lets it scrape the worker at
``URL`` and its readers at the other addresses, and prints each query with its number of series and one value. The exit
code is 1 when a metric of a page is missing or has another type.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from observability.grafana.dashboard import render_dashboard

GUIDE = Path(__file__).with_name("how-to") / "prometheus-and-grafana.md"
SCRAPES, INTERVAL_S = 20, 1
FILLED_IN = {"$instance": ".*", "$dp_rank": ".*", "$reader": ".*", "$__rate_interval": f"{SCRAPES * INTERVAL_S}s"}


def main() -> int:
    """Scrape, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL", help="of a running worker or relay, as it prints it")
    parser.add_argument("--prometheus", default="prometheus", metavar="FILE", help="the server's program")
    options = parser.parse_args()
    with running(options.prometheus, [urlsplit(url).netloc for url in options.urls]) as prometheus:
        await_scrapes(prometheus, num_targets=len(options.urls))
        print("| query | series | one value |\n| --- | --- | --- |")
        for query in [*dashboard_queries(), *alert_queries()]:
            answers = ask(prometheus, "/api/v1/query", query=query)["result"]
            value = answers[0]["value"][1] if answers else ""
            print(f"| `{query.replace('|', chr(92) + '|')}` | {len(answers)} | {value} |")
        lost = {name for url in options.urls for name in lost_families(prometheus, httpx.get(f"{url}/metrics").text)}
    print("\n".join(sorted(lost)) or "every exposed metric is stored under its name, with its type")
    return bool(lost)


@contextmanager
def running(program: str, targets: list[str]) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes ``targets``, and a client of it; both end with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as directory:
        scrape = {"job_name": "schedulers", "static_configs": [{"targets": targets}]}
        config = {"global": {"scrape_interval": f"{INTERVAL_S}s"}, "scrape_configs": [scrape]}
        file = Path(directory, "prometheus.json")
        file.write_text(json.dumps(config))  # JSON is YAML
        flags = [f"--config.file={file}", f"--storage.tsdb.path={directory}/data", f"--web.listen-address={address}"]
        with subprocess.Popen([program, *flags, "--log.level=warn"]) as process:
            try:
                with httpx.Client(base_url=f"http://{address}", trust_env=False) as client:
                    yield client
            finally:
                process.terminate()


def await_scrapes(prometheus: httpx.Client, num_targets: int) -> None:
    """Wait until every target was scraped often enough for every rate."""
    deadline_s = time.monotonic() + SCRAPES * INTERVAL_S + 30
    while time.monotonic() < deadline_s:
        try:
            result = ask(prometheus, "/api/v1/query", query=f"count_over_time(up[{2 * SCRAPES * INTERVAL_S}s])")[
                "result"
            ]
        except httpx.HTTPError:  # it answers 503 until it is ready
            result = []
        if len(result) == num_targets and all(int(each["value"][1]) >= SCRAPES for each in result):
            return
        time.sleep(INTERVAL_S)
    sys.exit("Prometheus did not scrape every target")


def ask(prometheus: httpx.Client, path: str, **parameters: str) -> Any:
    """The data of an answer; a query that is refused raises."""
    return prometheus.get(path, params=parameters).raise_for_status().json()["data"]


def dashboard_queries() -> Iterator[str]:
    """Every query of a panel or variable, with Grafana's variables filled in."""
    dashboard = render_dashboard()
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield filled_in(re.sub(r"label_values\((.*), (\w+)\)", r"group by (\2) (\1)", variable["query"]["query"]))
    for row in dashboard["panels"]:
        for panel in (row, *row.get("panels", ())):
            yield from (filled_in(target["expr"]) for target in panel.get("targets", ()))


def filled_in(query: str) -> str:
    for name, value in FILLED_IN.items():
        query = query.replace(name, value)
    return query


def alert_queries() -> Iterator[str]:
    """Each alert of the guide as it is, and without its comparisons: an alert without data never fires."""
    for query in re.findall(r"^\| `(.*? (?:>|==) [\d.]+)` \|", GUIDE.read_text(), re.MULTILINE):
        yield query
        yield re.sub(r" (>|==) [\d.]+", "", query).replace("[5m]", f"[{FILLED_IN['$__rate_interval']}]")


def lost_families(prometheus: httpx.Client, page: str) -> Iterator[str]:
    """Metrics of the page that Prometheus has under another name or type."""
    names = set(ask(prometheus, "/api/v1/label/__name__/values"))
    types = {fact["metric"]: fact["type"] for fact in ask(prometheus, "/api/v1/targets/metadata")}
    for family in text_string_to_metric_families(page):
        yield from (f"{sample.name} is not stored" for sample in family.samples if sample.name not in names)
        if types.get(family.name) != family.type:
            yield f"{family.name} is a {family.type}, and known as {types.get(family.name)}"


if __name__ == "__main__":
    sys.exit(main())
