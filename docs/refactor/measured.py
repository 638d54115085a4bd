"""Measure real schedulers, and write the tables of ``measured.md``: ``python docs/refactor/measured.py sglang``.

The engine is found where it is installed, and its source is read, never imported. Without a name, each installed engine
is measured. A test in `make engines` compares the page with the installed engine.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from scheduler_refactor.leave_order import LeavePlan
from scheduler_refactor.measure_report import MeasureReport
from scheduler_refactor.measurement import Measurement, Part, find_host, measure_host
from scheduler_refactor.source_index import SourceIndex
from scheduler_refactor.source_tree import find_module_file, python_files, read_text

__all__ = ["ENGINES", "PAGE", "find_engine", "render_engine", "written_section", "written_version"]

PAGE = Path(__file__).parent / "measured.md"
ENGINES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sglang": (("srt/managers", "srt/disaggregation"), ("managers/scheduler.py:Scheduler",)),
    "vllm": (("v1/core", "v1/engine"), ("core/sched/scheduler.py:Scheduler",)),
    "transformers": (
        ("generation/continuous_batching",),
        ("ContinuousBatchingManager", "ContinuousBatchProcessor", "Scheduler"),
    ),
}
"""Per engine, the folders that are read and the hosts that are measured."""
PART_COLUMNS = ("reads", "rebinds", "mutates", "calls", "invokes", "deletes")
PLAN_COLUMNS = ("facts", "read late", "written", "methods", "properties", "unknown")
KINDS = ("read", "rebind", "mutate", "call", "invoke", "delete")
NEEDS = ("fact", "late", "written", "method", "property", "unknown")


def find_engine(name: str) -> Path | None:
    """Return the folder of an installed engine's package, without importing it."""
    spec = find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def render_engine(name: str, package: Path) -> str:
    """Return the tables of an engine."""
    folders, hosts = ENGINES[name]
    files = [file for folder in folders for file in python_files(package / folder)]
    texts = {file.as_posix(): read_text(file) for file in files}
    lines = sum(text.count("\n") for text in texts.values())
    blocks = [f"{len(files)} files, {lines:,} lines, of {', '.join(f'`{folder}`' for folder in folders)}."]
    for host in hosts:
        index = SourceIndex.parse(texts)
        index.find_module = find_module_file
        report = MeasureReport.of(measure_host(index, find_host(index, host)))
        blocks += ["", f"**`{report.measurement.host}`**", "", *_parts(report.measurement)]
        if report.leave_order:
            blocks += ["", *_plans(report.leave_order)]
        blocks += ["", *_facts(report)]
    return "\n".join(blocks)


def written_version(name: str) -> str:
    """Return the version of an engine that the page has measured."""
    found = re.search(rf"^## {name} ([\w.]+)$", PAGE.read_text(), re.MULTILINE | re.IGNORECASE)
    return found[1] if found else ""


def written_section(name: str) -> str:
    """Return the tables of an engine as the page has them."""
    found = re.search(_marks(name), PAGE.read_text(), re.DOTALL)
    return found[2].strip() if found else ""


def _marks(name: str) -> str:
    return rf"(<!-- {name} -->\n)(.*?)(<!-- end -->)"


def _parts(measurement: Measurement) -> Iterator[str]:
    yield from _head("part", "role", "lines", "methods", *PART_COLUMNS, "not certain", "unknown")
    for part in measurement.parts:
        if part.role in ("host", "mixin", "base", "subclass", "component"):
            yield _part_row(f"`{part.name}`", part.role, part.num_lines, [part])
    others = [part for part in measurement.parts if part.role in ("function", "module")]
    if others:
        files = "1 file" if len(others) == 1 else f"{len(others)} files"
        yield _part_row(f"functions in {files}", "function", 0, others)


def _head(*names: str) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield "| --- " * len(names) + "|"


def _part_row(name: str, role: str, num_lines: int, parts: list[Part]) -> str:
    uses = [use for part in parts for use in part.methods]
    accesses = [access for use in uses for access in use.accesses]
    counts = Counter(str(access.kind) for access in accesses)
    doubtful = sum(not access.is_certain for access in accesses)
    unknown = sum(len(use.indirect) for use in uses)
    numbers = [num_lines or "", len(uses), *(counts[kind] for kind in KINDS), doubtful, unknown]
    return f"| {name} | {role} | {' | '.join(map(str, numbers))} |"


def _plans(plans: tuple[LeavePlan, ...]) -> Iterator[str]:
    yield from _head("leaves", "cost", *PLAN_COLUMNS, "own state", "entries", "shared state", "obstacles")
    for plan in plans:
        kinds = Counter(str(need.kind) for need in plan.needs)
        numbers = [plan.cost, *(kinds[kind] for kind in NEEDS)]
        numbers += [len(plan.own_state), len(plan.entries), len(plan.shared_state), len(plan.obstacles)]
        yield f"| `{plan.part}` | {' | '.join(map(str, numbers))} |"


def _facts(report: MeasureReport) -> Iterator[str]:
    measurement = report.measurement
    ways = Counter(reach.how for reach in measurement.reached)
    conditional = sum(step.is_conditional for step in measurement.init_order)
    rows = {
        "names with several definitions": len(measurement.overrides),
        "of them with `super()`": sum(each.calls_super for each in measurement.overrides),
        "methods passed or stored as references": ways["reference"],
        "methods named in `getattr`": ways["getattr"],
        "methods named in other strings": ways["string"],
        "attributes that the constructor binds": len(measurement.init_order),
        "of them in a branch": conditional,
        "used before they are bound": len(measurement.read_before_bound),
        "groups of methods that belong together": len(report.groups),
    }
    yield from _head("measured", "number")
    yield from (f"| {name} | {number} |" for name, number in rows.items())


def main(names: list[str]) -> int:
    """Write the sections of the named engines, or of all that are installed."""
    for name in names or ENGINES:
        package = find_engine(name) if name in ENGINES else None
        if package is None:
            sys.stderr.write(f"{name} is not installed here, or not one of {', '.join(ENGINES)}\n")
            if names:
                return 2
            continue
        tables = render_engine(name, package)
        text = re.sub(
            _marks(name),
            lambda found, new=tables: f"{found[1]}\n{new}\n\n{found[3]}",
            PAGE.read_text(),
            flags=re.DOTALL,
        )
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
