"""Play one workload on the stages: ``python docs/refactor/run.py [stage ...]``; without names on all of them.

Prints what came out of each and what the checker says of it. Exit code 1 when two stages differ, or when the patches
do not lead from the first stage to the last one.
"""

from __future__ import annotations

import ast
import sys
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from scheduler_components import ParallelState
from scheduler_components.component_lint import ComponentChecker
from serving_parts.batching import Settings
from serving_parts.play import Abort, Action, Record, Steps, Submit, play
from stages import STAGES, GuideError, write_stages

WORKLOAD: tuple[Action, ...] = (
    *(Submit(topic=0, num_shared=20, num_own=own, max_new_tokens=12) for own in (4, 9, 1)),
    Steps(count=4, seconds=0.1),
    Submit(topic=1, num_shared=9, num_own=3, max_new_tokens=30),
    Abort(place=1),
    Steps(count=6, seconds=0.5),
    *(Submit(topic=topic, num_shared=20, num_own=20, max_new_tokens=20) for topic in (0, 2, 2)),
)


def play_stage(stage: str) -> Record:
    """Play the workload on one stage."""
    opened = import_module(f"{stage}.scheduler").open_scheduler
    return play(opened, WORKLOAD, parallel=ParallelState.trivial(), settings=Settings())


def main(stages: list[str]) -> int:
    """Write the stages, play on each, print one line per stage, and compare the outputs."""
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        sys.stderr.write(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}\n")
        return 2
    with TemporaryDirectory() as folder:
        try:
            write_stages(Path(folder))
        except GuideError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        sys.path.insert(0, folder)
        records = [report(Path(folder) / stage) for stage in stages or STAGES]
    return 0 if all(record == records[0] for record in records) else 1


def report(stage: Path) -> Record:
    """Play the workload on a stage and print its output."""
    record = play_stage(stage.name)
    said = b"".join([record.tape, *record.loads, *record.metrics, repr(record.outputs).encode()])
    trees = [ast.parse(path.read_text()) for path in stage.glob("*.py")]
    num_problems = sum(len(list(ComponentChecker(tree).run())) for tree in trees)
    sys.stdout.write(
        f"{stage.name:18} {len(record.tape):6} bytes of events  {len(record.outputs):4} outputs  "
        f"all it said: {sha256(said).hexdigest()[:12]}  problems: {num_problems}\n"
    )
    return record


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
