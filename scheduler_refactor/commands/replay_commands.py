"""The commands ``refactor record`` and ``refactor replay``: compare two versions of a scheduler on workloads.

They run the code that they are given: the harness, and the versions that it opens.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, cast

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from scheduler_components import ConfigError
from scheduler_refactor import Coverage, Difference, Harness, ModuleTree, parse_tree, replay_recordings
from scheduler_refactor.commands.output import print_lines
from scheduler_refactor.recording import read_recordings, write_recordings

HarnessFile = Annotated[Path, Parameter(help="Python file that defines `harness`. It is run.")]
Version = Annotated[str, Parameter(help="Folder with the packages of a version, or NAME=FOLDER for one. It is run.")]
Count = Annotated[int, Parameter(validator=Number(gte=1), help="Generated workloads.")]
KeepModules = Annotated[
    bool, Parameter(show_default=False, help="Import each version once, not once per workload: its globals keep state.")
]


_MEMBERS = ("exits", "targets", "workload_type", "workloads", "play")


def record(
    harness: HarnessFile, version: Version, file: Path, /, *, workloads: Count = 100, keep_modules: KeepModules = False
) -> int:
    """Play generated workloads on a version of a scheduler, and write everything that leaves it to a file.

    The exit code is 1 if an exit stayed silent or no workload reached a target.
    """
    from scheduler_refactor.workload_search import record_workloads

    loaded, tree = load_harness(harness), parse_tree(version)
    played, recordings = record_workloads(loaded, tree, count=workloads, fresh=not keep_modules)
    write_recordings(file, played, recordings)
    coverage = Coverage()
    for recording in recordings:
        coverage.add(recording)
    return _report(loaded, coverage, None)


def replay(
    harness: HarnessFile,
    version: Version,
    /,
    *,
    recording: Annotated[Path | None, Parameter(help="File of `refactor record`.")] = None,
    old: Annotated[str | None, Parameter(help="Another version to compare with, instead of a file.")] = None,
    workloads: Count = 100,
    keep_modules: KeepModules = False,
) -> int:
    """Play workloads on a version of a scheduler, and name the first difference to a recording or another version.

    The exit code is 1 if there is a difference, if an exit stayed silent, or if no workload reached a target.
    """
    loaded, tree = load_harness(harness), parse_tree(version)
    if recording is not None and old is None:
        file = read_recordings(recording)
        coverage = Coverage()
        for each in file.recordings:
            coverage.add(each)
        return _report(loaded, coverage, replay_recordings(loaded, tree, file, fresh=not keep_modules))
    if old is None or recording is not None:
        raise ConfigError("old", old, "leaves open what to compare with", "give either --recording or --old")
    return _search(loaded, parse_tree(old), tree, workloads, fresh=not keep_modules)


def _search(harness: Harness[object], old: ModuleTree, new: ModuleTree, count: int, *, fresh: bool) -> int:
    from scheduler_refactor.workload_search import find_difference

    coverage, found = find_difference(harness, old, new, count=count, fresh=fresh)
    if found is None:
        return _report(harness, coverage, None)
    print_lines((f"workload: {msgspec.json.encode(found.workload).decode()}",))
    return _report(harness, coverage, found.difference)


def load_harness(file: Path) -> Harness[object]:
    """Run a file and return its `harness`. Errors of the file's own code pass unchanged, with their traceback.

    Raises:
        ConfigError: it is no Python file, or it defines no harness.
    """
    spec = spec_from_file_location("refactor_harness", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError("harness", str(file), "is no Python file", "give the file that defines `harness`")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where annotations of its workloads are resolved
    spec.loader.exec_module(module)
    harness = getattr(module, "harness", None)
    if missing := [name for name in _MEMBERS if not hasattr(harness, name)]:
        hint = "define `harness = MyHarness()` at its end"
        raise ConfigError("harness", str(file), f"defines no `harness` with {missing[0]!r}", hint)
    return cast("Harness[object]", harness)


def _report(harness: Harness[object], coverage: Coverage, difference: Difference | None) -> int:
    print_lines(coverage.lines())
    missing = coverage.missing(list(harness.exits), harness.targets)
    print_lines(missing)
    print_lines(("no difference" if difference is None else f"difference: {difference}",))
    return int(difference is not None or bool(missing))
