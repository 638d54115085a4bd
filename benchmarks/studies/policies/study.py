"""Run the study, and store its results: one JSON file with one line per run."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec

from benchmarks.studies.policies.cases import STANDARD, Case, Setting, make_cases
from benchmarks.studies.policies.serving import run_case
from benchmarks.studies.policies.workloads import WorkloadFacts, describe, make_workload
from scheduler_components.errors import ConfigError
from scheduler_engine.simulation import TraceRequest

_Settings = dict[str, int | float | str]


class RunResult(msgspec.Struct, frozen=True):
    """One run: its factor, what distinguishes it there, what else is not standard, and its figures."""

    factor: str
    varied: _Settings
    fixed: _Settings
    figures: dict[str, float]


class Study(msgspec.Struct, frozen=True):
    """All runs, in the order of the page.

    Attributes:
        python: major and minor version that made it.
        standard: settings that runs on replicas begin with.
        workloads: sizes by name.
        runs: results.
    """

    python: str
    standard: _Settings
    workloads: dict[str, WorkloadFacts]
    runs: list[RunResult]

    def of(self, factor: str, **varied: Setting) -> list[RunResult]:
        """Return the runs of a factor that have these settings."""
        return [run for run in self.runs if run.factor == factor and varied.items() <= run.varied.items()]

    def pick(self, factor: str, **varied: Setting) -> dict[str, float]:
        """Return the figures of the only run of a factor that has these settings.

        Raises:
            LookupError: there is no such run, or several.
        """
        found = self.of(factor, **varied)
        if len(found) != 1:
            raise LookupError(f"{len(found)} runs of {factor} have {varied}")
        return found[0].figures


class Done(msgspec.Struct, frozen=True):
    """A run has ended. ``seconds`` are those of the machine, and no part of the results."""

    title: str
    number: int
    num_runs: int
    seconds: float


def run_study(
    trace: Path,
    *,
    num_requests: int,
    cases: Sequence[Case] | None = None,
    kept: Study | None = None,
    processes: int = 1,
    on_done: Callable[[Done], None] | None = None,
) -> Study:
    """Run all cases, those with equal settings once. The results do not depend on the number of processes.

    Args:
        trace: a file in Mooncake's format.
        num_requests: the first requests of each workload.
        cases: what to run; by default the whole study.
        kept: stored results, with only those runs that are not run again.
        processes: that run cases; 1 runs them in this process.
        on_done: called after each run.

    Raises:
        ConfigError: the trace cannot be read, a line is wrong, or the kept results are of another Python, of other
            standard settings or of other workloads.
    """
    cases = make_cases() if cases is None else cases
    names = dict.fromkeys(case.workload for case in cases if case.workload is not None)
    workloads = {name: make_workload(name, trace=trace, num_requests=num_requests) for name in names}
    study = Study(
        python=".".join(platform.python_version_tuple()[:2]),
        standard=dict(STANDARD),
        workloads={name: describe(requests) for name, requests in workloads.items()},
        runs=[],
    )
    if kept is not None:
        _check_kept(kept, study)
    results = _results_of(cases, () if kept is None else kept.runs)
    missing = list({_settings_key(case): case for case in cases if _settings_key(case) not in results}.values())
    measured = _measure(missing, workloads, num_requests, processes)
    for number, (case, (figures, seconds)) in enumerate(zip(missing, measured, strict=True), start=1):
        results[_settings_key(case)] = figures
        if on_done is not None:
            on_done(Done(case.title, number, len(missing), seconds))
    runs = [RunResult(case.factor, case.varied, case.fixed, results[_settings_key(case)]) for case in cases]
    return msgspec.structs.replace(study, runs=runs)


def _check_kept(kept: Study, study: Study) -> None:
    """Check that stored results were made under the same conditions."""
    for name in ("python", "standard", "workloads"):
        if getattr(kept, name) != getattr(study, name):
            hint = "run all factors, or take the same trace, number of requests and Python"
            raise ConfigError("only", name, "differs from that of the stored results", hint)


def _results_of(cases: Iterable[Case], kept: Iterable[RunResult]) -> dict[bytes, dict[str, float]]:
    """Return the kept figures by all settings of a run."""
    figures = {_name_key(run): run.figures for run in kept}
    return {_settings_key(case): figures[_name_key(case)] for case in cases if _name_key(case) in figures}


def _name_key(run: Case | RunResult) -> bytes:
    return msgspec.json.encode((run.factor, run.varied, run.fixed), order="deterministic")


def _settings_key(case: Case) -> bytes:
    return msgspec.json.encode(case.settings, order="deterministic")


_Workloads = Mapping[str, Sequence[TraceRequest]]
_Job = tuple[Case, Sequence[TraceRequest], int]


def _measure(
    cases: Iterable[Case], workloads: _Workloads, num_requests: int, processes: int
) -> Iterator[tuple[dict[str, float], float]]:
    """Yield the figures and the wall time of each case, in order."""
    jobs = [(case, workloads.get(case.workload or "", ()), num_requests) for case in cases]
    if processes == 1:
        yield from map(_run, jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_run, jobs)


def _run(job: _Job) -> tuple[dict[str, float], float]:
    case, requests, num_requests = job
    begun_s = time.perf_counter()
    figures = run_case(case, requests, most_requests=num_requests)
    return figures, time.perf_counter() - begun_s


def encode_study(study: Study) -> bytes:
    """Return the study as JSON, one line per run. Equal studies give equal bytes."""
    encode = msgspec.json.Encoder(order="deterministic").encode
    head = encode(msgspec.structs.replace(study, runs=[]))
    before, mark, after = head.partition(b'"runs":[')
    return before + mark + b"\n" + b",\n".join(map(encode, study.runs)) + b"\n" + after + b"\n"


def decode_study(data: bytes) -> Study:
    """Return a stored study.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        return msgspec.json.decode(data, type=Study)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("results", None, f"are damaged: {error}", "run the whole study again") from error
