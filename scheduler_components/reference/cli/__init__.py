"""The command line ``scheduler-components``; ``main`` is its entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports

if TYPE_CHECKING:
    from scheduler_components.reference.cli.chat_client import AnswerStats, ChatRequestError, ChatSession
    from scheduler_components.reference.cli.chat_command import (
        ChatOptions,
        find_default_model,
        format_answer_stats,
        read_lines,
        run_chat,
    )
    from scheduler_components.reference.cli.commands import COMMANDS, make_app, run_command
    from scheduler_components.reference.cli.driver import ScheduleLag, TraceDriver, WorkloadCounters, percentile
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
        ObservedStream,
        PortProbe,
        RunFacts,
        RunReport,
        TextComparison,
        is_zmq_listening,
        probe_ports,
        verify,
    )
    from scheduler_components.reference.cli.screen import (
        ConsoleReporter,
        CounterRates,
        JsonReporter,
        format_progress,
        format_rank_line,
        make_rank_rows,
        render_rank_table,
    )

__all__ = [
    "AnswerStats",
    "ChatOptions",
    "ChatSession",
    "DemoOptions",
    "EngineOptions",
    "EngineSizes",
    "RunFacts",
    "HiCacheOptions",
    "JsonReporter",
    "ScheduleLag",
    "ModelOptions",
    "PortProbe",
    "CounterRates",
    "ChatRequestError",
    "RunProgress",
    "RunReport",
    "ConsoleReporter",
    "ObservedStream",
    "TextComparison",
    "WorkloadCounters",
    "TraceDriver",
    "COMMANDS",
    "draw_divergence",
    "engine_config",
    "format_answer_stats",
    "find_default_model",
    "run_chat",
    "verify",
    "make_app",
    "make_rank_rows",
    "percentile",
    "format_rank_line",
    "probe_ports",
    "format_progress",
    "read_lines",
    "render_rank_table",
    "report_of",
    "run_command",
    "is_zmq_listening",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.reference.cli.chat_client": "AnswerStats ChatSession ChatRequestError",
        "scheduler_components.reference.cli.chat_command": (
            "ChatOptions format_answer_stats find_default_model run_chat read_lines"
        ),
        "scheduler_components.reference.cli.commands": "COMMANDS make_app run_command",
        "scheduler_components.reference.cli.driver": "ScheduleLag WorkloadCounters TraceDriver percentile",
        "scheduler_components.reference.cli.engine_commands": (
            "DemoOptions EngineOptions EngineSizes HiCacheOptions ModelOptions engine_config"
        ),
        "scheduler_components.reference.cli.hicache_sim_command": "RunProgress draw_divergence report_of",
        "scheduler_components.reference.cli.run_report": (
            "RunFacts PortProbe RunReport ObservedStream TextComparison verify probe_ports is_zmq_listening"
        ),
        "scheduler_components.reference.cli.screen": (
            "JsonReporter CounterRates ConsoleReporter make_rank_rows format_rank_line format_progress render_rank_table"
        ),
    },
)
