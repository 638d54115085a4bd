"""What the engine says of itself over HTTP, and the application that says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Route

from observability.http_app import status_routes
from scheduler_components import __version__
from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.reference.engine import Engine
from scheduler_components.reference.generate_http import GenerateEndpoint
from scheduler_components.server_info import merge_kv_events

__all__ = ["EngineStatus", "make_app"]


@dataclass(slots=True, kw_only=True, frozen=True)
class EngineStatus:
    """A ``StatusSource`` of the engine."""

    engine: Engine

    def is_healthy(self) -> bool:
        return self.engine.front.board.failure is None

    def server_info(self) -> Mapping[str, Any]:
        """Configuration, the descriptor of the event streams, and each DP rank's newest slots and blocks."""
        config = self.engine.config
        facts = {
            "version": __version__,
            "model_path": config.model_name,
            "served_model_name": config.model_name,
            "dp_size": config.dp_size,
            "tp_size": config.world_size,
            "attn_cp_size": config.attn_cp_size,
            "attn_tp_size": config.attn_tp_size,
            "enable_dp_attention": config.dp_size > 1,
            "page_size": config.scheduler.page_size,
            "max_total_num_tokens": config.scheduler.kv_tokens,
            "max_running_requests": config.scheduler.max_running_requests,
            "chunked_prefill_size": config.scheduler.chunk_tokens,
            "kv_metrics": [msgspec.to_builtins(report) for _, report in sorted(self.engine.kv_metrics.items())],
        }
        return merge_kv_events(
            facts, config=config.kv_events, block_size=config.scheduler.page_size, dp_size=config.dp_size
        )

    def model_info(self) -> Mapping[str, Any]:
        name = self.engine.config.model_name
        return {"model_path": name, "served_model_name": name, "is_generation": True, "skip_tokenizer_init": True}

    def load_snapshots(self) -> Sequence[LoadSnapshot]:
        return [stats.load for stats in self.engine.front.board.stats.values()]


def make_app(engine: Engine, registry: CollectorRegistry) -> Starlette:
    """Every route of the engine: ``/generate`` and the status routes."""
    generate = Route("/generate", GenerateEndpoint(front=engine.front), methods=["POST"])
    return Starlette(routes=[generate, *status_routes(EngineStatus(engine=engine), registry=registry)])
