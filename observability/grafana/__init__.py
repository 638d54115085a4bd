"""The Grafana dashboard: ``dashboard.json`` to import, and the program that writes it from the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from observability.grafana.dashboard import DASHBOARD_FILE, render_dashboard

__all__ = ["DASHBOARD_FILE", "render_dashboard"]

# Lazily, so that ``python -m observability.grafana.dashboard`` does not load the module twice.
__getattr__ = lazy_exports(__name__, {"observability.grafana.dashboard": "DASHBOARD_FILE render_dashboard"})
