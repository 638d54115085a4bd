"""The command ``new``: write a project that composes a scheduler, with a policy of its own and its property suite."""

from __future__ import annotations

import keyword
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scheduler_components import ConfigError
from scheduler_engine.cli.run_reporter import print_lines

_TEMPLATES = "new_project"
_SUFFIX = ".template"
_PLACEHOLDER = "NAME"


def new(
    name: Annotated[str, Parameter(help="Name of the project and of its package: a Python identifier.")],
    /,
    *,
    directory: Annotated[Path, Parameter(help="Where the folder of the project is made.")] = Path(),
) -> int:
    """Write a project that composes a scheduler: a request, a scheduling policy, the scheduler, its property suite."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise ConfigError("name", name, "is not a Python identifier", "give letters, digits and underscores")
    if name in ("tests", "scheduler_components", "observability"):
        raise ConfigError("name", name, "is the name of another package", "give a name of your own")
    project = directory / name
    if project.exists():
        raise ConfigError("name", name, f"exists in {directory.resolve()} already", "give another name or --directory")
    if not directory.is_dir():
        raise ConfigError("directory", str(directory), "is not a directory", "make it first")
    for path, text in project_files(name).items():
        target = project / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    print_lines(
        (
            f"{project}: a scheduler of your own",
            "",
            f"    cd {project}",
            "    pip install -e '.[testing]'",
            "    pytest",
            "",
            f"Begin with {name}/policy.py.",
        )
    )
    return 0


def project_files(name: str) -> dict[Path, str]:
    """Return the text of each file of a project, by its path in the project's folder."""
    found = {Path(name, "__init__.py"): f'"""{name}: a scheduler composed of parts."""\n'}
    for template in sorted(files("scheduler_engine.cli").joinpath(_TEMPLATES).iterdir(), key=str):
        file_name = template.name.removesuffix(_SUFFIX)
        folder = "tests" if file_name.startswith("test_") else name if file_name.endswith(".py") else ""
        found[Path(folder, file_name)] = template.read_text().replace(_PLACEHOLDER, name)
    return found
