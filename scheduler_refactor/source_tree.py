"""Read and write the working tree of a refactor, and commit what a recipe made."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from scheduler_components.errors import ConfigError
from scheduler_refactor.recipe import Recipe, recipe_path, write_recipe


def python_files(path: Path) -> list[Path]:
    """Return a file, or the Python files below a folder, sorted, without hidden folders.

    Raises:
        ConfigError: there is none.
    """
    if path.is_file():
        return [path]
    found = [
        file
        for file in sorted(path.rglob("*.py"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not found:
        raise ConfigError("path", str(path), "has no Python file", "name a file or a folder of Python source")
    return found


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError("path", str(path), f"cannot be read ({error.strerror})", "name another file") from error


def read_text(path: Path) -> str:
    """Return a file's text with its newlines as they are.

    Raises:
        ConfigError: it cannot be read, or it is not UTF-8.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError("path", str(path), "is not UTF-8", "convert it or leave it out") from error


def find_module_file(module: str, importer: str) -> tuple[str, str] | None:
    """Return path and text of a module's file, searched from the folder of the importing file upwards."""
    relative = Path(*module.strip(".").split("."))
    for folder in Path(importer).resolve().parents:
        for candidate in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if candidate.is_file():
                return str(candidate), read_text(candidate)
    return None


def read_folder(root: Path, paths: Sequence[str] = ()) -> dict[str, str]:
    """Return the text of the Python files below `root`, by their paths from there.

    Args:
        root: the root of the repository.
        paths: files and folders to read; empty for all.

    Raises:
        ConfigError: a path has no Python file, or a file cannot be read.
    """
    files = [file for path in paths or (".",) for file in python_files(root / path)]
    return {file.relative_to(root).as_posix(): read_text(file) for file in files}


def write_changes(root: Path, before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """Write what differs between two trees below `root`, and return the changed paths, sorted."""
    changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    for path in changed:
        if path in after:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(after[path].encode())
        else:
            (root / path).unlink()
    return tuple(changed)


def write_recipe_file(root: Path, recipe: Recipe) -> str:
    """Write the recipe below `root`, and return its path from there."""
    path = recipe_path(recipe)
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).write_bytes(write_recipe(recipe))
    return path


def commit_files(root: Path, recipe: Recipe, changed: Sequence[str]) -> str:
    """Commit changed files together with the recipe, and return the name of the commit. The user's hooks run.

    Args:
        root: a folder of the repository, from which the paths go.
        recipe: its title and its reason become the message.
        changed: paths that changed, with that of the recipe.

    Raises:
        ConfigError: git fails.
    """
    _git(root, "add", "--", *changed)
    why = f"{recipe.why}\n\n" if recipe.why else ""
    message = f"{recipe.title}\n\n{why}Recipe: {recipe_path(recipe)}\n"
    _git(root, "commit", "--quiet", "--message", message, "--", *changed)
    return _git(root, "rev-parse", "HEAD").strip()


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    try:
        ran = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError("root", str(repository), f"git does not run there ({error})", "install git") from error
    if ran.returncode:
        problem = (ran.stderr or ran.stdout).strip().splitlines() or ["no message"]
        raise ConfigError("root", str(repository), f"git {arguments[0]} failed: {problem[-1]}", "commit by hand")
    return ran.stdout
