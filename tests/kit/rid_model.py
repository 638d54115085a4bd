"""A simulated model whose text depends on the request's id, so that a test can choose and foretell it."""

from __future__ import annotations

from scheduler_engine.simulation.simulated_model import HashedRequest, SimulatedModel


class RidModel(SimulatedModel):
    """Generate another text per request id, whatever the prompt and the sampling."""

    def text_source(self, request: HashedRequest) -> str:
        return request.rid
