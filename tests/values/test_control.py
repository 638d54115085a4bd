"""Control requests have a name for errors."""

from __future__ import annotations

from typing import get_args

from scheduler_components.values import ControlRequest
from scheduler_components.values.control import _NAMES


def test_every_control_request_has_its_own_name() -> None:
    assert set(_NAMES) == set(get_args(ControlRequest))
    assert len(set(_NAMES.values())) == len(_NAMES)
