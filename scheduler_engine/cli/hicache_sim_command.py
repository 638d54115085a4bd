"""The command ``simulate ranks``: show where and when ranks diverge that do not agree on everything."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import attrs
from cyclopts import Parameter
from cyclopts.validators import Number

from scheduler_components import ConfigError, StartError
from scheduler_components._internal.extras import require_modules
from scheduler_components.agreement.decision_log import describe_divergence
from scheduler_components.hicache import HiCachePolicy
from scheduler_engine.cli.run_reporter import print_lines
from scheduler_engine.device.hicache_sim import (
    AgreementName,
    AgreementScope,
    FaultRates,
    HiCacheSimulationConfig,
    SimulationRun,
    run_simulation,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_SAMPLES = 100
_PROGRESS_EVERY_S = 10.0
_BUSY = HiCachePolicy(prefetch="timeout", prefetch_timeout_s=3.0, prefetch_threshold_pages=2)
_HARSH = FaultRates(max_latency_steps=10, failure=0.1, no_host_page=0.1, no_load_room=0.3, storage_outage=0.001)
"""With these every agreement is needed: ``tests/agreement/test_proposals_replica.py`` checks it."""

_COLOURS = ("#c2410c", "#a16207", "#1d4ed8")  # the last is for the full agreement

Count = Annotated[int, Parameter(validator=Number(gte=1))]


def hicache_sim(
    *,
    attn_cp_size: Annotated[
        int, Parameter(validator=Number(gte=1), help="Ranks along attention context parallelism.")
    ] = 2,
    attn_tp_size: Annotated[
        int, Parameter(validator=Number(gte=1), help="Ranks along attention tensor parallelism.")
    ] = 2,
    pp_size: Annotated[int, Parameter(validator=Number(gte=1), help="Pipeline stages.")] = 1,
    seeds: Annotated[int, Parameter(validator=Number(gte=1), help="Runs per scope of agreement.")] = 20,
    steps: Annotated[int, Parameter(validator=Number(gte=_NUM_SAMPLES), help="Steps per run.")] = 500,
    without: Annotated[
        AgreementName | None, Parameter(help="Remove one agreement: each rank takes its own value instead.")
    ] = None,
    picture: Annotated[Path | None, Parameter(help="Write a plot to this file (SVG).")] = None,
) -> int:
    """Simulate ranks that agree over TP only and diverge, and over CP x TP (x PP) and never diverge.

    With --without, they agree over all ranks, but not about one thing. The report names the first decision that
    differed, as DecisionLog reports it. The exit code is 1 if ranks diverge in spite of the full agreement.
    """
    ranks = HiCacheSimulationConfig(attn_cp_size=attn_cp_size, attn_tp_size=attn_tp_size, pp_size=pp_size)
    if without is not None:
        if picture is not None:
            raise ConfigError("picture", str(picture), "shows scopes of agreement", "leave it out with --without")
        _simulate_without(attrs.evolve(ranks, without=without, policy=_BUSY, rates=_HARSH), seeds, steps)
        return 0
    figure = _new_figure() if picture is not None else None  # fails before the simulation takes a minute
    runs: dict[AgreementScope, list[SimulationRun]] = {}
    sample_steps = steps // _NUM_SAMPLES
    progress = RunProgress(out=sys.stderr, num_runs=seeds * len(ranks.scopes))
    for scope in ranks.scopes:
        config = attrs.evolve(ranks, scope=scope)
        runs[scope] = []
        for seed in range(seeds):
            runs[scope] += run_simulation(config, seeds=[seed], num_steps=steps, sample_steps=sample_steps)
            progress.ran()
        progress.clear()
        print_lines(report_of(scope, runs[scope], num_steps=steps))
    if picture is not None and figure is not None:
        sizes = f"CP {attn_cp_size} x TP {attn_tp_size}" + (f" x PP {pp_size}" if pp_size > 1 else "")
        title = f"Pages that some ranks of a replica hold and others do not ({sizes} ranks)"
        draw_divergence(figure, runs, sample_steps=sample_steps, title=title)
        _write(figure, picture)
        print_lines((f"picture: {picture}",))
    return int(any(run.diverged_at_step is not None for run in runs[ranks.scopes[-1]]))


def _simulate_without(config: HiCacheSimulationConfig, seeds: int, steps: int) -> None:
    progress, runs = RunProgress(out=sys.stderr, num_runs=seeds), list[SimulationRun]()
    for seed in range(seeds):
        runs += run_simulation(config, seeds=[seed], num_steps=steps, sample_steps=steps)
        progress.ran()
    progress.clear()
    print_lines(report_without(str(config.without), runs, num_steps=steps))


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """Prints how many runs are done: on a single line of a terminal, otherwise a line every ten seconds.

    Attributes:
        out: standard error, so that standard output contains only the report.
        num_runs: total number of runs.
        clock: monotonic seconds.
    """

    out: TextIO
    num_runs: int
    clock: Callable[[], float] = time.monotonic
    _num_done: int = 0
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = self.clock() + _PROGRESS_EVERY_S

    def ran(self) -> None:
        """Count a finished run."""
        self._num_done += 1
        text = f"{self._num_done} of {self.num_runs} runs done"
        if self.out.isatty():
            self._write(f"\r{text}")
        elif (now_s := self.clock()) >= self._next_s:
            self._next_s = now_s + _PROGRESS_EVERY_S
            self._write(f"{text}\n")

    def clear(self) -> None:
        """Clear the line for other text."""
        if self.out.isatty():
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


def report_of(scope: AgreementScope, runs: Sequence[SimulationRun], *, num_steps: int) -> Iterator[str]:
    """Yield the lines of the report on the runs of one scope."""
    diverged = sorted(run.diverged_at_step for run in runs if run.diverged_at_step is not None)
    served = sum(run.num_served for run in runs)
    yield f"agreement over {scope.upper()}: {len(runs)} runs of {num_steps} steps, {served:,} requests served"
    if not diverged:
        yield "  ranks never diverged"
        return
    differing = sum(run.differing_pages[-1] for run in runs) / len(runs)
    yield (
        f"  ranks diverged in {len(diverged)} of {len(runs)} runs, after {diverged[0]} to {diverged[-1]} steps, "
        f"{diverged[len(diverged) // 2]} at the median"
    )
    yield f"  at the end {differing:.1f} device pages per run were held by some ranks and not by others"
    yield "  first step at which they differed, by seed: " + " ".join(
        "never" if run.diverged_at_step is None else str(run.diverged_at_step) for run in runs
    )
    yield from _first_decision(runs)


def report_without(agreement: str, runs: Sequence[SimulationRun], *, num_steps: int) -> Iterator[str]:
    """Yield the lines of the report on the runs without one agreement."""
    found = [run.first_divergence for run in runs if run.first_divergence is not None]
    yield f"without the agreement {agreement}: {len(runs)} runs of {num_steps} steps, ranks diverged in {len(found)}"
    for run in runs:
        report = run.first_divergence
        yield f"  seed {run.seed}: " + ("the ranks never diverged" if report is None else describe_divergence(report))
        if run.failure:
            yield f"    the run ended by {run.failure}"


def _first_decision(runs: Sequence[SimulationRun]) -> Iterator[str]:
    for run in runs:
        if run.first_divergence is not None:
            yield f"  first decision that differed with seed {run.seed}: {describe_divergence(run.first_divergence)}"
            return


def draw_divergence(
    figure: Figure, runs: Mapping[AgreementScope, Sequence[SimulationRun]], *, sample_steps: int, title: str
) -> None:
    """Plot the number of differing pages over the steps: a thin line per run and a thick line for their mean.

    All lines begin at step 0, where all ranks are empty.

    Args:
        figure: an empty matplotlib figure.
        runs: runs by scope, all with the same number of samples.
        sample_steps: steps between two samples; the first sample is taken after as many steps.
        title: title of the plot.
    """
    axes = figure.subplots()
    for colour, (scope, of_scope) in zip((*_COLOURS[: len(runs) - 1], _COLOURS[-1]), runs.items(), strict=True):
        lines = [(0, *run.differing_pages) for run in of_scope]
        steps = range(0, len(lines[0]) * sample_steps, sample_steps)
        for line in lines:
            axes.plot(steps, line, color=colour, linewidth=0.8, alpha=0.3)
        mean = [sum(values) / len(values) for values in zip(*lines, strict=True)]
        axes.plot(steps, mean, color=colour, linewidth=3, label=f"agreement over {scope.upper()}")
    axes.set(xlabel="step", ylabel="differing pages on the device", xlim=(0, None), ylim=(0, None))
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.legend(frameon=False, loc="upper left")
    axes.grid(axis="y", color="#e5e7eb")
    axes.spines[["top", "right"]].set_visible(False)


def _new_figure() -> Figure:
    require_modules("matplotlib", otherwise="leave --picture out")
    # Imported here because only --picture needs it.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "hicache-sim", "svg.fonttype": "none"})  # the same runs, the same file
    return Figure(figsize=(8, 4), layout="constrained")


def _write(figure: Figure, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise StartError(str(path), str(error), "give a writable file") from error
