"""The command ``scheduler-components hicache-sim``: why a hierarchical cache agrees over CP x TP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer

from scheduler_components.errors import StartError
from scheduler_components.reference.divergence_picture import Curve, divergence_svg
from scheduler_components.reference.hicache_sim import Run, Scope, SimulationConfig, run_simulation

__all__ = ["hicache_sim", "report_of"]

_NUM_SAMPLES = 100


def hicache_sim(
    attn_cp_size: Annotated[int, typer.Option(min=1, help="Ranks along attention context parallelism.")] = 2,
    attn_tp_size: Annotated[int, typer.Option(min=1, help="Ranks along attention tensor parallelism.")] = 2,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 20,
    steps: Annotated[int, typer.Option(min=_NUM_SAMPLES, help="Steps a run.")] = 500,
    picture: Annotated[Path | None, typer.Option(help="Write a picture of it (SVG).")] = None,
) -> int:
    """Show that ranks whose I/O differs part when they agree over TP alone, and never when over CP x TP.

    Exit code 1 when ranks that agree over CP x TP part.
    """
    runs: dict[Scope, list[Run]] = {}
    sample_steps = steps // _NUM_SAMPLES
    for scope in get_args(Scope):
        config = SimulationConfig(attn_cp_size=attn_cp_size, attn_tp_size=attn_tp_size, scope=scope)
        runs[scope] = run_simulation(config, seeds=range(seeds), num_steps=steps, sample_steps=sample_steps)
        for line in report_of(scope, runs[scope], num_steps=steps):
            typer.echo(line)
    if picture is not None:
        _draw(picture, runs, sample_steps, f"CP {attn_cp_size} x TP {attn_tp_size} ranks")
        typer.echo(f"picture: {picture}")
    return int(any(run.parted_at is not None for run in runs["cp x tp"]))


def report_of(scope: Scope, runs: Sequence[Run], *, num_steps: int) -> Iterator[str]:
    """Lines that say what came of runs of one kind."""
    parted = sorted(run.parted_at for run in runs if run.parted_at is not None)
    served = sum(run.num_served for run in runs)
    yield f"agreement over {scope.upper()}: {len(runs)} runs of {num_steps} steps, {served:,} requests served"
    if not parted:
        yield "  ranks never parted"
        return
    differing = sum(run.differing_pages[-1] for run in runs) / len(runs)
    yield (
        f"  ranks parted in {len(parted)} of {len(runs)} runs, after {parted[0]} to {parted[-1]} steps, "
        f"{parted[len(parted) // 2]} at the median"
    )
    yield f"  at the end {differing:.1f} device pages a run were held by some ranks and not by others"
    yield "  first step at which they differed, by seed: " + " ".join(
        "never" if run.parted_at is None else str(run.parted_at) for run in runs
    )


def _draw(path: Path, runs: dict[Scope, list[Run]], sample_steps: int, ranks: str) -> None:
    curves = {
        f"agreement over {scope.upper()}": Curve(tuple(tuple(run.differing_pages) for run in of_scope))
        for scope, of_scope in runs.items()
    }
    svg = divergence_svg(
        curves,
        sample_steps=sample_steps,
        title=f"Pages that some ranks of a replica hold and others do not ({ranks})",
        unit="differing pages on the device",
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg)
    except OSError as error:
        raise StartError(str(path), str(error), "give a file that can be written") from error
