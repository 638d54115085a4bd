"""Measure the costs of the kit next to physical limits and peers. ``python -m benchmarks`` runs all sections."""
