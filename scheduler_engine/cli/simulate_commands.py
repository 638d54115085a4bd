"""The group ``simulate``: arrivals and event streams in virtual time, and rules of the kit on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable

from cyclopts import App

from scheduler_engine.cli.dp_attn_sim_command import dp_attn_sim
from scheduler_engine.cli.hicache_sim_command import hicache_sim
from scheduler_engine.cli.simulate_trace_command import simulate_conversations, simulate_trace

SIMULATE_COMMANDS: dict[str, Callable[..., int]] = {
    "trace": simulate_trace,
    "conversations": simulate_conversations,
    "ranks": hicache_sim,
    "dp-attention": dp_attn_sim,
}
"""Commands of the group by name. ``hicache-sim`` and ``dp-attn-sim`` are their older names."""


def make_simulate_app() -> App:
    """Make the parser of the group."""
    app = App(
        name="simulate",
        help="Serve arrivals and event streams in virtual time, and show on simulated ranks why the kit's rules exist.",
    )
    for name, command in SIMULATE_COMMANDS.items():
        app.command(command, name=name)
    return app
