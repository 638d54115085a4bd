"""An invalid number is rejected with the name of its setting; a valid one passes."""

from __future__ import annotations

import math
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components._internal.validators import (
    MAX_INTEGER,
    check_integer,
    check_number,
    integer_validator,
    number_validator,
)


@attrs.frozen
class Settings:
    pages: int = attrs.field(default=1, validator=integer_validator())
    rank: int = attrs.field(default=0, validator=integer_validator("is not a rank", at_least=0))
    timeout_s: float = attrs.field(default=1, validator=number_validator())
    pause_s: float = attrs.field(default=0, validator=number_validator(or_zero=True))


@given(st.integers(-5, 5), st.integers(-5, 5))
def test_integers_from_the_minimum_pass(value: int, least: int) -> None:
    if value >= least:
        check_integer("pages", value, at_least=least)
    else:
        with pytest.raises(ConfigError, match=f"pages={value}: is not a size; give an integer of at least {least}"):
            check_integer("pages", value, at_least=least)


@given(st.floats() | st.integers(-2, 2) | st.just(10**400))
def test_finite_numbers_above_zero_pass(value: float) -> None:
    if 0 < value <= sys.float_info.max:
        check_number("wait_s", value)
        check_number("wait_s", value, or_zero=True)
    else:
        with pytest.raises(ConfigError, match=r"wait_s=.*: is not a time span; give a finite number above 0"):
            check_number("wait_s", value)


def test_an_integer_that_json_cannot_show_is_refused() -> None:
    check_integer("pages", MAX_INTEGER)
    with pytest.raises(ConfigError, match=f"pages={MAX_INTEGER + 1}: is not a size; give an integer of at most"):
        check_integer("pages", MAX_INTEGER + 1)
    with pytest.raises(ConfigError, match="give an integer of at most 9"):
        check_integer("pages", 10, at_most=9)


def test_zero_passes_only_with_or_zero() -> None:
    check_number("pause_s", 0, or_zero=True)
    check_number("pause_s", 5, at_least=5, at_most=5)
    with pytest.raises(ConfigError, match="pause_s=4: is not a time span; give a number of at least 5"):
        check_number("pause_s", 4, at_least=5)
    with pytest.raises(ConfigError, match="pause_s=6: is not a time span; give a number of at most 5"):
        check_number("pause_s", 6, at_most=5)
    check_number("pause_s", -0.0, or_zero=True)
    with pytest.raises(ConfigError, match="give a finite number of at least 0"):
        check_number("pause_s", -1e-9, or_zero=True)


@pytest.mark.parametrize("value", [True, False, None, "3", 1.5, [1]])
def test_a_value_that_is_no_integer_is_rejected(value: object) -> None:
    with pytest.raises(ConfigError):
        check_integer("pages", value)


@pytest.mark.parametrize("value", [True, False, None, "3", [1], math.nan, math.inf])
def test_a_value_that_is_no_number_is_rejected(value: object) -> None:
    with pytest.raises(ConfigError):
        check_number("wait_s", value)


def test_fields_are_checked_by_their_own_names() -> None:
    assert Settings(pages=3, rank=0, timeout_s=0.5, pause_s=0) == Settings(3, 0, 0.5, 0)
    for wrong in ({"pages": 0}, {"rank": -1}, {"timeout_s": 0}, {"pause_s": -1}):
        with pytest.raises(ConfigError) as error:
            Settings(**wrong)
        assert {error.value.field: error.value.value} == wrong
    with pytest.raises(ConfigError, match="is not a rank"):
        Settings(rank=-1)
