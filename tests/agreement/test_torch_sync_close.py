"""Every gloo group of a rank is destroyed, also after one of them cannot be."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch: pip install scheduler-components[torch]")

import torch.distributed as dist

from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.torch_sync import RollCall, TorchSyncGroup

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("broken", ["", "hop 0", "hop 1", "roll call"])
def test_all_groups_are_destroyed_if_one_cannot_be(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    destroyed: list[object] = []

    def destroy(group: object) -> None:
        destroyed.append(group)
        if group == broken:
            raise RuntimeError(f"{group} is broken")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    roll_call = RollCall(rank=0, ranks=(0, 1), group="roll call", timeout_s=1.0)  # type: ignore[arg-type]
    groups = ParallelGroups(
        groups=tuple(
            TorchSyncGroup(ranks=(0, 1), group=f"hop {hop}", roll_call=roll_call, timeout_s=1.0)  # type: ignore[arg-type]
            for hop in range(3)
        )
    )
    if broken:
        with pytest.raises(RuntimeError, match=f"{broken} is broken"):
            groups.close()
    else:
        groups.close()
    groups.close()
    assert sorted(map(str, destroyed)) == ["hop 0", "hop 1", "hop 2", "roll call"]
