"""A recipe survives its file, and an impossible one is refused with its field."""

from __future__ import annotations

import msgspec
import pytest

from scheduler_components import ConfigError
from scheduler_refactor import read_recipe, write_recipe
from scheduler_refactor.recipe import (
    Accepted,
    ClassRef,
    ComponentField,
    Move,
    Port,
    Prepare,
    Recipe,
    Rename,
    RenameFile,
    Replace,
    recipe_path,
)

HOST = ClassRef(file="engine/scheduler.py", name="Scheduler")
MIXIN = ClassRef(file="engine/load_mixin.py", name="LoadMixin")
LOAD = ClassRef(file="engine/load_mixin.py", name="Load")
RECIPE = Recipe(
    title="Move load reports",
    why="They only read.",
    paths=("engine", "tests"),
    steps=(
        Prepare(
            component=LOAD,
            doc="Reports load.",
            host=HOST,
            attribute="load",
            ports=(Port(name="queues", protocol="LoadQueues", members={"running": "running: list[Request]"}),),
            fields=(ComponentField(name="sequence", annotation="int", kind="state", value="0"),),
        ),
        Move(
            source=MIXIN,
            component=LOAD,
            host=HOST,
            attribute="load",
            methods=("get_load",),
            routes={"running": "queues"},
            states=("sequence",),
            accepted=(Accepted(rule="decorator", name="*", why="They wrap."),),
        ),
        Rename(owner=LOAD, old="get_load", new="get_loads"),
        RenameFile(file="engine/load_mixin.py", to="engine/load.py"),
        Replace(file="engine/load.py", old="a", new="b", why="By hand."),
    ),
)


def test_a_recipe_survives_its_file() -> None:
    written = write_recipe(RECIPE)
    assert read_recipe(written) == RECIPE
    assert write_recipe(read_recipe(written)) == written
    assert written.endswith(b"}\n")
    assert recipe_path(RECIPE) == ".refactor/move-load-reports.json"


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        pytest.param('"steps": [', '"stages": [', "recipe", id="a missing key"),
        pytest.param('"step": "move"', '"step": "copy"', "recipe", id="an unknown step"),
        pytest.param('"kind": "state"', '"kind": "fat"', "recipe", id="an unknown kind"),
        pytest.param('"to": "engine/load.py"', '"to": "/engine/load.py"', "to", id="an absolute path"),
        pytest.param('"engine/scheduler.py"', '"../scheduler.py"', "host.file", id="a path outside"),
        pytest.param(
            '"engine/load_mixin.py"', '"engine//load_mixin.py"', "component.file", id="a path that is not plain"
        ),
        pytest.param('"get_load"', '"get load"', "methods", id="a method that is no name"),
        pytest.param('"new": "get_loads"', '"new": "3"', "new", id="a new name that is no name"),
        pytest.param('"running": "running', '"run ning": "running', "ports.members", id="a member that is no name"),
    ],
)
def test_an_impossible_recipe_is_refused(old: str, new: str, field: str) -> None:
    text = write_recipe(RECIPE).decode()
    assert old in text
    with pytest.raises(ConfigError) as raised:
        read_recipe(text.replace(old, new, 1).encode())
    assert raised.value.field == field


def test_a_recipe_without_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one step"):
        read_recipe(msgspec.json.encode({"title": "Nothing", "steps": []}))
