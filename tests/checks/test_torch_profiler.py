"""torch's profiler writes one trace per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_components import ConfigError


@pytest.mark.torch
def test_torch_writes_a_trace_of_the_computation(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from scheduler_components.checks.torch_profiler import TorchProfiler

    profiler = TorchProfiler(tmp_path)
    profiler.start()
    torch.ones(8, 8) @ torch.ones(8, 8)
    path = Path(profiler.stop("p-rank0"))
    assert path == tmp_path / "p-rank0.trace.json.gz"
    assert path.stat().st_size > 0
    with pytest.raises(ConfigError, match="start it first"):
        profiler.stop("p")
