"""Names of a log's streams are unique and valid."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.jetstream import LogAddress
from scheduler_components import ConfigError

NAMES = st.text(st.characters(codec="utf-8"), max_size=20)


ADDRESSES = st.builds(LogAddress, NAMES.filter(bool), st.integers(0, 10**6), NAMES)


@given(first=ADDRESSES, second=ADDRESSES)
def test_different_addresses_have_different_names(first: LogAddress, second: LogAddress) -> None:
    names = [(address.pointer_key, address.subject, address.heartbeat_subject) for address in (first, second)]
    assert all((mine == other) is (first == second) for mine, other in zip(*names, strict=True))


def test_separators_in_names_are_escaped() -> None:
    names = [("a", "b.c"), ("a.b", "c"), ("a.b.c", ""), ("a=2Eb", "c"), ("a", ""), ("a", "="), ("=", "a"), ("=3D", "a")]
    assert len({LogAddress(worker, 0, topic).pointer_key for worker, topic in names}) == len(names)


@given(address=ADDRESSES)
def test_names_are_valid_subjects(address: LogAddress) -> None:
    assert address.subject.count(".") == 4
    assert not set(address.subject + address.log) & set(" *>/\\\t\r\n")
    assert "." not in address.log


@pytest.mark.parametrize("given_", [{"worker": ""}, {"worker": "w" * 81}, {"worker": "w", "rank": -1}])
def test_an_invalid_address_is_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LogAddress(**given_)
