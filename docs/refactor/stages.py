"""The stages of the guide. The guide keeps ``stage_0_mixins``. Each later stage is the one before it with a patch.

``python docs/refactor/stages.py write FOLDER`` writes all stages into a folder, to read, compare and change them.
``python docs/refactor/stages.py record FOLDER`` copies the first and the last stage from there into the guide, and
writes the patch of each step. The text at the head of each patch stays.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree
from subprocess import run
from tempfile import TemporaryDirectory

__all__ = ["GUIDE", "PATCHES", "STAGES", "GuideError", "record_steps", "write_stages"]

GUIDE = Path(__file__).parent
PATCHES = tuple(sorted(GUIDE.glob("step_*.patch")))
STAGES = ("stage_0_mixins", *(patch.stem.replace("step", "stage") for patch in PATCHES))
_NOT_SOURCE = ignore_patterns("__pycache__")


class GuideError(Exception):
    """The steps do not lead from the first stage to the last one."""


def write_stages(folder: Path, guide: Path = GUIDE) -> None:
    """Write every stage of the guide below an empty folder.

    Raises:
        GuideError: a patch does not apply, or the last stage is not the one that is kept.
    """
    copytree(guide / STAGES[0], folder / STAGES[0], ignore=_NOT_SOURCE)
    for patch, before, after in zip(PATCHES, STAGES, STAGES[1:], strict=False):
        copytree(folder / before, folder / after)
        _git(folder / after, "apply", str(guide / patch.name))
    reached, kept = _source(folder / STAGES[-1]), _source(guide / STAGES[-1])
    if reached != kept:
        different = sorted(name for name in reached | kept if reached.get(name) != kept.get(name))
        raise GuideError(f"{PATCHES[-1].name} does not lead to {STAGES[-1]}: {', '.join(different)} differ")


def record_steps(folder: Path, guide: Path = GUIDE) -> None:
    """Record the stages below ``folder`` in the guide."""
    for patch, before, after in zip(PATCHES, STAGES, STAGES[1:], strict=False):
        words = patch.read_text().partition("diff --git ")[0]
        (guide / patch.name).write_text(words + _difference(folder / before, folder / after))
    for stage in (STAGES[0], STAGES[-1]):
        rmtree(guide / stage, ignore_errors=True)
        copytree(folder / stage, guide / stage, ignore=_NOT_SOURCE)


def _difference(before: Path, after: Path) -> str:
    """Return the difference as git writes it, without hashes, with renames, and with deleted files last."""
    with TemporaryDirectory() as temporary:
        work = Path(temporary) / "work"
        copytree(before, work, ignore=_NOT_SOURCE)
        _git(work, "init", "--quiet")
        _git(work, "add", "--all")
        tree = _git(work, "write-tree").strip()
        for file in work.glob("*.py"):
            file.unlink()
        copytree(after, work, ignore=_NOT_SOURCE, dirs_exist_ok=True)
        _git(work, "add", "--all")
        written = _git(work, "diff", "--cached", "--find-renames", "--unified=3", tree)
    written = re.sub(r"^index .*\n", "", written, flags=re.MULTILINE)
    files = re.split(r"^(?=diff --git )", written, flags=re.MULTILINE)
    return "".join(sorted(files, key=lambda file: "\ndeleted file mode" in file))


def _source(stage: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in stage.glob("*.py")}


def _git(folder: Path, *arguments: str) -> str:
    """Run git without any configuration, and without a repository around the folder."""
    around = {"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", *arguments]
    ran = run(command, cwd=folder, env=around | plain, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise GuideError(f"git {' '.join(arguments)} in {folder.name}: {ran.stderr.strip()}")
    return ran.stdout


def main(arguments: list[str]) -> int:
    """Run the command of the command line."""
    verbs = {"write": write_stages, "record": record_steps}
    if len(arguments) != 2 or arguments[0] not in verbs:
        sys.stderr.write(__doc__ or "")
        return 2
    try:
        verbs[arguments[0]](Path(arguments[1]))
    except (GuideError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
