"""How the ranks of a replica agree: proposals, rank groups, sync calls and the decision log.

The theory is at the top of ``proposals.py``. The edges ``torch_sync`` and ``thread_sync`` carry the values between
ranks.
"""

from __future__ import annotations

from scheduler_components.agreement.proposals import (
    BLOCK_INTS,
    MIN_NEUTRAL,
    AgreedValues,
    ParallelGroups,
    Proposal,
    Slots,
    all_reduce_min,
    close_groups,
    divergence_error,
    elementwise_min,
)
from scheduler_components.agreement.sync import SyncCall, SyncGroup

__all__ = [
    "BLOCK_INTS",
    "MIN_NEUTRAL",
    "AgreedValues",
    "ParallelGroups",
    "Proposal",
    "Slots",
    "SyncCall",
    "SyncGroup",
    "all_reduce_min",
    "close_groups",
    "divergence_error",
    "elementwise_min",
]
