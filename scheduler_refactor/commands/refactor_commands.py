"""The command group ``refactor``: measure a scheduler of mixins, and take it apart by recipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import attrs
import msgspec
from cyclopts import App, Parameter

from scheduler_components import ConfigError
from scheduler_components._internal.extras import require_modules
from scheduler_refactor import Recipe, read_recipe, write_recipe
from scheduler_refactor.commands.output import print_lines
from scheduler_refactor.commands.replay_commands import record, replay
from scheduler_refactor.commands.verify_commands import verify
from scheduler_refactor.measure_report import MeasureReport, render_mermaid, render_svg, render_text
from scheduler_refactor.measurement import find_host, measure_host
from scheduler_refactor.plan import MovePlanner
from scheduler_refactor.recipe import Accepted, Step
from scheduler_refactor.source_index import SourceIndex
from scheduler_refactor.source_tree import (
    commit_files,
    find_module_file,
    python_files,
    read_bytes,
    read_folder,
    read_text,
    write_changes,
    write_recipe_file,
)

MeasureFormat: TypeAlias = Literal["text", "json", "mermaid", "svg"]
_PROGRESS_S = 1.0

HostName = Annotated[
    str, Parameter(help="The scheduler's class, as CLASS or FILE:CLASS. Default: the largest with a mixin.")
]
Paths = Annotated[list[str] | None, Parameter(help="Folder below the root to read. Repeat. Default: all of it.")]
RecipeFile = Annotated[Path | None, Parameter(help="Apply this recipe in place of a planned one.")]
PlanOnly = Annotated[bool, Parameter(show_default=False, help="Print the recipe, and change nothing.")]
Commit = Annotated[bool, Parameter(show_default=False, help="Commit the files together with the recipe.")]


def measure(
    path: Annotated[list[Path], Parameter(help="Files and folders. The files of bases are found from them.")],
    /,
    *,
    host: HostName = "",
    part: Annotated[str, Parameter(help="In the text, list the methods of this part only.")] = "",
    output_format: Annotated[MeasureFormat, Parameter(name="--format", help="Form of the output.")] = "text",
) -> int:
    """Measure which attributes of a scheduler each mixin, base and component uses.

    It reads the source and imports nothing. The progress is on standard error.
    """
    progress = _Progress()
    files = [file for each in path for file in python_files(each)]
    texts = {file.as_posix(): read_text(file) for file in files}
    index = SourceIndex.parse(texts, progress.on_file)
    index.find_module = find_module_file
    measurement = measure_host(index, find_host(index, host), progress.on_part)
    if part and part not in {each.name for each in measurement.parts}:
        known = ", ".join(each.name for each in measurement.parts)
        raise ConfigError("part", part, "is no part of this host", f"name one of {known}")
    report = MeasureReport.of(measurement)
    match output_format:
        case "text":
            print_lines(render_text(report, part))
        case "json":
            print_lines((msgspec.json.format(msgspec.json.encode(report), indent=1).decode(),))
        case "mermaid":
            print_lines(render_mermaid(report))
        case "svg":
            print_lines((render_svg(report),))
    progress.end(len(index.modules))
    return 0


def prepare(
    root: Annotated[Path, Parameter(help="The root of the repository.")],
    /,
    *,
    mixin: Annotated[str, Parameter(help="The mixin to turn into a component.")] = "",
    component: Annotated[str, Parameter(help="Name of the component's class.")] = "",
    attribute: Annotated[str, Parameter(help="The scheduler's attribute for it.")] = "",
    host: HostName = "",
    port: Annotated[str, Parameter(help="Name of the field through which it reaches the scheduler.")] = "host",
    doc: Annotated[str, Parameter(help="Docstring of the component. Default: the mixin's first line.")] = "",
    paths: Paths = None,
    recipe: RecipeFile = None,
    plan: PlanOnly = False,
    commit: Commit = False,
) -> int:
    """Write an empty component with its ports next to a mixin, and construct it in the scheduler. Nothing moves.

    The recipe is planned from a measurement, or read from a file that you have edited.
    """
    planned = _ToPlan(host=host, mixin=mixin, component=component, attribute=attribute, port=port, recipe=recipe)
    return _carry_out(root, paths or [], planned, lambda planner: planner.prepare(doc), "Prepare", plan, commit)


def move(
    root: Annotated[Path, Parameter(help="The root of the repository.")],
    /,
    *,
    mixin: Annotated[str, Parameter(help="The mixin that has the methods.")] = "",
    component: Annotated[str, Parameter(help="The component that `prepare` wrote.")] = "",
    attribute: Annotated[str, Parameter(help="The scheduler's attribute for it.")] = "",
    host: HostName = "",
    receiver: Annotated[list[str] | None, Parameter(help="Expression that is the scheduler elsewhere. Repeat.")] = None,
    delegate: Annotated[list[str] | None, Parameter(help="Member that forwards from its old place. Repeat.")] = None,
    delegate_note: Annotated[str, Parameter(help="Comment on the forwarding line, such as `until 0.8`.")] = "",
    accept: Annotated[
        list[str] | None, Parameter(help="A refusal that you have checked, as RULE:NAME=REASON. Repeat.")
    ] = None,
    paths: Paths = None,
    recipe: RecipeFile = None,
    plan: PlanOnly = False,
    commit: Commit = False,
) -> int:
    """Move the methods of a mixin into a prepared component, byte for byte, and rewrite their callers.

    Whatever would change the meaning of the code is refused with its line, and nothing is written.
    """
    accepted = [_accepted(text) for text in accept or []]
    planned = _ToPlan(host=host, mixin=mixin, component=component, attribute=attribute, recipe=recipe)

    def make(planner: MovePlanner) -> Step:
        return planner.move(
            receivers=receiver or [], delegates=delegate or [], delegate_note=delegate_note, accepted=accepted
        )

    return _carry_out(root, paths or [], planned, make, "Move", plan, commit)


@attrs.frozen(kw_only=True)
class _ToPlan:
    """What the options say: a recipe's file, or the names of a mixin and its component."""

    host: str
    mixin: str
    component: str
    attribute: str
    port: str = "host"
    recipe: Path | None

    def check(self) -> None:
        """Raise if neither is complete."""
        for field in ("mixin", "component", "attribute"):
            if not getattr(self, field).isidentifier():
                raise ConfigError(field, getattr(self, field), "is no name", "give it, or a file with --recipe")


def _carry_out(
    root: Path,
    paths: Sequence[str],
    planned: _ToPlan,
    make: Callable[[MovePlanner], Step],
    verb: str,
    plan: bool,
    commit: bool,
) -> int:
    """Plan or read a recipe, apply it, and write the files with the recipe."""
    require_modules("libcst")
    from scheduler_refactor.apply import apply_recipe

    if planned.recipe is not None:
        chosen = read_recipe(read_bytes(planned.recipe))
        tree = read_folder(root, chosen.paths)
    else:
        planned.check()
        tree = read_folder(root, paths)
        planner = MovePlanner(
            tree=tree,
            host=planned.host,
            mixin=planned.mixin,
            component=planned.component,
            attribute=planned.attribute,
            port=planned.port,
        )
        chosen = Recipe(title=f"{verb} {planned.component}", paths=tuple(paths), steps=(make(planner),))
    if plan:
        print_lines((write_recipe(chosen).decode().rstrip(),))
        return 0
    changed = [*write_changes(root, tree, apply_recipe(tree, chosen)), write_recipe_file(root, chosen)]
    done = f"committed {commit_files(root, chosen, changed)[:12]}" if commit else "wrote"
    print_lines((f"{done}: {', '.join(changed)}",))
    return 0


def _accepted(text: str) -> Accepted:
    rule, _, rest = text.partition(":")
    name, _, why = rest.rpartition("=")
    if not (rule and name and why):
        raise ConfigError("accept", text, "is no RULE:NAME=REASON", "take rule and name from the refusal's brackets")
    return Accepted(rule=rule, name=name, why=why)


class _Progress:
    """Writes a line to standard error about once per second."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._num_files = 0

    def on_file(self, path: str) -> None:
        """Count a parsed file."""
        self._num_files += 1
        self._say(f"parsed {self._num_files} files, the last is {path}")

    def on_part(self, name: str) -> None:
        """Note that a part is being read."""
        self._say(f"measuring {name}")

    def end(self, num_files: int) -> None:
        """Say how long it took."""
        sys.stderr.write(f"measured {num_files} files in {time.monotonic() - self._began:.1f} s\n")

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= _PROGRESS_S:
            self._last = now
            sys.stderr.write(f"{text}\n")


REFACTOR_COMMANDS: dict[str, Callable[..., int]] = {
    "measure": measure,
    "prepare": prepare,
    "move": move,
    "verify": verify,
    "record": record,
    "replay": replay,
}
"""Commands by name. Those that edit code import libcst when they run."""


def make_refactor_app() -> App:
    """Make the parser of the group."""
    app = App(name="refactor", help="Take a scheduler of mixins apart: measure it, move its parts, prove the moves.")
    for name, command in REFACTOR_COMMANDS.items():
        app.command(command, name=name)
    return app
