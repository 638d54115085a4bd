"""Loaded tensors have one checksum for all ranks, and a scheduler without weights rejects an update."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_components.weight_updater import LoadedTensors, NullWeightStore


def checksum_of(*tensors: tuple[str, bytes]) -> int:
    loaded = LoadedTensors()
    for name, content in tensors:
        loaded.add(name, content)
    return loaded.checksum()


def test_the_checksum_depends_on_names_and_contents_and_not_on_their_order() -> None:
    a, b = ("a", b"one"), ("b", b"two")
    assert checksum_of(a, b) == checksum_of(b, a)
    others = [(), (a,), (b,), (("a", b"two"), ("b", b"one")), (("aone", b"b"),)]
    checksums = {checksum_of(*tensors) for tensors in others} | {checksum_of(a, b)}
    assert len(checksums) == len(others) + 1
    assert all(0 <= checksum < 2**63 for checksum in checksums)


def test_a_tensor_is_loaded_once_and_not_empty() -> None:
    loaded = LoadedTensors()
    loaded.add("a", b"one")
    with pytest.raises(ConfigError, match="name='a': was loaded before"):
        loaded.add("a", b"two")
    with pytest.raises(ConfigError, match="is empty, in tensor 'b'"):
        loaded.add("b", b"")
    loaded.clear()
    loaded.add("a", b"two")
    assert loaded.checksum() == checksum_of(("a", b"two"))


def test_a_scheduler_without_a_store_rejects_an_update() -> None:
    store = NullWeightStore()
    with pytest.raises(ConfigError, match="weight_version='v2': cannot be loaded"):
        store.begin("v2")
    store.roll_back()
    assert store.checksum() == 0
