"""The simulation: the same seed gives the same run, and ranks diverge only if an agreement is left out."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_engine.device.hicache_sim import HiCacheSimulationConfig, run_simulation


def test_without_cp_the_scopes_do_not_differ() -> None:
    config = HiCacheSimulationConfig(attn_cp_size=1, attn_tp_size=2, scope="tp")
    [run] = run_simulation(config, seeds=[0], num_steps=100, sample_steps=50)
    assert run.diverged_at_step is None
    assert run.differing_pages == [0, 0]
    assert run.num_served > 0


def test_a_run_is_determined_by_its_seed() -> None:
    config = HiCacheSimulationConfig(scope="tp")
    assert run_simulation(config, seeds=[3], num_steps=60, sample_steps=10) == run_simulation(
        config, seeds=[3], num_steps=60, sample_steps=10
    )


def test_an_invalid_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="device_pages=0: is not a size"):
        HiCacheSimulationConfig(device_pages=0)
