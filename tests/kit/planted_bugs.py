"""Bugs that simulated worlds must find: every break function of the kit, and where and when its bug was found.

``PYTHONPATH=.:tests python -m kit.planted_bugs 30`` searches the first 30 seeds of each kind of world for each bug, and
prints ``FOUND`` and ``NOT_FOUND`` of ``kit/planted_seeds.py``. The table of docs/explanation/simulated-delivery.md is
``table()``.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import attrs
import pytest

from kit import (
    broken_edges,
    broken_log_cores,
    broken_relay_cores,
    broken_stream_cores,
    broken_traffic_cores,
    planted_seeds,
)
from observability.simulation import DeliveryReport, WorldKind, run_world
from scheduler_components.kv_events import stream

Plant = Callable[[pytest.MonkeyPatch], None]

WORLDS: dict[ModuleType, tuple[WorldKind, ...]] = {
    broken_stream_cores: ("stream", "plain"),
    broken_traffic_cores: ("stream", "plain"),
    broken_edges: ("stream",),
    broken_relay_cores: ("relay",),
    broken_log_cores: ("jetstream",),
}
"""The break functions of a module, and the kinds of worlds that are searched for them."""


@attrs.frozen(kw_only=True)
class PlantedBug:
    """A bug and the worlds that should find it.

    Attributes:
        plant: breaks one rule.
        kinds: of worlds that are searched for it.
    """

    plant: Plant
    kinds: tuple[WorldKind, ...]

    @property
    def name(self) -> str:
        return self.plant.__name__

    def run(self, kind: WorldKind, seed: int) -> DeliveryReport:
        """Run one world with the bug."""
        with pytest.MonkeyPatch.context() as patch:
            cut_small(patch)
            self.plant(patch)
            return run_world(seed, kind=kind)

    def search(self, num_seeds: int) -> tuple[WorldKind, int] | None:
        """Return kind and seed of the first world that finds the bug; None if none of the first seeds does."""
        for seed in range(num_seeds):
            for kind in self.kinds:
                if self.run(kind, seed).violation is not None:
                    return kind, seed
        return None


def cut_small(patch: pytest.MonkeyPatch) -> None:
    """Let a snapshot of some hundred blocks take several steps of planning and several chunks, as a large one does."""
    patch.setattr(stream, "_SEGMENTS_PER_STEP", 32)
    patch.setattr(stream, "_CHUNK_BYTES", 600)


def _planted() -> Iterator[PlantedBug]:
    for module, kinds in WORLDS.items():
        for name, each in vars(module).items():
            if inspect.isfunction(each) and each.__module__ == module.__name__ and not name.startswith("_"):
                yield PlantedBug(plant=each, kinds=kinds)


PLANTED = {bug.name: bug for bug in _planted()}


def table() -> str:
    """Return the rows of the page's table, and the list of bugs that no world has found."""
    rows = ["| planted bug | world | first seed | worlds tried |", "| --- | --- | --- | --- |"]
    for name, (kind, seed) in planted_seeds.FOUND.items():
        kinds = PLANTED[name].kinds
        num_tried = seed * len(kinds) + kinds.index(kind) + 1
        rows.append(f"| {name.replace('_', ' ')} | {kind} | {seed} | {num_tried} |")
    rows += ["", f"Not found in {planted_seeds.NUM_SEEDS} seeds of each kind:", ""]
    rows += [f"- {name.replace('_', ' ')}" for name in planted_seeds.NOT_FOUND]
    return "\n".join(rows)


def main(num_seeds: int) -> None:
    """Search for every bug, and write the constants of ``planted_seeds``."""
    logging.disable(logging.CRITICAL)
    write = sys.stdout.write
    missed = []
    write("FOUND: dict[str, tuple[WorldKind, int]] = {\n")
    for name, bug in PLANTED.items():
        found = bug.search(num_seeds)
        if found is None:
            missed.append(name)
        else:
            write(f'    "{name}": ("{found[0]}", {found[1]}),\n')
            sys.stdout.flush()
    write("}\n\nNOT_FOUND: tuple[str, ...] = (\n" + "".join(f'    "{name}",\n' for name in missed) + ")\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
