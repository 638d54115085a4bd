"""Play one workload on the stages: ``python docs/refactor/run.py [stage ...]``; without names on all of them.

Prints what came out of each and what the checker says of it. Exit code 1 when two stages differ.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from importlib import import_module
from pathlib import Path

from scheduler_components.component_lint.file_lint import lint_paths
from scheduler_components.parallel_state import ParallelState
from serving_parts.batching import Settings
from serving_parts.play import Abort, Action, Record, Steps, Submit, play

HERE = Path(__file__).parent
STAGES = tuple(sorted(folder.name for folder in HERE.glob("stage_*")))
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
    """Play, print one line a stage, compare."""
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        sys.stderr.write(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}\n")
        return 2
    records = []
    for stage in stages or STAGES:
        record = play_stage(stage)
        records.append(record)
        said = b"".join([record.tape, *record.loads, *record.metrics, repr(record.outputs).encode()])
        smells = len(lint_paths([HERE / stage]).findings)
        sys.stdout.write(
            f"{stage:18} {len(record.tape):6} bytes of events  {len(record.outputs):4} outputs  "
            f"all it said: {sha256(said).hexdigest()[:12]}  smells: {smells}\n"
        )
    return 0 if all(record == records[0] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
