"""Two versions of one package live in one process, each with its own modules and its own time."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scheduler_components.errors import ConfigError
from scheduler_refactor.module_tree import START_S, ModuleTree, parse_tree

CORE = """
import time
from dataclasses import dataclass
from time import monotonic, sleep

from engine import names

@dataclass
class Step:
    number: int = NUMBER

def late():
    import time as again
    from engine.inner import later
    return again.time(), monotonic(), later.VALUE

def nap(seconds):
    sleep(seconds)
    time.sleep(seconds)
    return time.perf_counter_ns()
"""


def write(root: Path, number: int) -> Path:
    files = {
        "engine/__init__.py": "",
        "engine/names.py": "NAMES = []\n",
        "engine/core.py": CORE.replace("NUMBER", str(number)),
        "engine/inner/later.py": f"VALUE = {number}\n",
        "single.py": f"VALUE = {number}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def trees(tmp_path: Path) -> tuple[ModuleTree, ModuleTree]:
    return ModuleTree.below(write(tmp_path / "old", 1)), ModuleTree.below(write(tmp_path / "new", 2))


def test_both_versions_have_the_same_names_and_their_own_code(trees: tuple[ModuleTree, ModuleTree]) -> None:
    before = set(sys.modules)
    old, new = (tree.load("engine.core") for tree in trees)
    assert repr(old.Step()) == "Step(number=1)"
    assert repr(new.Step()) == "Step(number=2)"
    assert old.Step.__module__ == new.Step.__module__ == "engine.core"
    assert [tree.load("single").VALUE for tree in trees] == [1, 2]
    assert set(sys.modules) - before == set()
    assert trees[0].load("engine.names") is not trees[1].load("engine.names")
    assert trees[0].load("engine.core") is old


def test_imports_inside_of_a_function_find_the_own_version(trees: tuple[ModuleTree, ModuleTree]) -> None:
    for tree, number in zip(trees, (1, 2), strict=True):
        core = tree.load("engine.core")
        with tree.active():
            assert core.late()[2] == number
            assert pickle.loads(pickle.dumps(core.Step())) == core.Step()


def test_trees_nest_and_hide_what_was_there(trees: tuple[ModuleTree, ModuleTree]) -> None:
    outer = ModuleType("engine")
    sys.modules["engine"] = outer
    try:
        with trees[0].active(), trees[0].active():
            with trees[1].active():
                assert sys.modules.get("engine.core") is None
                trees[1].load("engine.core")
            assert "engine.core" not in sys.modules
        assert sys.modules["engine"] is outer
    finally:
        del sys.modules["engine"]
    with trees[0].active():
        assert trees[0].load("engine.names") is trees[0].load("engine.names") is sys.modules["engine.names"]


def test_modules_see_the_virtual_time_everywhere(trees: tuple[ModuleTree, ModuleTree]) -> None:
    tree = trees[0]
    core = tree.load("engine.core")
    tree.clock.advance(2.5)
    with tree.active():
        assert core.late()[:2] == (1_700_000_002.5, 1_700_000_002.5)
        assert core.nap(10) == 1_700_000_022_500_000_000
    tree.clock.now_s = START_S
    assert core.monotonic() == 1_700_000_000.0
    assert trees[1].load("engine.core").time.time() == 1_700_000_000.0


def test_other_modules_can_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "dice.py").write_text("import random\nROLL = random.randint(1, 6)\n")
    loaded = ModuleType("random")
    loaded.randint = lambda low, high: high  # type: ignore[attr-defined]
    assert ModuleTree.below(tmp_path).load("dice").ROLL in range(1, 7)
    assert ModuleTree({"dice": tmp_path / "dice.py"}, replaced={"random": loaded}).load("dice").ROLL == 6


def test_a_forgotten_module_runs_again(trees: tuple[ModuleTree, ModuleTree]) -> None:
    tree = trees[0]
    tree.load("engine.names").NAMES.append("a")
    tree.forget()
    assert tree.load("engine.names").NAMES == []


def test_nothing_is_written_next_to_the_sources(trees: tuple[ModuleTree, ModuleTree], tmp_path: Path) -> None:
    for tree in trees:
        tree.load("engine.core")
    assert list(tmp_path.rglob("*.pyc")) == []


def test_an_edited_file_is_not_read_from_old_bytecode(tmp_path: Path) -> None:
    for number in (1, 2):
        assert number == ModuleTree.below(write(tmp_path, number)).load("single").VALUE


def test_a_module_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no')\n")
    before, path = dict(sys.modules), list(sys.meta_path)
    with pytest.raises(RuntimeError):
        ModuleTree.below(tmp_path).load("broken")
    assert "broken" not in sys.modules
    assert (set(sys.modules) <= set(before), sys.meta_path) == (True, path)


def test_a_folder_can_have_another_name_than_its_package(tmp_path: Path) -> None:
    write(tmp_path, 7)
    (tmp_path / "engine").rename(tmp_path / "stage_7")
    assert parse_tree(f"engine={tmp_path / 'stage_7'}").load("engine.core").Step().number == 7
    assert parse_tree(str(tmp_path)).packages.keys() == {"stage_7", "single"}


@pytest.mark.parametrize(
    ("packages", "problem"),
    [({"json": "."}, "no name of its own"), ({"a-b": "."}, "no name of its own"), ({"engine": "missing"}, "exist")],
)
def test_a_wrong_tree_is_refused(packages: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ModuleTree({name: Path(folder) for name, folder in packages.items()})


def test_a_folder_without_packages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no package"):
        parse_tree(str(tmp_path))
