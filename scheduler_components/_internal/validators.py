"""Validate numbers and choices that an operator types. Each error names the setting.

`check_*` take a name and a value. The others return validators for fields of `attrs` classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from scheduler_components.errors import ConfigError

if TYPE_CHECKING:
    import attrs

__all__ = [
    "MAX_INTEGER",
    "MAX_TOKENS",
    "check_choice",
    "check_integer",
    "check_number",
    "check_share",
    "choice_validator",
    "integer_validator",
    "number_validator",
]


MAX_INTEGER = 2**63 - 1
"""The largest integer of a setting: larger ones fit no wire field, and JSON of this kit cannot show them."""

MAX_TOKENS = 2**31 - 1
"""The largest number of tokens of a setting. Products of two such numbers are still exact as float."""


def check_integer(
    field: str, value: object, problem: str = "is not a size", *, at_least: int = 1, at_most: int = MAX_INTEGER
) -> None:
    """Raise unless `value` is an integer from `at_least` to `at_most`.

    Args:
        field: name of the setting.
        value: the given value. A bool is no integer here.
        problem: what is wrong, as a clause for the error.
        at_least: the smallest valid value.
        at_most: the largest valid value.

    Raises:
        ConfigError: naming the field.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(field, value, problem, f"give an integer of at least {at_least}")
    if value > at_most:
        raise ConfigError(field, value, problem, f"give an integer of at most {at_most}")


def check_number(
    field: str,
    value: Any,
    problem: str = "is not a time span",
    *,
    or_zero: bool = False,
    at_least: float = 0.0,
    at_most: float = sys.float_info.max,
) -> None:
    """Raise unless `value` is a finite number above 0, or 0 with `or_zero`, from `at_least` to `at_most`.

    Raises:
        ConfigError: naming the field.
    """
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer above the largest float cannot be converted to one.
    if not is_one or not (0 < value <= sys.float_info.max or (or_zero and value == 0)):
        raise ConfigError(field, value, problem, f"give a finite number {'of at least' if or_zero else 'above'} 0")
    if not at_least <= value <= at_most:
        bound = f"at least {at_least:g}" if value < at_least else f"at most {at_most:g}"
        raise ConfigError(field, value, problem, f"give a number of {bound}")


def check_share(field: str, value: float) -> None:
    """Raise a ConfigError that names `field` unless `value` is a number from 0 to 1."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(field, value, "is not a share", "give a number from 0 to 1")


def check_choice(field: str, value: object, choices: Collection[str], problem: str = "is not a known value") -> None:
    """Raise a ConfigError that names `field` and lists `choices` unless `value` is one of them."""
    if value not in choices:
        raise ConfigError(field, value, problem, f"give one of {', '.join(choices)}")


def integer_validator(
    problem: str = "is not a size", *, at_least: int = 1, at_most: int = MAX_INTEGER
) -> Callable[[object, attrs.Attribute[int], Any], None]:
    """Return the validator of an attrs field that calls `check_integer`."""

    def validate(_: object, attribute: attrs.Attribute[int], value: object) -> None:
        check_integer(attribute.name, value, problem, at_least=at_least, at_most=at_most)

    return validate


def number_validator(
    problem: str = "is not a time span",
    *,
    or_zero: bool = False,
    at_least: float = 0.0,
    at_most: float = sys.float_info.max,
) -> Callable[[object, attrs.Attribute[float], Any], None]:
    """Return the validator of an attrs field that calls `check_number`."""

    def validate(_: object, attribute: attrs.Attribute[float], value: object) -> None:
        check_number(attribute.name, value, problem, or_zero=or_zero, at_least=at_least, at_most=at_most)

    return validate


def choice_validator(
    *choices: str, problem: str = "is not a known value"
) -> Callable[[object, attrs.Attribute[Any], Any], None]:
    """Return the validator of an attrs field that calls `check_choice`."""

    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        check_choice(attribute.name, value, choices, problem)

    return validate
