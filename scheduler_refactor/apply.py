"""Apply a recipe to a tree: files in, files out. Nothing is read or written here."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_refactor.move import move_methods
from scheduler_refactor.prepare import prepare_component
from scheduler_refactor.recipe import Move, Prepare, Recipe, Rename, RenameFile, Replace, Step
from scheduler_refactor.refusals import Refusal, RefusedError
from scheduler_refactor.rename import rename_file, rename_member


def apply_recipe(tree: Mapping[str, str], recipe: Recipe) -> dict[str, str]:
    """Return the tree after all steps of a recipe.

    Args:
        tree: text by path from the root of the repository. Only Python files below the recipe's paths are read; all
            others are returned as they are.
        recipe: the recipe.

    Raises:
        RefusedError: a step would change the meaning of the code. It has every reason of that step.
        ConfigError: a file is not Python.
    """
    inside = {path: text for path, text in tree.items() if path.endswith(".py") and _is_below(path, recipe.paths)}
    others = {path: text for path, text in tree.items() if path not in inside}
    for step in recipe.steps:
        inside = apply_step(inside, step)
    return others | inside


def apply_step(tree: Mapping[str, str], step: Step) -> dict[str, str]:
    """Return the tree after one step.

    Raises:
        RefusedError: the step would change the meaning of the code.
        ConfigError: a file is not Python.
    """
    match step:
        case Prepare():
            return prepare_component(tree, step)
        case Move():
            return move_methods(tree, step)
        case Rename():
            return rename_member(tree, step)
        case RenameFile():
            return rename_file(tree, step)
        case Replace():
            return _replace(tree, step)


def _replace(tree: Mapping[str, str], step: Replace) -> dict[str, str]:
    text = tree.get(step.file, "")
    if text.count(step.old) != 1:
        shown = step.old.strip().splitlines()[0] if step.old.strip() else step.old
        message = f"the text {shown!r} is there {text.count(step.old)} times, and not once"
        raise RefusedError((Refusal(path=step.file, line=1, rule="text", name=shown, message=message),))
    return dict(tree) | {step.file: text.replace(step.old, step.new)}


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return not folders or any(path == folder or path.startswith(f"{folder}/") for folder in folders)
