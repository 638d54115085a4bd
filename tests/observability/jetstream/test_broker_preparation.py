"""A writer prepares the broker after each connect and after a failure, once at a time."""

from __future__ import annotations

import pytest

from observability.jetstream.broker_preparation import PAUSE_S, BrokerPreparation


@pytest.fixture
def done() -> BrokerPreparation:
    preparation = BrokerPreparation()
    assert not preparation.is_done
    assert preparation.end(preparation.begin())
    return preparation


def test_after_a_failure_the_broker_is_prepared_again_after_a_pause(done: BrokerPreparation) -> None:
    assert done.is_done
    assert done.on_failed() == PAUSE_S
    assert not done.is_done
    assert done.end(done.begin())


def test_further_failures_cause_no_further_preparation(done: BrokerPreparation) -> None:
    assert done.on_failed() == PAUSE_S
    assert done.on_failed() is None
    number = done.begin()
    assert done.on_failed() is None
    assert done.end(number)


def test_a_preparation_that_a_lost_connection_interrupted_does_not_count(done: BrokerPreparation) -> None:
    number = done.begin()
    done.on_disconnected()
    assert not done.is_current(number) and not done.end(number)
    assert done.on_failed() is None, "the next connect prepares the broker"
    assert done.end(done.begin())


def test_a_scheduled_preparation_ends_the_one_before(done: BrokerPreparation) -> None:
    number = done.begin()
    assert done.end(number)
    assert done.on_failed() == PAUSE_S
    assert not done.end(number)
