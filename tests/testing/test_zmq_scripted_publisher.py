"""The scripted publisher passes every publisher check."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components.testing import ScriptedPublisher
from scheduler_components.testing import zmq_publisher_checks as checks

pytestmark = pytest.mark.sockets


@pytest.mark.parametrize("check", checks.PUBLISHER_CHECKS)
def test_the_scripted_publisher_passes(check: Callable[[checks.OpenPublisher], None]) -> None:
    check(ScriptedPublisher.open)
