"""Write the tables of ``docs/metrics.md`` and ``docs/stream-metrics.md`` from the catalogue:
``python docs/make_metrics_table.py``."""

from __future__ import annotations

from pathlib import Path

from observability.catalog import render_markdown, render_stream_markdown

DOCS = Path(__file__).parent


def replace_from(first: str, page: Path, tables: str) -> None:
    """Replace the part of a page that begins with ``first``."""
    above, _, _ = page.read_text().partition(first)
    page.write_text(above + tables)


def main() -> None:
    replace_from("## Load\n", DOCS / "metrics.md", render_markdown())
    replace_from("| Metric |", DOCS / "stream-metrics.md", render_stream_markdown())


if __name__ == "__main__":
    main()
