"""Why goals are missed, by the names of their rows: ``benchmarks.tables`` puts each reason beside its figures."""

from __future__ import annotations

__all__ = ["REASONS"]

REASONS: tuple[tuple[str, str], ...] = ()
"""A pattern for ``section: what``, and the reason. Of each missed row exactly one pattern speaks."""
