"""What one run of the engine is to do."""

from __future__ import annotations

from pathlib import Path

import attrs

from scheduler_components.reference.engine_config import DEFAULT_HOST, EngineConfig
from scheduler_components.reference.workload import WorkloadConfig

__all__ = ["SessionConfig"]


@attrs.frozen(kw_only=True)
class SessionConfig:
    """What to run.

    Attributes:
        engine: the engine.
        host, port: of its HTTP server; port 0 lets the system choose.
        affinity_tokens: see ``LoadDispatcher``.
        workload: generated chats to play; None plays none.
        trace: a trace to replay, at most ``limit`` of its requests; None replays none.
        keep_serving: go on after workload or trace.
        duration_s: stop serving after this; None serves until interrupted.
    """

    engine: EngineConfig
    host: str = DEFAULT_HOST
    port: int = 0
    affinity_tokens: int = 0
    workload: WorkloadConfig | None = None
    trace: Path | None = None
    limit: int | None = None
    keep_serving: bool = False
    duration_s: float | None = None

    @property
    def has_work(self) -> bool:
        return self.workload is not None or self.trace is not None
