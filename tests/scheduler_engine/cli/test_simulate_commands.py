"""``simulate`` has the demonstrations of ranks and of DP attention; their older names remain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_engine.cli.commands import COMMANDS
from scheduler_engine.cli.simulate_commands import SIMULATE_COMMANDS


@pytest.mark.parametrize("command", SIMULATE_COMMANDS)
def test_each_command_of_the_group_has_help(command_line: Callable, command: str) -> None:
    ran = command_line("simulate", command, "--help")
    assert ran.code == 0
    assert f"simulate {command}" in ran.out


def test_each_command_has_its_older_name() -> None:
    assert COMMANDS["hicache-sim"] is SIMULATE_COMMANDS["ranks"]
    assert COMMANDS["dp-attn-sim"] is SIMULATE_COMMANDS["dp-attention"]
