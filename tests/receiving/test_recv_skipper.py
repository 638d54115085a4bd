"""RecvSkipper chooses the steps before which input is received."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_components.receiving.recv_skipper import RecvSkipper
from scheduler_components.values import ForwardMode

DECODE, EXTEND, IDLE = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.IDLE


def test_decode_steps_share_one_receive() -> None:
    skipper = RecvSkipper(recv_interval=3)
    assert [skipper.should_receive(DECODE) for _ in range(7)] == [False, False, True] * 2 + [False]


def test_input_is_received_after_a_prefill_and_when_idle() -> None:
    skipper = RecvSkipper(recv_interval=3)
    modes = [DECODE, EXTEND, DECODE, DECODE, IDLE, DECODE, ForwardMode.MIXED]
    assert [skipper.should_receive(mode) for mode in modes] == [False, True, False, False, True, False, True]


def test_an_interval_of_one_receives_before_every_step() -> None:
    skipper = RecvSkipper()
    assert all(skipper.should_receive(mode) for mode in ForwardMode)


def test_the_caller_can_set_the_weights() -> None:
    skipper = RecvSkipper(recv_interval=4, weights={DECODE: 2, EXTEND: 0})
    assert [skipper.should_receive(mode) for mode in (EXTEND, DECODE, DECODE)] == [False, False, True]
    assert skipper.should_receive(ForwardMode.TARGET_VERIFY), "what is not named counts whole"


@pytest.mark.parametrize("given", [{"recv_interval": 0}, {"weights": {DECODE: -1}}])
def test_an_invalid_interval_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        RecvSkipper(**given)  # type: ignore[arg-type]
