"""The allocation log is bounded and samples whole holders."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_components.checks.allocation_log import AllocationLog
from scheduler_components.watchdog import StepProgress


def test_the_log_drops_the_oldest_entries_and_samples_holders() -> None:
    ledger = AllocationLog(progress=StepProgress(), max_entries=3, max_pages=10)
    for number in range(5):
        ledger.record("allocated", "full", f"r{number}", "grow", [number])
    assert [record.holder for record in ledger.history("full", range(9))] == ["r2", "r3", "r4"]
    ledger.record("allocated", "full", "long", "grow", range(100, 109))
    assert [record.holder for record in ledger.history("full", range(200))] == ["r4", "long"]
    assert ledger.history("swa", range(200)) == []
    ledger.record("freed", "full", "long", "release", ())
    assert len(ledger) == 2, "no pages, no entry"
    sampled = AllocationLog(progress=StepProgress(), one_in=4)
    watched = sum(sampled.is_sampled(f"request {number}") for number in range(4000))
    assert 500 < watched < 1500
    with pytest.raises(ConfigError, match="one_in"):
        AllocationLog(progress=StepProgress(), one_in=0)
