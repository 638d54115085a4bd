"""Weights and memory of the simulated device."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_engine.device.device import SimulatedDevice, SimulatedModel
from scheduler_engine.device.weights import SimulatedMemory, SimulatedWeights


def test_a_model_depends_on_the_parts_and_not_on_their_order() -> None:
    def seed_after(*parts: tuple[str, bytes]) -> int:
        device = SimulatedDevice(model=SimulatedModel(vocab_size=77))
        weights = SimulatedWeights(device=device)
        weights.begin("v2")
        for part in parts:
            weights.load(*part)
        checksum = weights.checksum()
        assert device.model == SimulatedModel(vocab_size=77)
        weights.commit()
        assert (device.model.seed, device.model.vocab_size) == (checksum, 77)
        assert 0 <= checksum < 2**63
        return checksum

    a, b = ("a", b"1"), ("b", b"2")
    assert seed_after(a, b) == seed_after(b, a)
    assert (
        len({seed_after(a, b), seed_after(a), seed_after(("a", b"12"), b), seed_after(("a", b"2"), ("b", b"1"))}) == 4
    )


def test_a_part_is_accepted_once_and_not_empty_and_a_rollback_drops_it() -> None:
    weights = SimulatedWeights(device=SimulatedDevice())
    weights.begin("v2")
    nothing = weights.checksum()
    weights.load("a", b"1")
    with pytest.raises(ConfigError, match="loaded before"):
        weights.load("a", b"2")
    with pytest.raises(ConfigError, match="is empty, in tensor 'b'"):
        weights.load("b", b"")
    weights.roll_back()
    assert weights.checksum() == nothing


def test_memory_that_is_in_use_cannot_be_resumed() -> None:
    memory = SimulatedMemory(device=SimulatedDevice(), held_bytes={"weights": 10, "kv_cache": 30})
    memory.release(["kv_cache", "weights"], keep_weights=True)
    memory.release(["weights"], keep_weights=True)
    assert memory.free_bytes == 40
    memory.free_bytes = 35
    with pytest.raises(ConfigError, match="need 40 bytes, 35 are free"):
        memory.resume(["kv_cache", "weights"])
    assert memory.free_bytes == 35
    memory.resume(["kv_cache"])
    memory.resume(["kv_cache"])
    assert memory.free_bytes == 5


def test_weights_without_a_backup_are_lost() -> None:
    device = SimulatedDevice(model=SimulatedModel(vocab_size=50, seed=9))
    memory = SimulatedMemory(device=device)
    memory.release(["kv_cache"], keep_weights=False)
    assert device.model.seed == 9
    memory.release(["weights"], keep_weights=False)
    assert device.model == SimulatedModel(vocab_size=50)
