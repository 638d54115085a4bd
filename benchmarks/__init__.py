"""What the kit costs, beside its physical limits and its peers, in one run. ``python -m benchmarks`` runs all."""
