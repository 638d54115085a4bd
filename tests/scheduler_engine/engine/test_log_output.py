"""Each record is one line on standard error, and in JSON every line of every process is an object."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_engine.engine.log_output import LogConfig, configure_logging, format_rank_line


@pytest.fixture(autouse=True)
def log_of_the_tests() -> Iterator[None]:
    """Give the log of this process back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_text_has_level_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig())
    logging.getLogger("a.b").warning("%d pages", 3)
    logging.getLogger("a.b").info("not logged")
    assert capsys.readouterr() == ("", "WARNING a.b: 3 pages\n")


def test_json_is_one_object_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers.clear()  # pytest's would send the record to another process, as text it cannot encode
    configure_logging(LogConfig(log_level="info", log_format="json"), rank=5)
    logging.getLogger("a").info("two\nlines, %s", "\ud800")
    try:
        raise ValueError("inside")
    except ValueError:
        logging.getLogger("b").exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert datetime.fromisoformat(first.pop("timestamp")).utcoffset() is not None
    assert first == {"level": "info", "logger": "a", "message": "two\nlines, \ud800", "rank": 5}
    assert (second["level"], second["message"]) == ("error", "failed")
    assert second["exception"].endswith("ValueError: inside")


def test_a_second_configuration_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(log_format="json"))
    configure_logging(LogConfig(log_level="error"))
    logging.getLogger("a").warning("hidden")
    logging.getLogger("a").error("once")
    assert capsys.readouterr().err == "ERROR a: once\n"


class Gone:
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None: ...


def test_a_log_without_a_reader_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging(LogConfig())
    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("a").error("lost")


@pytest.mark.parametrize("setting", [{"log_level": "loud"}, {"log_format": "xml"}])
def test_an_unknown_value_is_refused(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        LogConfig(**setting)  # type: ignore[arg-type]


@given(st.text())
def test_every_line_of_a_rank_becomes_one_object(line: str) -> None:
    facts = json.loads(format_rank_line(line, 3, "json"))
    assert (facts["message"], facts["rank"], facts["level"]) == (line, 3, "warning")


def test_a_record_of_a_rank_is_forwarded_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogConfig(log_format="json"), rank=1)
    logging.getLogger("a").warning("x")
    line = capsys.readouterr().err.rstrip()
    assert format_rank_line(line, 1, "json") == line
    assert format_rank_line("plain", 1, "text") == "rank 1: plain"
