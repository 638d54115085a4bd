"""A mixin of the real SGLang becomes a component in a copy: it imports, and an engine on a CPU has the same output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with SGLang")
pytest.importorskip("libcst", reason="the extra `refactor`")

from scheduler_refactor.apply import apply_step
from scheduler_refactor.plan import MovePlanner
from scheduler_refactor.recipe import Accepted
from scheduler_refactor.source_tree import read_folder, write_changes

pytestmark = [pytest.mark.engine, pytest.mark.engines_only, pytest.mark.processes]

MIXINS = {"SchedulerDllmMixin": "dllm", "SchedulerMultiplexMixin": "multiplex"}
ACCEPTED = [Accepted(rule="decorator", name="torch.inference_mode", why="It looks at no attribute.")]
SERVE = """
import random, sys

def main():
    import sglang.srt.managers.scheduler as module
    from sglang.srt.entrypoints.engine import Engine
    print("bases", *(base.__name__ for base in module.Scheduler.__bases__))
    engine = Engine(model_path=sys.argv[1], device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
        disable_overlap_schedule=True, disable_cuda_graph=True, skip_tokenizer_init=True, mem_fraction_static=0.3,
        max_total_tokens=2048, page_size=16, dtype="float32", log_level="error")
    draw = random.Random(3)
    shared = [draw.randrange(3, 1000) for _ in range(200)]
    prompts = [shared[: draw.randrange(200)] + [draw.randrange(3, 1000) for _ in range(50)] for _ in range(16)]
    made = engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 24})
    print("tokens", *(token for each in made for token in each["output_ids"]))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent folder of a copy of SGLang in which two mixins have become components."""
    import sglang

    folder = tmp_path_factory.mktemp("moved")
    package = Path(sglang.__path__[0])
    shutil.copytree(package, folder / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    tree = read_folder(folder, ["sglang/srt"])
    first = tree
    for mixin, attribute in MIXINS.items():
        planner = MovePlanner(
            tree=tree,
            host="managers/scheduler.py:Scheduler",
            mixin=mixin,
            component=attribute.title(),
            attribute=attribute,
        )
        planner.tree = apply_step(tree, planner.prepare())
        tree = apply_step(planner.tree, planner.move(accepted=ACCEPTED))
    assert len(write_changes(folder, first, tree)) == 1 + len(MIXINS)
    return folder


def serve(model: Path, folder: Path, *first: Path) -> dict[str, list[str]]:
    script = folder / "serve.py"
    script.write_text(SERVE)
    path = os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(script), str(model)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    return {words[0]: words[1:] for words in lines if words and words[0] in ("bases", "tokens")}


@pytest.mark.timeout(1_500)
def test_an_engine_with_the_moved_mixins_has_the_same_output(tiny_llama: Path, moved: Path, tmp_path: Path) -> None:
    before = serve(tiny_llama, tmp_path)
    after = serve(tiny_llama, tmp_path, moved)
    assert [base for base in before["bases"] if base not in MIXINS] == after["bases"]
    assert len(after["bases"]) + len(MIXINS) == len(before["bases"])
    assert after["tokens"] == before["tokens"]
    assert len(after["tokens"]) == 16 * 24
