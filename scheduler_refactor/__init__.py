"""Refactor mixins into components: measure what methods use, move them as a recipe says, and compare versions.

``Harness``, ``play`` and ``workload_search`` compare every output of two versions in one process. ``Shadow`` runs a new
component next to the old one in production.
"""

from scheduler_refactor.harness import (
    Harness,
    HarnessError,
    NotReproducibleError,
    Recorder,
    compare_versions,
    play,
    replay_recordings,
)
from scheduler_refactor.module_tree import ModuleTree, parse_tree
from scheduler_refactor.recipe import Recipe, read_recipe, write_recipe
from scheduler_refactor.recording import Coverage, Difference, Recording, first_difference
from scheduler_refactor.shadow import Shadow, ShadowStats

__all__ = [
    # recipes
    "Recipe",
    "read_recipe",
    "write_recipe",
    # two versions in one process
    "Coverage",
    "Difference",
    "Harness",
    "HarnessError",
    "ModuleTree",
    "NotReproducibleError",
    "Recorder",
    "Recording",
    "compare_versions",
    "first_difference",
    "parse_tree",
    "play",
    "replay_recordings",
    # two components in production
    "Shadow",
    "ShadowStats",
]
