"""Step 3 as a program: ``python docs/refactor/move.py FOLDER`` moves the bodies of all mixins below a folder.

A move that a program makes can be made again, on a branch that began before it (see "Branches in flight" in the guide).
This one relies on the shape that step 2 gave the code: a component is above its mixin, every method of the mixin is
static, and no other name ends in ``Mixin``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["move"]

RENAMED = {"kv_events_mixin": "kv_events", "load_mixin": "load", "metrics_mixin": "metrics", "output_mixin": "results"}


def move(folder: Path) -> None:
    """Move in every file, then rename the files."""
    for file in sorted(folder.rglob("*.py")):
        file.write_text(_moved(file.read_text()))
        file.rename(file.with_stem(RENAMED.get(file.stem, file.stem)))


def _moved(text: str) -> str:
    # Without its first lines, what the mixin holds belongs to the component above.
    text = re.sub(r'\n\nclass \w+Mixin:\n    """.*"""\n', "", text)
    text = re.sub(r"    @staticmethod\n    def (\w+)\(self: \w+", r"    def \1(self", text)
    # XMixin.method(self.x, argument) -> self.x.method(argument); a lambda that does only this -> self.x.method
    text = re.sub(r"lambda: \w+Mixin\.(\w+)\(([\w.]+)\)", r"\2.\1", text)
    text = re.sub(r"\b\w+Mixin\.(\w+)\(([\w.]+)(?:, )?", r"\2.\1(", text)
    return re.sub(r"^from \.(\w+_mixin) import (.+)$", _new_import, text, flags=re.MULTILINE)


def _new_import(old: re.Match[str]) -> str:
    names = [name for name in old[2].split(", ") if not name.endswith("Mixin")]
    return f"from .{RENAMED[old[1]]} import {', '.join(names)}"


if __name__ == "__main__":
    move(Path(sys.argv[1]))
