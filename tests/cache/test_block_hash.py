"""Page hashes equal SGLang's chain, and each namespace has its own chain."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace, hash_pages
from scheduler_components.cache.block_hash import pack_tokens, page_digests, unpack_tokens
from scheduler_components.testing.golden import PageHashVector, page_hash_vectors

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.parametrize("vector", page_hash_vectors(), ids=lambda vector: vector.name)
def test_golden_page_hashes(vector: PageHashVector) -> None:
    hashes = hash_pages(vector.token_ids, vector.page_size, bytes.fromhex(vector.prior))
    assert hashes == vector.block_hashes


def test_a_digest_continues_from_the_whole_digest_of_the_previous_page() -> None:
    first = bytes.fromhex("cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72")
    assert page_digests(pack_tokens([1, 2, 3, 4]), 4, b"") == first


@settings(deadline=None)
@given(token_ids=TOKEN_IDS, page_size=st.integers(1, 5))
def test_hashes_are_the_chain_written_slowly(token_ids: list[int], page_size: int) -> None:
    expected, digest = [], b""
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        hasher = sha256(digest)
        for token in token_ids[start : start + page_size]:
            hasher.update(token.to_bytes(4, "little"))
        digest = hasher.digest()
        expected.append(int.from_bytes(digest[:8], "big", signed=True))
    assert hash_pages(token_ids, page_size) == tuple(expected)


@settings(deadline=None)
@given(token_ids=TOKEN_IDS)
def test_tokens_are_packed_little_endian_and_unpacked(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert packed == b"".join(token.to_bytes(4, "little") for token in token_ids)
    assert unpack_tokens(packed) == tuple(token_ids)
    assert all(pack_tokens(array(code, token_ids)) == packed for code in "IqQ")
    assert pack_tokens(memoryview(packed)) == b"".join(bytes((byte, 0, 0, 0)) for byte in packed)


@pytest.mark.parametrize("bad", [array("q", [1, -1]), array("q", [1, 2**32]), [1, -1], [2**70], array("d", [1.0])])
def test_an_invalid_token_id_is_refused_in_every_container(bad: Sequence[int]) -> None:
    with pytest.raises(ConfigError, match="token_ids"):
        pack_tokens(bad)


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 255), max_size=12))
@example(token_ids=[1, 0, 0, 0])  # read as raw memory, these four bytes would be the single token 1
def test_every_kind_of_sequence_packs_alike(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert pack_tokens(tuple(token_ids)) == packed
    assert pack_tokens(array("I", token_ids)) == packed
    assert pack_tokens(array("q", token_ids)) == packed
    assert pack_tokens(bytes(token_ids)) == packed
    assert pack_tokens(bytearray(token_ids)) == packed
    assert pack_tokens(memoryview(bytes(token_ids))) == packed


@pytest.mark.parametrize("bad", [-1, 2**32, 2**64, 1.0, None, "7"])
@given(before=st.lists(st.integers(0, 9), max_size=3), after=st.lists(st.integers(0, 9), max_size=3))
@settings(deadline=None, max_examples=20)
def test_the_first_invalid_token_id_is_named(bad: object, before: list[int], after: list[int]) -> None:
    with pytest.raises(ConfigError) as caught:
        pack_tokens([*before, bad, *after])  # type: ignore[list-item]
    assert (caught.value.field, caught.value.value) == ("token_ids", bad)


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_of_no_tokens_is_refused(page_size: int) -> None:
    with pytest.raises(ConfigError, match="page_size"):
        hash_pages([1, 2], page_size)


TEXT = st.none() | st.text(max_size=5)
IDENTITIES = st.fixed_dictionaries(
    {"lora_id": st.none() | st.integers(0, 3), "lora_name": TEXT, "cache_salt": TEXT, "extra_key": TEXT}
)


def test_the_plain_namespace_has_no_seed() -> None:
    assert DEFAULT_NAMESPACE.seed() == b""
    assert PrefixNamespace(session_id="s1").seed() == b""


def test_golden_seed_of_a_salt_of_sglang() -> None:
    (vector,) = [each for each in page_hash_vectors() if "SGLang's seed" in each.name]
    assert vector.prior == sha256(b"sglang-cache-salt-v1\0salt").hexdigest()


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
def test_a_namespace_that_cannot_be_encoded_is_refused(namespace: PrefixNamespace) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        namespace.seed()
