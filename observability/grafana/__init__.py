"""The Grafana dashboard: ``dashboard.json`` to import, and the program that writes it from the catalogue."""
