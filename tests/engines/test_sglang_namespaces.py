"""SGLang's functions compute the golden namespaced hashes of the specification."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with SGLang")

from scheduler_components.testing.golden import NamespacedHashVector, namespaced_hash_vectors

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # SGLang's own


@pytest.mark.parametrize("vector", namespaced_hash_vectors(), ids=str)
def test_sglang_computes_the_golden_namespaced_hashes(vector: NamespacedHashVector) -> None:
    from sglang.srt.disaggregation.kv_events import kv_event_namespace_seed, namespaced_block_hash

    seed = kv_event_namespace_seed(extra_key=vector.extra_key, cache_salt=vector.cache_salt)
    assert (seed or b"").hex() == vector.seed
    assert namespaced_block_hash(vector.block_hash, namespace_seed=seed) == vector.namespaced_hash
