"""Checks of the numbers that a person gives, once for the whole kit: each refuses with the setting's name.

``check_*`` take a name and a value. The others make validators for fields of ``attrs`` classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from scheduler_components.errors import ConfigError

if TYPE_CHECKING:
    import attrs

__all__ = ["check_choice", "check_integer", "check_number", "choice_validator", "integer_validator", "number_validator"]


def check_integer(field: str, value: object, problem: str = "is not a size", *, at_least: int = 1) -> None:
    """Refuse what is no integer, or is too small.

    Args:
        field: the name of the setting.
        value: what was given for it; ``True`` is no integer here.
        problem: what the error says is wrong.
        at_least: the smallest value that works.

    Raises:
        ConfigError: naming the field.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(field, value, problem, f"give an integer of at least {at_least}")


def check_number(field: str, value: Any, problem: str = "is not a time span", *, or_zero: bool = False) -> None:
    """Refuse what is no finite number above 0; with ``or_zero``, 0 works too.

    Raises:
        ConfigError: naming the field.
    """
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_one or not (0 < value < math.inf or (or_zero and value == 0)):
        raise ConfigError(field, value, problem, f"give a finite number {'of at least' if or_zero else 'above'} 0")


def check_choice(field: str, value: object, choices: Collection[str], problem: str = "is not a known value") -> None:
    """Raise a ConfigError that names ``field`` and lists ``choices`` unless ``value`` is one of them."""
    if value not in choices:
        raise ConfigError(field, value, problem, f"give one of {', '.join(choices)}")


def integer_validator(
    problem: str = "is not a size", *, at_least: int = 1
) -> Callable[[object, attrs.Attribute[int], Any], None]:
    """Make the validator of an attrs field that calls ``check_integer``."""

    def validate(_: object, attribute: attrs.Attribute[int], value: object) -> None:
        check_integer(attribute.name, value, problem, at_least=at_least)

    return validate


def number_validator(
    problem: str = "is not a time span", *, or_zero: bool = False
) -> Callable[[object, attrs.Attribute[float], Any], None]:
    """Make the validator of an attrs field that calls ``check_number``."""

    def validate(_: object, attribute: attrs.Attribute[float], value: object) -> None:
        check_number(attribute.name, value, problem, or_zero=or_zero)

    return validate


def choice_validator(
    *choices: str, problem: str = "is not a known value"
) -> Callable[[object, attrs.Attribute[Any], Any], None]:
    """Make the validator of an attrs field that calls ``check_choice``."""

    def validate(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
        check_choice(attribute.name, value, choices, problem)

    return validate
