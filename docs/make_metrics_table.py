"""Writes the table of ``docs/metrics.md`` from the catalogue: ``python docs/make_metrics_table.py``."""

from __future__ import annotations

from pathlib import Path

from observability import render_markdown

PAGE = Path(__file__).with_name("metrics.md")


def main() -> None:
    """Replace the table, and leave what stands above it."""
    above, _, _ = PAGE.read_text().partition("| Metric |")
    PAGE.write_text(above + render_markdown())


if __name__ == "__main__":
    main()
