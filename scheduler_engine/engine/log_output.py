"""Configure the log of a process: standard error, as text or as one JSON object per line.

Every process of an engine calls ``configure_logging`` once. The engine forwards what its ranks write to standard error,
so one stream has the whole log.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TypeAlias, get_args

import attrs

from scheduler_components._internal.validators import choice_validator

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["text", "json"]


@attrs.frozen(kw_only=True)
class LogConfig:
    """What a process logs, and how. The command line has an option per field.

    Attributes:
        log_level: the least severe level that is logged.
        log_format: ``text``, or ``json``: an object per line with ``timestamp`` (UTC), ``level``, ``logger``,
            ``message``, for a rank ``rank``, and for an error with a traceback ``exception``.

    Raises:
        ConfigError: a value is not known.
    """

    log_level: LogLevel = attrs.field(
        default="warning",
        validator=choice_validator(*get_args(LogLevel), problem="is not a level"),
        metadata={"help": "Least severe level that is logged."},
    )
    log_format: LogFormat = attrs.field(
        default="text",
        validator=choice_validator(*get_args(LogFormat), problem="is not a format"),
        metadata={"help": "Form of the log on standard error."},
    )


class _StderrHandler(logging.Handler):
    """Writes to the present ``sys.stderr``, one line per record and further lines for a traceback in text."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # the reader is gone: a log must not end what it describes
            self.handleError(record)


class _JsonFormatter(logging.Formatter):
    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        exception = self.formatException(record.exc_info) if record.exc_info else None
        at = datetime.fromtimestamp(record.created, UTC)
        return _json_line(at, record.levelname.lower(), record.name, record.getMessage(), self._rank, exception)


def _json_line(
    at: datetime, level: str, logger: str, message: str, rank: int | None = None, exception: str | None = None
) -> str:
    facts: dict[str, object] = {"timestamp": at.isoformat(timespec="milliseconds"), "level": level, "logger": logger}
    facts["message"] = message
    if rank is not None:
        facts["rank"] = rank
    if exception is not None:
        facts["exception"] = exception
    return json.dumps(facts)


def configure_logging(config: LogConfig, *, rank: int | None = None) -> None:
    """Send the log records of this process to standard error. A second call replaces the first.

    Args:
        config: level and format.
        rank: world rank of this process, for the records in JSON; None for the serving process.
    """
    handler = _StderrHandler()
    text = logging.Formatter("%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(text if config.log_format == "text" else _JsonFormatter(rank))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(config.log_level.upper())
    logging.captureWarnings(config.log_format == "json")


def format_rank_line(line: str, rank: int, log_format: LogFormat) -> str:
    """Return a line of a rank's standard error as the engine shows it: with its rank, in the format of the log.

    Not every line comes from the log: interpreters and libraries write there, too.
    """
    if log_format == "text":
        return f"rank {rank}: {line}"
    return line if _is_record(line) else _json_line(datetime.now(UTC), "warning", "stderr", line, rank)


def _is_record(line: str) -> bool:
    try:
        facts = json.loads(line)
    except ValueError:
        return False
    return isinstance(facts, dict) and {"timestamp", "level", "message"} <= facts.keys()
