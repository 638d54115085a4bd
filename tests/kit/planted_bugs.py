"""Bugs that are planted in the cores, and how each is found: by a simulated world, or by the trace of a test.

``PYTHONPATH=.:tests python -m kit.planted_bugs 30`` searches the first 30 seeds of each kind of world for each bug. It
writes ``kit/planted_seeds.py`` and the table of docs/explanation/simulated-delivery.md. With names after the number it
searches for these bugs only.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import attrs
import pytest
from worlds import DeliveryReport, Violation, WorldKind, run_world

from kit import (
    broken_edges,
    broken_log_cores,
    broken_relay_cores,
    broken_stream_cores,
    broken_traffic_cores,
    planted_seeds,
    planted_traces,
)

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]
Finding: TypeAlias = tuple[WorldKind, int, str]
"""Kind and seed of a world, and the promise that it broke."""

CRASH = "crash: "
"""Begins what is noted for a world in which a part failed. That breaks no promise, so it counts only without one."""

WORLDS: dict[ModuleType, tuple[WorldKind, ...]] = {
    broken_stream_cores: ("stream", "plain"),
    broken_traffic_cores: ("stream", "plain"),
    broken_edges: ("stream",),
    broken_relay_cores: ("relay",),
    broken_log_cores: ("jetstream",),
}
"""The break functions of a module, and the kinds of worlds that are searched for them."""

_KIT = Path(__file__).parent
_PAGE = _KIT.parents[1] / "docs" / "explanation" / "simulated-delivery.md"
_HEAD = "| planted bug | world | first seed | worlds tried | broken promise |"


@attrs.frozen(kw_only=True)
class PlantedBug:
    """A bug and the worlds that are searched for it.

    Attributes:
        plant: breaks one rule.
        kinds: of worlds that have the broken part.
    """

    plant: Plant
    kinds: tuple[WorldKind, ...]

    @property
    def name(self) -> str:
        return self.plant.__name__

    def run(self, kind: WorldKind, seed: int) -> DeliveryReport:
        """Run one world with the bug."""
        with pytest.MonkeyPatch.context() as patch:
            self.plant(patch)
            return run_world(seed, kind=kind)

    def search(self, num_seeds: int) -> Finding | None:
        """Return the first world that breaks a promise only with the bug, else the first in which a part fails.

        The first ``num_seeds`` seeds of each kind are tried. None if nothing was found.
        """
        if self.name in planted_traces.ENDLESS:
            return None
        crashed: Finding | None = None
        for seed in range(num_seeds):
            for kind in self.kinds:
                violation = self.run(kind, seed).violation
                if violation is None or not is_sound(kind, seed):
                    continue
                promise = broken_promise(violation)
                if not promise.startswith(CRASH):
                    return kind, seed, promise
                crashed = crashed or (kind, seed, promise)
        return crashed


def broken_promise(violation: Violation) -> str:
    """Return the promise that a world broke; of a part that failed, ``CRASH`` and the name of the exception."""
    if violation.promise == "no part fails":
        return CRASH + violation.detail.partition(":")[0]
    return violation.promise


@cache
def is_sound(kind: WorldKind, seed: int) -> bool:
    """Return whether a world without a bug keeps every promise."""
    return run_world(seed, kind=kind).violation is None


def _planted() -> Iterator[PlantedBug]:
    for module, kinds in WORLDS.items():
        for name, each in vars(module).items():
            if inspect.isfunction(each) and each.__module__ == module.__name__ and not name.startswith("_"):
                yield PlantedBug(plant=each, kinds=kinds)


PLANTED = {bug.name: bug for bug in _planted()}


# --- the table ---


def table() -> str:
    """Return the page's tables: the bugs that a world has found, and the tests that catch the others."""
    num_seeds = planted_seeds.NUM_SEEDS
    rows = [_HEAD, "| --- | --- | --- | --- | --- |"]
    for name, (kind, seed, promise) in sorted(planted_seeds.FOUND.items()):
        kinds = PLANTED[name].kinds
        num_tried = seed * len(kinds) + kinds.index(kind) + 1
        rows.append(f"| {_words(name)} | {kind} | {seed} | {num_tried} | {promise} |")
    others = sorted(PLANTED.keys() - planted_seeds.FOUND.keys())
    rows += [
        "",
        f"Of {len(PLANTED)} bugs, worlds found {len(planted_seeds.FOUND)}. One of the other {len(others)} is not "
        f"searched, and {num_seeds} seeds of each kind do not show the other {len(others) - 1}.",
        f"Each of the {len(others)} has a test, with a trace that fails with the bug and passes without it:",
        "",
        "| planted bug | test below `tests/` | why no world shows it |",
        "| --- | --- | --- |",
    ]
    rows += [
        f"| {_words(name)} | `{planted_traces.catching_test(name)}` | {planted_traces.WHY_NO_WORLD.get(name, '')} |"
        for name in others
    ]
    return "\n".join(rows)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _write_page() -> None:
    page = _PAGE.read_text()
    start = page.index("| planted bug | world |")
    end = page.index("\n## ", start)
    _PAGE.write_text(f"{page[:start]}{table()}\n{page[end:]}")


# --- the search ---


def _write_seeds(found: dict[str, Finding], num_seeds: int) -> None:
    planted_seeds.FOUND, planted_seeds.NUM_SEEDS = found, num_seeds
    rows = [f'    "{name}": ("{kind}", {seed}, "{promise}"),' for name, (kind, seed, promise) in sorted(found.items())]
    text = _SEEDS.format(num_seeds=num_seeds, rows="\n".join(rows))
    (_KIT / "planted_seeds.py").write_text(text)


_SEEDS = '''\
"""What the search of ``kit.planted_bugs`` has found: the first world of each bug. A change of the worlds changes it."""

from __future__ import annotations

from worlds import WorldKind

NUM_SEEDS = {num_seeds}
"""Seeds of each kind that were searched at least for each bug."""

FOUND: dict[str, tuple[WorldKind, int, str]] = {{
{rows}
}}
"""Kind, seed and broken promise."""
'''


def main(num_seeds: int, names: Sequence[str]) -> None:
    """Search for the named bugs, or for all, and write what was found."""
    logging.disable(logging.CRITICAL)
    found = {name: each for name, each in planted_seeds.FOUND.items() if names and name not in names}
    for name in names or PLANTED:
        began_s = time.perf_counter()
        finding = PLANTED[name].search(num_seeds)
        if finding is not None:
            found[name] = finding
        sys.stderr.write(f"{name}: {finding}, {time.perf_counter() - began_s:.1f} s\n")
    _write_seeds(found, num_seeds if not names else min(num_seeds, planted_seeds.NUM_SEEDS))
    _write_page()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
