"""A recipe: what one refactoring commit does, as JSON that a program can repeat.

One commit carries one recipe, as a file that the commit adds below ``.refactor/``. The file survives a squash and a
lost message, a reviewer reads it in the diff, and a fork finds it next to the code. A pure function makes the tree
after the commit from the tree before it. So its result can be compared with the commit byte by byte, and the same
recipe can be applied to the tip of an older branch.

A recipe names what moves and never quotes it: a method's body is taken from the tree. An older branch with another body
therefore keeps its body. `Replace` is the one step that quotes code, for an edit by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Literal, TypeAlias

import msgspec

from scheduler_components.errors import ConfigError

RECIPE_FOLDER = ".refactor"
"""The folder of the recipes, from the root of the repository."""


class ClassRef(msgspec.Struct, frozen=True, kw_only=True):
    """A class: the path of its file from the root of the repository, and its name."""

    file: str
    name: str


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A field of the component through which it reaches members of the host; the host passes itself.

    Args:
        name: name of the field, for example ``queues``.
        protocol: name of the Protocol class that is written above the component.
        members: each reached attribute of the host, with its declaration in the Protocol
            (``"running": "running: list[Request]"``). A declaration of several lines is indented by four spaces.
    """

    name: str
    protocol: str
    members: dict[str, str]


class ComponentField(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A field of the component that a moved body names as it named the host's attribute: ``self.cache``.

    Args:
        name: name of the attribute, in the host and in the component.
        annotation: its type, as text.
        kind: ``fact`` is passed to the constructor and bound once; ``state`` leaves the host for the component.
        value: the constructor's argument of a fact (default: ``self.NAME``), or the default of a state. A state without
            a default is unbound until a moved body binds it.
    """

    name: str
    annotation: str
    kind: Literal["fact", "state"]
    value: str = ""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="step", tag="prepare"):
    """Write an empty component and construct it in the host. Nothing moves.

    Args:
        component: the class to write, and its file. A missing file is created.
        doc: its docstring, one line.
        host: the class that constructs it.
        attribute: the host's new attribute.
        method: the host's method in which the component is constructed.
        before: the first line of the statement of `method` before which the component is constructed. Empty: the
            beginning of the method, behind its docstring.
        above: the class above which the component is written. Empty: the end of the file.
        ports: its ports.
        fields: its facts and states.
        imports: statements that the component's file needs, for example ``from collections import deque``.
        type_imports: the same below ``if TYPE_CHECKING:``.
        host_import: the statement with which the host's file imports the component; empty if both are in one file.
        accepted: refusals that the author has checked.
    """

    component: ClassRef
    doc: str
    host: ClassRef
    attribute: str
    method: str = "__init__"
    before: str = ""
    above: str = ""
    ports: tuple[Port, ...] = ()
    fields: tuple[ComponentField, ...] = ()
    imports: tuple[str, ...] = ()
    type_imports: tuple[str, ...] = ()
    host_import: str = ""
    accepted: tuple[Accepted, ...] = ()


class Accepted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A refusal that the author has checked and accepts.

    Args:
        rule: the refusal's rule, for example ``decorator``.
        name: the name that the refusal is about; ``*`` for each.
        path: the file; empty for each file.
        why: the reason, for the reviewer.
    """

    rule: str
    name: str
    path: str = ""
    why: str


class Move(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="step", tag="move"):
    """Move methods of a mixin (or of the host) into a component, and rewrite their callers.

    Args:
        source: the class that has the methods.
        component: the class that gets them. It exists: a `Prepare` wrote it.
        host: the class that constructs the component. Its bases are its mixins.
        attribute: the host's attribute that holds the component.
        methods: names of the methods, in the order in which they are appended to the component.
        routes: host attribute -> port: in a moved body ``self.running`` becomes ``self.queues.running``.
        facts: host attributes that the component has under the same name; bodies and host keep them.
        states: host attributes that now belong to the component: outside of it ``self.queue`` becomes
            ``self.load.queue``.
        whole: port that replaces the bare ``self`` of a moved body (``f(self)`` becomes ``f(self.host)``); empty: such
            a body is refused.
        receivers: expressions that denote the host outside of its classes, for example ``scheduler``.
        delegates: moved members that the host keeps as one forwarding line each.
        delegate_note: comment on that line, for example ``until 0.8``.
        accepted: refusals that the author has checked.
    """

    source: ClassRef
    component: ClassRef
    host: ClassRef
    attribute: str
    methods: tuple[str, ...]
    routes: dict[str, str] = {}
    facts: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    whole: str = ""
    receivers: tuple[str, ...] = ()
    delegates: tuple[str, ...] = ()
    delegate_note: str = ""
    accepted: tuple[Accepted, ...] = ()


class Rename(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="step", tag="rename"):
    """Rename a method or attribute of a class, and rewrite its users.

    Args:
        owner: the class.
        old: the name before.
        new: the name after.
        receivers: expressions that denote an object of the class outside of it, for example ``self.load``.
        accepted: refusals that the author has checked.
    """

    owner: ClassRef
    old: str
    new: str
    receivers: tuple[str, ...] = ()
    accepted: tuple[Accepted, ...] = ()


class RenameFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="step", tag="rename-file"):
    """Rename a file and rewrite the imports of its module.

    Args:
        file: the path before.
        to: the path after.
        accepted: refusals that the author has checked.
    """

    file: str
    to: str
    accepted: tuple[Accepted, ...] = ()


class Replace(msgspec.Struct, frozen=True, kw_only=True, tag_field="step", tag="replace"):
    """Replace text by hand. No rule proves it, so a reviewer reads it.

    Args:
        file: the file.
        old: the text before, which the file has exactly once.
        new: the text after.
        why: the reason, for the reviewer.
    """

    file: str
    old: str
    new: str
    why: str


Step: TypeAlias = Prepare | Move | Rename | RenameFile | Replace


class Recipe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The steps of one commit.

    Args:
        title: the commit's subject.
        why: the commit's body.
        paths: files and folders whose Python files are read and written, from the root of the repository. Empty: all.
            Callers outside of them are not seen.
        steps: the steps, in order.
        version: version of the format.
    """

    title: str
    steps: tuple[Step, ...]
    why: str = ""
    paths: tuple[str, ...] = ()
    version: Literal[1] = 1


def read_recipe(data: bytes) -> Recipe:
    """Decode and check a recipe.

    Raises:
        ConfigError: it is no recipe, or it names an impossible path or name.
    """
    try:
        recipe = msgspec.json.decode(data, type=Recipe, strict=True)
    except msgspec.DecodeError as error:
        shown = data[:80].decode(errors="replace")
        raise ConfigError(
            "recipe", shown, f"is no recipe ({error})", "write it with `refactor prepare` or `move`"
        ) from None
    if not recipe.steps:
        raise ConfigError("steps", [], "is empty", "name at least one step")
    for field, path in _paths(recipe):
        _check_path(field, path)
    for field, name in _names(recipe):
        if not name.isidentifier():
            raise ConfigError(field, name, "is not a name of Python", "write an identifier")
    return recipe


def write_recipe(recipe: Recipe) -> bytes:
    """Return a recipe as indented JSON with a final newline. Equal recipes have equal bytes."""
    return msgspec.json.format(msgspec.json.encode(recipe), indent=2) + b"\n"


def recipe_path(recipe: Recipe) -> str:
    """Return the path of the recipe's file, made of its title."""
    slug = re.sub(r"[^a-z0-9]+", "-", recipe.title.lower()).strip("-")
    return f"{RECIPE_FOLDER}/{slug or 'recipe'}.json"


def _check_path(field: str, path: str) -> None:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or str(pure) != path:
        raise ConfigError(field, path, "is not a path from the root of the repository", "write it with plain slashes")


def _paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    yield from (("paths", path) for path in recipe.paths)
    for step in recipe.steps:
        match step:
            case Prepare():
                yield from (("component.file", step.component.file), ("host.file", step.host.file))
            case Move():
                files = (step.source.file, step.component.file, step.host.file)
                yield from zip(("source.file", "component.file", "host.file"), files, strict=True)
            case Rename():
                yield "owner.file", step.owner.file
            case RenameFile():
                yield from (("file", step.file), ("to", step.to))
            case Replace():
                yield "file", step.file


def _names(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for step in recipe.steps:
        match step:
            case Prepare():
                yield from (("component.name", step.component.name), ("host.name", step.host.name))
                yield from (("attribute", step.attribute), ("method", step.method))
                for port in step.ports:
                    yield from (("ports.name", port.name), ("ports.protocol", port.protocol))
                    yield from (("ports.members", member) for member in port.members)
                yield from (("fields.name", field.name) for field in step.fields)
            case Move():
                classes = (step.source.name, step.component.name, step.host.name)
                yield from zip(("source.name", "component.name", "host.name"), classes, strict=True)
                yield "attribute", step.attribute
                yield from (("methods", name) for name in step.methods)
                yield from (("states", name) for name in step.states)
            case Rename():
                yield from (("owner.name", step.owner.name), ("old", step.old), ("new", step.new))
