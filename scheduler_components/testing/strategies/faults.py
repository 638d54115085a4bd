"""Plans of network faults for ``fakes.network.FaultyNetwork``."""

from __future__ import annotations

from hypothesis import strategies as st

from scheduler_components.testing.fakes.network import Fault

__all__ = ["fault_plans"]


def fault_plans(*, max_messages: int = 30, faults: tuple[Fault, ...] = tuple(Fault)) -> st.SearchStrategy[list[Fault]]:
    """One fault a message, most of them none; messages beyond the plan meet none.

    Args:
        max_messages: length of a plan at most.
        faults: which may occur.
    """
    return st.lists(st.just(Fault.NONE) | st.sampled_from(faults), max_size=max_messages)
