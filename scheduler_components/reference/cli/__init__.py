"""The command line ``scheduler-components``; ``main`` is its entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names

if TYPE_CHECKING:
    from scheduler_components.reference.cli.chat_client import AnswerFacts, Conversation, RefusedAnswerError
    from scheduler_components.reference.cli.chat_command import (
        ChatOptions,
        facts_line,
        find_small_model,
        hold_chat,
        read_lines,
    )
    from scheduler_components.reference.cli.commands import COMMANDS, make_app, run_command
    from scheduler_components.reference.cli.driver import Lateness, Tally, TraceDriver, percentile
    from scheduler_components.reference.cli.engine_commands import (
        DemoOptions,
        EngineOptions,
        EngineSizes,
        HiCacheOptions,
        ModelOptions,
        engine_config,
    )
    from scheduler_components.reference.cli.hicache_sim_command import RunProgress, draw_divergence, report_of
    from scheduler_components.reference.cli.run_report import (
        Evidence,
        PortProbe,
        RunReport,
        StreamEvidence,
        TextEvidence,
        judge,
        probe_ports,
        speaks_zmq,
    )
    from scheduler_components.reference.cli.screen import (
        JsonScreen,
        RateWindow,
        Screen,
        make_rows,
        plain_line,
        progress_text,
        render_table,
    )

__all__ = [
    "AnswerFacts",
    "ChatOptions",
    "Conversation",
    "DemoOptions",
    "EngineOptions",
    "EngineSizes",
    "Evidence",
    "HiCacheOptions",
    "JsonScreen",
    "Lateness",
    "ModelOptions",
    "PortProbe",
    "RateWindow",
    "RefusedAnswerError",
    "RunProgress",
    "RunReport",
    "Screen",
    "StreamEvidence",
    "TextEvidence",
    "Tally",
    "TraceDriver",
    "COMMANDS",
    "draw_divergence",
    "engine_config",
    "facts_line",
    "find_small_model",
    "hold_chat",
    "judge",
    "make_app",
    "make_rows",
    "percentile",
    "plain_line",
    "probe_ports",
    "progress_text",
    "read_lines",
    "render_table",
    "report_of",
    "run_command",
    "speaks_zmq",
]

__getattr__ = lazy_names(
    __name__,
    {
        "scheduler_components.reference.cli.chat_client": "AnswerFacts Conversation RefusedAnswerError",
        "scheduler_components.reference.cli.chat_command": (
            "ChatOptions facts_line find_small_model hold_chat read_lines"
        ),
        "scheduler_components.reference.cli.commands": "COMMANDS make_app run_command",
        "scheduler_components.reference.cli.driver": "Lateness Tally TraceDriver percentile",
        "scheduler_components.reference.cli.engine_commands": (
            "DemoOptions EngineOptions EngineSizes HiCacheOptions ModelOptions engine_config"
        ),
        "scheduler_components.reference.cli.hicache_sim_command": "RunProgress draw_divergence report_of",
        "scheduler_components.reference.cli.run_report": (
            "Evidence PortProbe RunReport StreamEvidence TextEvidence judge probe_ports speaks_zmq"
        ),
        "scheduler_components.reference.cli.screen": (
            "JsonScreen RateWindow Screen make_rows plain_line progress_text render_table"
        ),
    },
)
