"""Cut, paste and insert whole statements of a module with libcst, which keeps comments and formatting of all others.

A function moves with its decorators and the comments directly above it. Blank lines between functions are no part of
them: one blank line separates a pasted function from what is above it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from typing import TypeAlias

from scheduler_components._internal.extras import naming_extras

with naming_extras:
    import libcst as cst

TopStatement: TypeAlias = cst.SimpleStatementLine | cst.BaseCompoundStatement
_BLANK = cst.EmptyLine(indent=False)


def parse_code(text: str) -> cst.Module:
    """Parse a file. Its code is the text again, byte for byte."""
    return cst.parse_module(text)


def find_class(module: cst.Module, name: str) -> cst.ClassDef | None:
    """Return the class of that name among the module's own statements."""
    return next((each for each in module.body if isinstance(each, cst.ClassDef) and each.name.value == name), None)


def take_functions(module: cst.Module, owner: str, names: Collection[str]) -> tuple[cst.Module, list[cst.FunctionDef]]:
    """Cut the functions of those names out of a class; return the module without them, and the functions in order."""
    source = find_class(module, owner)
    if source is None or not isinstance(source.body, cst.IndentedBlock):
        return module, []
    members = _statements(source.body)
    taken = [each for each in members if isinstance(each, cst.FunctionDef) and each.name.value in names]
    kept = [each for each in members if each not in taken]
    if kept and members[0] in taken:  # what is first now is not set off from the line of the class
        kept[0] = _with_leading(kept[0], _without_blank(kept[0].leading_lines))
    body = source.body.with_changes(body=kept or [cst.parse_statement("pass")])
    return _put_class(module, source, source.with_changes(body=body)), taken


def append_functions(module: cst.Module, owner: str, functions: Sequence[cst.FunctionDef]) -> cst.Module:
    """Paste functions at the end of a class. The annotation of ``self`` goes, because it named another class."""
    target = find_class(module, owner)
    if target is None or not isinstance(target.body, cst.IndentedBlock):
        return module
    pasted = [_with_leading(_own_self(each), [_BLANK, *_without_blank(each.leading_lines)]) for each in functions]
    old = [each for each in target.body.body if not _is_pass(each)]
    if not old:
        pasted[:1] = [_with_leading(each, _without_blank(each.leading_lines)) for each in pasted[:1]]
    footer, moved = _split_footer(target.body.footer)
    if pasted and moved:  # comments at the end of the class stay above what is appended
        pasted[0] = _with_leading(pasted[0], [*moved, *pasted[0].leading_lines])
    body = target.body.with_changes(body=[*old, *pasted], footer=footer)
    return _put_class(module, target, target.with_changes(body=body))


def is_empty_class(module: cst.Module, name: str) -> bool:
    """Whether a class has nothing but a docstring or ``pass``."""
    source = find_class(module, name)
    if source is None or not isinstance(source.body, cst.IndentedBlock):
        return False
    return all(_is_pass(each) or _is_text(each) for each in source.body.body)


def lost_comments(module: cst.Module, name: str) -> list[str]:
    """Return the comments and the docstring that go with an emptied class."""
    source = find_class(module, name)
    if source is None or not isinstance(source.body, cst.IndentedBlock):
        return []
    lines = [*source.leading_lines, *source.body.footer]
    lines += [line for each in _statements(source.body) for line in each.leading_lines]
    found = [line.comment.value for line in lines if line.comment is not None]
    if source.body.header.comment is not None:
        found.append(source.body.header.comment.value)
    return found


def remove_class(module: cst.Module, name: str) -> cst.Module:
    """Remove a class with the comments directly above it."""
    return module.with_changes(
        body=[each for each in module.body if not (isinstance(each, cst.ClassDef) and each.name.value == name)]
    )


def drop_base(module: cst.Module, name: str, base: str) -> cst.Module:
    """Remove a base from the list of a class; without bases the parentheses go."""
    source = find_class(module, name)
    if source is None:
        return module
    kept = [each for each in source.bases if module.code_for_node(each.value).rpartition(".")[2] != base]
    if kept and source.bases[-1] not in kept:
        kept[-1] = kept[-1].with_changes(comma=source.bases[-1].comma)
    bare = not kept and not source.keywords
    marks = {"lpar": cst.MaybeSentinel.DEFAULT, "rpar": cst.MaybeSentinel.DEFAULT} if bare else {}
    return _put_class(module, source, source.with_changes(bases=kept, **marks))


def add_statements(module: cst.Module, code: str, above: str) -> cst.Module:
    """Insert top-level code above a class, or at the end if `above` is empty. Two blank lines are on both sides."""
    fresh = list(cst.parse_module(code).body)
    fresh = [_with_leading(each, [_BLANK, _BLANK, *_without_blank(each.leading_lines)]) for each in fresh]
    body = list(module.body)
    place = next(
        (number for number, each in enumerate(body) if isinstance(each, cst.ClassDef) and each.name.value == above),
        len(body),
    )
    if place < len(body) and not any(not line.comment for line in body[place].leading_lines):
        body[place] = _with_leading(body[place], [_BLANK, _BLANK, *body[place].leading_lines])
    return module.with_changes(body=[*body[:place], *fresh, *body[place:]])


def insert_in_method(module: cst.Module, owner: str, method: str, before: str, code: str) -> tuple[cst.Module, int]:
    """Insert statements into a method, before the statement whose first line is `before`.

    Returns:
        The module, and the number of statements with that line: the module is unchanged unless it is one. Without
        `before` the place is the beginning, behind the docstring, and the number is 1.
    """
    source = find_class(module, owner)
    found = [] if source is None else [each for each in source.body.body if _is_function(each, method)]
    if source is None or len(found) != 1:
        return module, 0
    (function,) = found
    assert isinstance(function, cst.FunctionDef)
    body = _statements(function.body)
    if before:
        places = [number for number, each in enumerate(body) if _first_line(module, each) == before.strip()]
    else:
        places = [1 if body and _is_text(body[0]) else 0]
    if len(places) != 1 or not isinstance(function.body, cst.IndentedBlock):
        return module, len(places)
    fresh = list(cst.parse_module(code).body)
    if before:  # comments stay with the statement below
        blank = [line for line in body[places[0]].leading_lines if line.comment is None]
        if blank and body[places[0]].leading_lines[0].comment is None:
            fresh[0] = _with_leading(fresh[0], [_BLANK])
            body[places[0]] = _with_leading(body[places[0]], _without_blank(body[places[0]].leading_lines))
    body[places[0] : places[0]] = fresh
    changed = function.with_changes(body=function.body.with_changes(body=body))
    members = [changed if each is function else each for each in source.body.body]
    return _put_class(module, source, source.with_changes(body=source.body.with_changes(body=members))), 1


def add_delegates(module: cst.Module, owner: str, code: str) -> cst.Module:
    """Append methods, given as the code of a class body without indentation, to a class."""
    functions = [each for each in cst.parse_module(code).body if isinstance(each, cst.FunctionDef)]
    return append_functions(module, owner, functions)


def drop_imports(module: cst.Module, names: Collection[str], *, only_types: bool = False) -> cst.Module:
    """Remove imported names wherever the module's own statements bind them.

    Args:
        module: the module.
        names: the bound names.
        only_types: look below ``if TYPE_CHECKING:`` only.
    """
    body: list[TopStatement] = []
    for statement in module.body:
        if _is_type_block(statement):
            assert isinstance(statement, cst.If)
            inner = [each for old in _statements(statement.body) for each in _without_names(old, names)]
            if inner:
                body.append(statement.with_changes(body=statement.body.with_changes(body=inner)))
        elif only_types:
            body.append(statement)
        else:
            body += _without_names(statement, names)
    return module.with_changes(body=body)


def add_imports(module: cst.Module, statements: Sequence[str], *, types: bool = False) -> cst.Module:
    """Add import statements in the order of isort: to a statement of the same module, or as a new one.

    Args:
        module: the module.
        statements: one import per text.
        types: add them below ``if TYPE_CHECKING:``, which is made if it is missing.
    """
    for text in statements:
        fresh = cst.parse_statement(text)
        assert isinstance(fresh, cst.SimpleStatementLine)
        if types:
            module = _add_type_import(module, fresh)
        else:
            module = module.with_changes(body=_with_import(list(module.body), fresh))
    return module


def _add_type_import(module: cst.Module, fresh: cst.SimpleStatementLine) -> cst.Module:
    body = list(module.body)
    for number, statement in enumerate(body):
        if _is_type_block(statement):
            assert isinstance(statement, cst.If)
            inner = _with_import(_statements(statement.body), fresh)
            body[number] = statement.with_changes(body=statement.body.with_changes(body=inner))
            return module.with_changes(body=body)
    module = add_imports(module, ["from typing import TYPE_CHECKING"])
    body = list(module.body)
    place = max(number for number, each in enumerate(body) if _import_of(each)) + 1
    block = cst.If(test=cst.Name("TYPE_CHECKING"), body=cst.IndentedBlock(body=[fresh]), leading_lines=[_BLANK])
    return module.with_changes(body=[*body[:place], block, *body[place:]])


def _with_import(body: list[TopStatement], fresh: cst.SimpleStatementLine) -> list[TopStatement]:
    """Return a block of statements with one more import."""
    new = _import_of(fresh)
    assert new is not None
    for number, statement in enumerate(body):
        old = _import_of(statement)
        if old is None or _import_key(old) != _import_key(new):
            continue
        if isinstance(old, cst.Import) or isinstance(new, cst.Import):
            return body
        body[number] = statement.with_changes(body=[_merged(old, new)])
        return body
    imports = [number for number, each in enumerate(body) if _import_of(each) is not None]
    place = next(
        (number for number in imports if _order(body[number]) > _order(fresh)),
        imports[-1] + 1 if imports else (1 if body and _is_text(body[0]) else 0),
    )
    before = body[place - 1] if place else None
    after = body[place] if place < len(body) else None
    alone = before is None or _import_of(before) is None or _order(before)[0] != _order(fresh)[0]
    joined = after is not None and _import_of(after) is not None and _order(after)[0] == _order(fresh)[0]
    if after is not None and joined:  # it becomes the first of its section
        fresh = fresh.with_changes(leading_lines=after.leading_lines)
        body[place] = _with_leading(after, [])
    else:
        fresh = fresh.with_changes(leading_lines=[_BLANK] if alone and place else [])
        if after is not None and not any(line.comment is None for line in after.leading_lines[:1]):
            body[place] = _with_leading(after, [_BLANK, *after.leading_lines])
    return [*body[:place], fresh, *body[place:]]


def _merged(old: cst.ImportFrom, new: cst.ImportFrom) -> cst.ImportFrom:
    if isinstance(old.names, cst.ImportStar) or isinstance(new.names, cst.ImportStar):
        return old
    names = list(old.names)
    known = {_bound(each) for each in names}
    for alias in new.names:
        if _bound(alias) in known:
            continue
        place = next((number for number, each in enumerate(names) if _name_key(each) > _name_key(alias)), len(names))
        if place == len(names):
            last = names[-1]
            comma = names[-2].comma if len(names) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            names[-1] = last.with_changes(comma=comma)
            names.append(alias.with_changes(comma=last.comma))
        else:
            comma = names[place].comma
            if isinstance(comma, cst.MaybeSentinel) or place == len(names) - 1:
                comma = names[0].comma if len(names) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            names.insert(place, alias.with_changes(comma=comma))
    return old.with_changes(names=names)


def _without_names(statement: TopStatement, names: Collection[str]) -> list[TopStatement]:
    found = _import_of(statement)
    if found is None or isinstance(found.names, cst.ImportStar):
        return [statement]
    kept = [alias for alias in found.names if _bound(alias) not in names]
    if len(kept) == len(found.names):
        return [statement]
    if not kept:
        return []
    if found.names[-1] not in kept:
        kept[-1] = kept[-1].with_changes(comma=found.names[-1].comma)
    return [statement.with_changes(body=[found.with_changes(names=kept)])]


def _import_of(statement: cst.CSTNode) -> cst.Import | cst.ImportFrom | None:
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        only = statement.body[0]
        if isinstance(only, cst.Import | cst.ImportFrom):
            return only
    return None


def _import_key(node: cst.Import | cst.ImportFrom) -> str:
    return _module_name(node) if isinstance(node, cst.ImportFrom) else f"import {_code(node)}"


def _module_name(node: cst.Import | cst.ImportFrom) -> str:
    if isinstance(node, cst.Import):
        return _code(node.names[0].name)
    return "." * len(node.relative) + (_code(node.module) if node.module is not None else "")


def _order(statement: cst.CSTNode) -> tuple[int, bool, str]:
    """Return the place of an import: future, standard library, others, relative; plain imports first."""
    node = _import_of(statement)
    assert node is not None
    name = _module_name(node)
    root = name.partition(".")[0]
    if name == "__future__":
        section = 0
    elif name.startswith("."):
        section = 3
    else:
        section = 1 if root in sys.stdlib_module_names else 2
    return section, isinstance(node, cst.ImportFrom), name.lower()


def _bound(alias: cst.ImportAlias) -> str:
    if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
        return alias.asname.name.value
    return _code(alias.name).partition(".")[0]


def _name_key(alias: cst.ImportAlias) -> tuple[int, str]:
    """Return the order of names in one statement: constants, classes, others."""
    name = _code(alias.name)
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name


def _code(node: cst.CSTNode) -> str:
    return cst.Module(body=[]).code_for_node(node)


def _first_line(module: cst.Module, statement: cst.CSTNode) -> str:
    text = module.code_for_node(statement)
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return re.sub(r"\s+#.*$", "", lines[0]).strip() if lines else ""


def _statements(block: cst.BaseSuite) -> list[TopStatement]:
    """Return the statements of an indented block; those on the line of its head are none."""
    return [each for each in block.body if isinstance(each, TopStatement)]


def _put_class(module: cst.Module, old: cst.ClassDef, new: cst.ClassDef) -> cst.Module:
    return module.with_changes(body=[new if each is old else each for each in module.body])


def _with_leading(node: TopStatement, lines: Sequence[cst.EmptyLine]) -> TopStatement:
    return node.with_changes(leading_lines=lines)


def _without_blank(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Return the lines from the first comment on."""
    first = next((number for number, line in enumerate(lines) if line.comment is not None), len(lines))
    return list(lines[first:])


def _split_footer(footer: Sequence[cst.EmptyLine]) -> tuple[list[cst.EmptyLine], list[cst.EmptyLine]]:
    last = max((number for number, line in enumerate(footer) if line.comment is not None), default=-1)
    return list(footer[last + 1 :]), list(footer[: last + 1])


def _own_self(function: cst.FunctionDef) -> cst.FunctionDef:
    first = (*function.params.posonly_params, *function.params.params)[:1]
    if not first or first[0].annotation is None or first[0].name.value != "self":
        return function
    bare = first[0].with_changes(annotation=None)
    field = "posonly_params" if function.params.posonly_params else "params"
    rest = getattr(function.params, field)[1:]
    return function.with_changes(params=function.params.with_changes(**{field: [bare, *rest]}))


def _is_function(node: cst.CSTNode, name: str) -> bool:
    return isinstance(node, cst.FunctionDef) and node.name.value == name


def _is_pass(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1 and isinstance(node.body[0], cst.Pass)


def _is_text(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.SimpleStatementLine)
        and len(node.body) == 1
        and isinstance(node.body[0], cst.Expr)
        and isinstance(node.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


def _is_type_block(node: cst.CSTNode) -> bool:
    if not isinstance(node, cst.If) or node.orelse is not None or not isinstance(node.body, cst.IndentedBlock):
        return False
    return _code(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
