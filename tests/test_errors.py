"""An error keeps its facts as fields and shows them in one readable sentence."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_components.errors import first_line


def test_a_config_error_names_field_value_problem_and_hint() -> None:
    error = ConfigError("replay_endpoint", "udp://*:1", "is no address", "give tcp or ipc")
    assert str(error) == "replay_endpoint='udp://*:1': is no address; give tcp or ipc"
    assert isinstance(error, ValueError)


def test_a_long_value_is_shown_truncated_and_kept_whole() -> None:
    error = ConfigError("config", "x" * 100_000, "is no JSON", "give an object")
    assert len(str(error)) < 300
    assert "xxx...: is no JSON" in str(error)
    assert error.value == "x" * 100_000


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such file.\nat line 3"), "no such file"),
        (ValueError("  expected;\nmore"), "expected"),
        (ValueError("no room"), "no room"),
        (KeyError(), "KeyError"),
    ],
)
def test_an_error_of_another_library_is_quoted_by_its_first_line(error: Exception, line: str) -> None:
    assert first_line(error) == line
