"""Prefixes of different namespaces never share a hash; the plain namespace is SGLang's plain chain."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.cache import PLAIN_NAMESPACE, PrefixNamespace

TEXT = st.none() | st.text(max_size=5)
IDENTITIES = st.fixed_dictionaries(
    {"lora_id": st.none() | st.integers(0, 3), "lora_name": TEXT, "cache_salt": TEXT, "extra_key": TEXT}
)


def test_the_plain_namespace_has_no_seed() -> None:
    assert PLAIN_NAMESPACE.seed() == b""
    assert PrefixNamespace(session_id="s1").seed() == b""


def test_golden_seed() -> None:
    # SHA-256 of the msgpack array [7, "ad", "salt", nil] = 94 07 a2 6164 a4 73616c74 c0, and two zero bytes.
    namespace = PrefixNamespace(lora_id=7, lora_name="ad", cache_salt="salt", session_id="not hashed")
    assert namespace.seed().hex() == "cd1ca7d56133f7b721ee4e351d5dbf41b9632b177a40bdd89e8cffd1513b09fb"


def test_golden_seed_of_an_extra_key() -> None:
    # 94 c0 c0 c0 a1 78, and three zero bytes.
    seed = PrefixNamespace(extra_key="x").seed()
    assert seed.hex() == "e84e6c754a686b3d81262abe1be0fd845916984ce6b6f7c206683a816b5b4df5"


@settings(deadline=None)
@given(left=IDENTITIES, right=IDENTITIES)
def test_seeds_are_equal_only_for_equal_identities(left: dict[str, object], right: dict[str, object]) -> None:
    seeds = [PrefixNamespace(**identity).seed() for identity in (left, right)]  # type: ignore[arg-type]
    assert (seeds[0] == seeds[1]) == (left == right)


@pytest.mark.parametrize("namespace", [PrefixNamespace(lora_id=2**64), PrefixNamespace(cache_salt="\ud800")])
def test_what_cannot_be_encoded_is_refused(namespace: PrefixNamespace) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        namespace.seed()
