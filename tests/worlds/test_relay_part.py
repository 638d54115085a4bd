"""Worlds with a relay have the faults of a relay (test_delivery_world judges them)."""

from __future__ import annotations

import pytest

from worlds.delivery_world import run_world


@pytest.mark.soak_only
def test_every_fault_of_a_relay_happens() -> None:
    missing = {"relay restarts", "source found elsewhere", "source forgotten"}
    for seed in range(40):
        missing -= set(run_world(seed, kind="relay").faults)
        if not missing:
            return
    pytest.fail(f"never happened: {missing}")
