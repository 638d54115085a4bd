"""Write the results, plots and tables of docs/explanation/policies.md; without TRACE from the stored results."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.measure import count_argument
from benchmarks.studies.policies.cases import FACTORS
from benchmarks.studies.policies.page import broken_findings, with_blocks
from benchmarks.studies.policies.plots import PLOTS, draw
from benchmarks.studies.policies.study import Done, Study, decode_study, encode_study, run_study
from scheduler_components import ConfigError
from scheduler_components._internal.extras import require_modules
from scheduler_components.errors import ComponentError
from scheduler_engine.simulation import check_trace

FOLDER = Path(__file__).parents[3] / "docs" / "explanation" / "policies"
RESULTS = "results.json"
NUM_REQUESTS = 1000


def main() -> int:
    """Run the study and write its results, plots and tables; return 2 for invalid arguments."""
    options = _parser().parse_args()
    try:
        return _write(options)
    except ComponentError as error:
        print(error, file=sys.stderr)
        return 2


def _write(options: argparse.Namespace) -> int:
    folder: Path = options.out
    require_modules("matplotlib", otherwise="leave the study to a machine that has it")
    _check_folder(folder)
    if options.trace is None:
        study = decode_study(_read(folder / RESULTS))
    else:
        check_trace(options.trace, limit=options.requests)
        study = run_study(
            options.trace,
            num_requests=options.requests,
            kept=_kept(folder, options.only),
            processes=options.processes,
            on_done=_show_progress,
        )
        (folder / RESULTS).write_bytes(encode_study(study))
        study = decode_study(encode_study(study))  # in the order of the file, as a later run without a trace reads it
    for name in PLOTS:
        (folder / f"{name}.svg").write_text(draw(name, study))
    page = folder.with_suffix(".md")
    if page.exists():
        page.write_text(with_blocks(page.read_text(), study))
        for name in broken_findings(page.read_text(), study):
            print(f"{name}: the results do not show this any more; write its text again", file=sys.stderr)
    return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            "trace", None, "is missing, and no results are stored", f"give a trace, not only {path}"
        ) from error


def _kept(folder: Path, only: Sequence[str] | None) -> Study | None:
    """Return the stored study, with only the runs of the factors that are not run again."""
    if only is None:
        return None
    stored = decode_study(_read(folder / RESULTS))
    return msgspec.structs.replace(stored, runs=[run for run in stored.runs if run.factor not in only])


def _check_folder(folder: Path) -> None:
    """Check before the runs that the results can be written.

    Raises:
        ConfigError: they cannot.
    """
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        hint = "name a folder that you may write to, in an existing one"
        raise ConfigError("out", str(folder), error.strerror or str(error), hint) from error


def _show_progress(done: Done) -> None:
    print(f"{done.number} of {done.num_runs}, {done.seconds:.1f} s: {done.title}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.policies", description=__doc__)
    parser.add_argument(
        "trace", type=Path, nargs="?", help="a file of Mooncake's JSON lines; without it nothing is run"
    )
    parser.add_argument(
        "--requests", type=count_argument, default=NUM_REQUESTS, help="first requests of each workload (1000)"
    )
    parser.add_argument("--processes", type=count_argument, default=1, help="processes that run cases (1)")
    parser.add_argument(
        "--only",
        action="append",
        choices=[factor.name for factor in FACTORS],
        help="run this factor, and keep the stored results of the others; may be repeated",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of results and plots (that of the page)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
