"""HashedPrompt: the hashes in each namespace, computed once."""

from __future__ import annotations

import pytest

from observability.routing import HashedPrompt
from scheduler_components import ConfigError
from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace, hash_pages

SALTED = PrefixNamespace(cache_salt="tenant")


def test_hashes_are_those_of_each_namespace_and_none_in_others() -> None:
    prompt = HashedPrompt(token_ids=range(10), page_size=4)
    prompt.hash_in([DEFAULT_NAMESPACE, SALTED])
    assert prompt.hashes_in(DEFAULT_NAMESPACE) == hash_pages(range(10), 4)
    assert prompt.hashes_in(SALTED) == hash_pages(range(10), 4, SALTED.seed())
    assert prompt.hashes_in(PrefixNamespace(cache_salt="another")) == ()


def test_a_namespace_is_hashed_once() -> None:
    prompt = HashedPrompt(token_ids=[1, 2], page_size=1)
    prompt.hash_in([SALTED])
    hashes = prompt.hashes_in(SALTED)
    prompt.hash_in([SALTED])
    assert prompt.hashes_in(SALTED) is hashes


def test_a_token_that_has_no_hash_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_ids=-1"):
        HashedPrompt(token_ids=[-1], page_size=1).hash_in([DEFAULT_NAMESPACE])
