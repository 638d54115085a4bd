"""Each stage of the refactor has fewer type errors than the one before. ``make types`` runs this file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stages import GUIDE, STAGES

pytestmark = [pytest.mark.types, pytest.mark.processes]

TYPE_ERRORS = {
    "stage_0_mixins": {"misc", "type-arg"},  # misc: a mixin's `self` is annotated as its host
    "stage_1_explicit": {"misc", "type-arg"},
    "stage_2_prepared": {"misc", "type-arg"},
    "stage_3_moved": {"type-arg"},
    "stage_4_ports": set(),
    "stage_5_composed": set(),
    "stage_6_policies": set(),
}


@pytest.fixture(scope="module")
def type_errors(written: Path) -> dict[str, set[str]]:
    """Check all stages in one run of mypy, over the cache of ``make types``; return the error codes of each."""
    root = GUIDE.parent.parent
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), "--no-color-output"]
    environment = {
        **os.environ,
        "MYPYPATH": f"{GUIDE}{os.pathsep}{root}",
        "MYPY_CACHE_DIR": str(root / ".mypy_cache"),
    }
    ran = subprocess.run(
        [*command, *STAGES], capture_output=True, text=True, check=False, cwd=written, env=environment, timeout=360
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    codes: dict[str, set[str]] = {stage: set() for stage in STAGES}
    for path, code in re.findall(r"^([^:]+):\d+: error: .*\[([a-z-]+)\]$", ran.stdout, re.MULTILINE):
        codes[Path(path).parts[0]].add(code)
    return codes


@pytest.mark.timeout(400)  # an empty cache is filled first
@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_has_fewer_type_errors(stage: str, type_errors: dict[str, set[str]]) -> None:
    assert type_errors[stage] == TYPE_ERRORS[stage]
