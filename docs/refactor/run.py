"""Play one workload on the stages: ``python docs/refactor/run.py [stage ...]``; without names on all of them.

Prints what came out of each and what the checker says of it. Exit code 1 when two stages differ, or when the steps do
not lead from the first stage to the last one. The first difference is then on standard error.
"""

from __future__ import annotations

import ast
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from scheduler_refactor import Recording, first_difference, play
from scheduler_refactor.component_lint import ComponentChecker

from serving_parts.harness import Abort, Steps, Submit, Workload, harness, stage_tree
from stages import STAGES, GuideError, write_stages

WORKLOAD = Workload(
    (
        *(Submit(topic=0, num_shared=20, num_own=own, max_new_tokens=12) for own in (4, 9, 1)),
        Steps(count=4, seconds=0.1),
        Submit(topic=1, num_shared=9, num_own=3, max_new_tokens=30),
        Abort(place=1),
        Steps(count=6, seconds=0.5),
        *(Submit(topic=topic, num_shared=20, num_own=20, max_new_tokens=20) for topic in (0, 2, 2)),
    )
)


def main(stages: list[str]) -> int:
    """Write the stages, play on each, print one line per stage, and compare the recordings."""
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
        first, *others = [(stage, report(Path(folder) / stage)) for stage in stages or STAGES]
    status = 0
    for stage, recording in others:
        if (found := first_difference(first[1], recording, harness.exits)) is not None:
            sys.stderr.write(f"{first[0]} and {stage} differ: {found}\n")
            status = 1
    return status


def report(stage: Path) -> Recording:
    """Play the workload on a stage and print its output."""
    recording = play(harness, stage_tree(stage), WORKLOAD)
    payloads = {name: [each.payload for each in recording.emissions if each.exit == name] for name in harness.exits}
    trees = [ast.parse(path.read_text()) for path in stage.glob("*.py")]
    num_problems = sum(len(list(ComponentChecker(tree).run())) for tree in trees)
    sys.stdout.write(
        f"{stage.name:18} {sum(map(len, payloads['events'])):6} bytes of events  {len(payloads['outputs']):4} outputs  "
        f"all it said: {sha256(msgspec.msgpack.encode(recording)).hexdigest()[:12]}  problems: {num_problems}\n"
    )
    return recording


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
