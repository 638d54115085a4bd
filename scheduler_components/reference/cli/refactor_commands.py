"""The command group ``refactor``: measure a scheduler of mixins, and take it apart by recipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from cyclopts import App, Parameter

from scheduler_components import ConfigError
from scheduler_components.refactor.measure_report import MeasureReport, render_mermaid, render_svg, render_text
from scheduler_components.refactor.measurement import find_host, measure_host
from scheduler_components.refactor.source_index import SourceIndex
from scheduler_components.refactor.source_tree import find_module_file, python_files, read_text
from scheduler_components.reference.cli.replay_commands import record, replay
from scheduler_components.reference.cli.run_reporter import print_lines
from scheduler_components.reference.cli.verify_commands import carry, verify

__all__ = ["REFACTOR_COMMANDS", "make_refactor_app", "measure"]

MeasureFormat: TypeAlias = Literal["text", "json", "mermaid", "svg"]
_PROGRESS_S = 1.0


def measure(
    path: Annotated[list[Path], Parameter(help="Files and folders. The files of bases are found from them.")],
    /,
    *,
    host: Annotated[
        str, Parameter(help="The scheduler's class, as CLASS or FILE:CLASS. Default: the largest with a mixin.")
    ] = "",
    part: Annotated[str, Parameter(help="In the text, list the methods of this part only.")] = "",
    output_format: Annotated[MeasureFormat, Parameter(name="--format", help="Form of the output.")] = "text",
) -> int:
    """Measure which attributes of a scheduler each mixin, base and component uses.

    It reads the source and imports nothing. The progress is on standard error.
    """
    progress = _Progress()
    files = [file for each in path for file in python_files(each)]
    texts = {file.as_posix(): read_text(file) for file in files}
    index = SourceIndex.parse(texts, progress.on_file)
    index.find_module = find_module_file
    measurement = measure_host(index, find_host(index, host), progress.on_part)
    if part and part not in {each.name for each in measurement.parts}:
        known = ", ".join(each.name for each in measurement.parts)
        raise ConfigError("part", part, "is no part of this host", f"name one of {known}")
    report = MeasureReport.of(measurement)
    match output_format:
        case "text":
            print_lines(render_text(report, part))
        case "json":
            print_lines((msgspec.json.format(msgspec.json.encode(report), indent=1).decode(),))
        case "mermaid":
            print_lines(render_mermaid(report))
        case "svg":
            print_lines((render_svg(report),))
    progress.end(len(index.modules))
    return 0


class _Progress:
    """Writes a line to standard error about once per second."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._num_files = 0

    def on_file(self, path: str) -> None:
        """Count a parsed file."""
        self._num_files += 1
        self._say(f"parsed {self._num_files} files, the last is {path}")

    def on_part(self, name: str) -> None:
        """Note that a part is being read."""
        self._say(f"measuring {name}")

    def end(self, num_files: int) -> None:
        """Say how long it took."""
        sys.stderr.write(f"measured {num_files} files in {time.monotonic() - self._began:.1f} s\n")

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= _PROGRESS_S:
            self._last = now
            sys.stderr.write(f"{text}\n")


REFACTOR_COMMANDS: dict[str, Callable[..., int]] = {
    "measure": measure,
    "verify": verify,
    "carry": carry,
    "record": record,
    "replay": replay,
}
"""Commands by name. Those that edit code import libcst when they run."""


def make_refactor_app() -> App:
    """Make the parser of the group."""
    app = App(name="refactor", help="Take a scheduler of mixins apart: measure it, move its parts, prove the moves.")
    for name, command in REFACTOR_COMMANDS.items():
        app.command(command, name=name)
    return app
