"""The list of everything that is broken on purpose in these tests, with the test that finds it.

``PYTHONPATH=.:tests python -m kit.planted_list > before.txt`` prints one line per variant. The same command with
``before.txt`` as its argument prints the lines of that file whose variant no test finds any more, and exits with 1. A
class and a function of the same words count as one name, and a test may move to another file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from kit.planted_bugs import PLANTED
from kit.planted_seeds import FOUND
from kit.planted_traces import catching_test

_TESTS = Path(__file__).parents[1]
_NAMES = ("broken", "wrong", "is_found", "are_found", "is_caught", "is_noticed")


def _words(variant: str) -> str:
    """Return a name as words without the numbers that pytest appends: ``Drops`` and ``drops3`` are equal."""
    return re.sub(r"(?<=[a-z])\d+\b", "", re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", variant).lower())


def _planted_lines() -> list[str]:
    """Return one line per planted bug of the stream's cores."""
    lines = []
    for name in PLANTED:
        finders = [f"{kind} world {seed}: {promise}" for kind, seed, promise in [FOUND[name]]] if name in FOUND else []
        trace = catching_test(name)
        lines.append(f"{_words(name)}\t{'; '.join(finders + ([trace] if trace else []))}")
    return lines


def _collected_lines() -> list[str]:
    """Return one line per test that has the mark ``broken_variants`` or says in its name that it finds something."""
    lines = []
    for test in sorted(_collect("-m", "broken_variants") | _collect("-k", " or ".join(_NAMES))):
        name, _, variant = test.removeprefix("tests/").partition("[")
        lines.append(f"{_words(variant.removesuffix(']') or name.partition('::')[2])}\t{name}")
    return lines


def _collect(*options: str) -> set[str]:
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", *options, str(_TESTS))
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return {line for line in output.splitlines() if line.startswith("tests/") and "::" in line}


def planted_list() -> list[str]:
    """Return the sorted lines ``variant, tab, test``."""
    return sorted(_planted_lines() + _collected_lines())


def _names(line: str) -> set[str]:
    """Return the variant of a line and its parts: a test may begin or cease to name the check next to the variant."""
    variant = line.partition("\t")[0].replace(" ", "")
    return {variant, *variant.split("-")}


def lost(before: list[str], after: list[str]) -> list[str]:
    """Return the lines of ``before`` whose variant ``after`` has less often. Of a planted bug, one line suffices."""
    left = Counter(name for line in after for name in _names(line))
    planted = {name.replace("_", "") for name in PLANTED}
    missing = []
    for line in before:
        name = max(_names(line), key=lambda each: left[each])
        if left[name] < 1:
            missing.append(line)
        left[name] -= name not in planted
    return missing


if __name__ == "__main__":
    lines = planted_list()
    if sys.argv[1:]:
        lines = lost(Path(sys.argv[1]).read_text().splitlines(), lines)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.exit(bool(sys.argv[1:] and lines))
