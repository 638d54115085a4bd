"""A faulty network applies its plan and delivers no message that was not sent."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings

from scheduler_components.testing.faulty_network import Fault, FaultyNetwork
from scheduler_components.testing.strategies import fault_plans


@settings(deadline=None)
@given(plan=fault_plans())
def test_a_faulty_network_loses_repeats_and_delays_what_its_plan_says_and_invents_nothing(plan: list[Fault]) -> None:
    network: FaultyNetwork[int] = FaultyNetwork(plan)
    arrived = [each for number in range(len(plan) + 1) for each in network.send(number)] + network.flush()
    counts = Counter(arrived)
    for number, fault in enumerate([*plan, Fault.NONE]):
        if fault in (Fault.DROP, Fault.DROP_AND_DUPLICATE_LAST):
            assert counts[number] == 0
        else:
            assert counts[number] >= (2 if fault is Fault.DUPLICATE else 1)
    assert counts.keys() <= set(range(len(plan) + 1))
    assert network.num_lost == sum(fault in (Fault.DROP, Fault.DROP_AND_DUPLICATE_LAST) for fault in plan)


def test_a_network_without_a_plan_keeps_order() -> None:
    network: FaultyNetwork[int] = FaultyNetwork()
    assert [network.send(number) for number in range(3)] == [[0], [1], [2]]
