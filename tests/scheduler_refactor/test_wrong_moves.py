"""Each wrong move of the table is refused, or found by a comparison with the recipe, and most also by a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st
from kit.wrong_moves import ENGINE, HAZARDS, MISTAKES, RECIPE, Hazard, Mistake, changed

from scheduler_refactor import Difference, ModuleTree, Recorder, Recording, first_difference, play
from scheduler_refactor.apply import apply_recipe
from scheduler_refactor.recording import Decoder
from scheduler_refactor.refusals import RefusedError
from scheduler_refactor.verify import find_residuals


class Work(msgspec.Struct, frozen=True):
    """Tokens of the requests that arrive before each step."""

    steps: tuple[tuple[int, ...], ...]


class EngineHarness:
    """Two schedulers in turn, so that state which they share is seen."""

    exits: Mapping[str, Decoder] = {"sent": bytes.decode, "submit": bytes.decode}
    targets: Sequence[str] = ()
    workload_type = Work

    def workloads(self) -> st.SearchStrategy[Work]:
        requests = st.lists(st.integers(1, 5), max_size=3).map(tuple)
        return st.builds(Work, st.lists(requests, max_size=5).map(tuple))

    def play(self, workload: Work, recorder: Recorder) -> None:
        opened = recorder.load("engine.host").Scheduler
        two = [opened(recorder.sink("sent", lambda text, name=name: f"{name} {text}".encode())) for name in "ab"]
        for number, requests in enumerate(workload.steps):
            recorder.begin(f"step {number}")
            for place, num_tokens in enumerate(requests):
                scheduler = two[(number + place) % 2]
                rid = f"r{number}.{place}"
                recorder.call("submit", lambda: scheduler.submit(rid, num_tokens), lambda _: b"")  # noqa: B023
            for each in two:
                each.step()
        for each in two:
            each.close()


WORKLOADS = (Work(()), Work(((1, 2), (3, 1), (2,), ())), Work(((5, 4, 4, 3), (1,), ())))


def version(tree: Mapping[str, str], folder: Path) -> ModuleTree:
    for name, text in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return ModuleTree.below(folder)


@pytest.fixture(scope="module")
def right() -> dict[str, str]:
    return apply_recipe(ENGINE, RECIPE)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    return recordings(version(ENGINE, tmp_path_factory.mktemp("old")))


def recordings(tree: ModuleTree) -> list[Recording]:
    return [play(EngineHarness(), tree, work) for work in WORKLOADS]


def differences(old: Sequence[Recording], new: ModuleTree) -> list[Difference]:
    found = (first_difference(one, other) for one, other in zip(old, recordings(new), strict=True))
    return [each for each in found if each is not None]


def test_the_table_is_long_and_its_names_are_different() -> None:
    names = [each.name for each in (*HAZARDS, *MISTAKES)]
    assert len(names) == len(set(names))
    assert len(names) >= 30


def test_the_right_move_changes_nothing(right: dict[str, str], old: list[Recording], tmp_path: Path) -> None:
    assert differences(old, version(right, tmp_path)) == []
    assert {each.exit for each in old[-1].emissions} == {"sent", "submit"}


REFUSED = [each for each in HAZARDS if each.rule]
SURVIVORS = [each for each in HAZARDS if not each.rule]


@pytest.mark.parametrize("hazard", SURVIVORS, ids=lambda hazard: hazard.name)
def test_what_is_not_refused_is_found_by_a_replay(hazard: Hazard, tmp_path: Path) -> None:
    tree = {**ENGINE, hazard.file: changed(ENGINE[hazard.file], hazard.old, hazard.new)}
    old, new = version(tree, tmp_path / "old"), version(apply_recipe(tree, RECIPE), tmp_path / "new")
    assert differences(recordings(old), new)


@pytest.mark.parametrize("hazard", REFUSED, ids=lambda hazard: hazard.name)
def test_a_move_that_would_change_the_meaning_is_refused(hazard: Hazard) -> None:
    tree = {**ENGINE, hazard.file: changed(ENGINE.get(hazard.file, ""), hazard.old, hazard.new)}
    with pytest.raises(RefusedError) as refused:
        apply_recipe(tree, RECIPE)
    found = {each.rule: each for each in refused.value.refusals}
    assert hazard.rule in found, str(refused.value)
    assert found[hazard.rule].line >= 1


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found(mistake: Mistake, right: dict[str, str], old: list[Recording], tmp_path: Path) -> None:
    wrong = {**right, mistake.file: changed(right[mistake.file], mistake.old, mistake.new)}
    expected, actual = ({path: ("100644", text.encode()) for path, text in tree.items()} for tree in (right, wrong))
    (residual,) = find_residuals(expected, actual)
    assert residual.path == mistake.file
    assert residual.diff
    assert bool(differences(old, version(wrong, tmp_path))) == mistake.replay
