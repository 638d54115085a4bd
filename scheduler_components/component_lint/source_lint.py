"""All rules over one file's text."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from pathlib import PurePath

import msgspec

from scheduler_components.component_lint.ambient_rules import check_ambient_context
from scheduler_components.component_lint.class_facts import read_class
from scheduler_components.component_lint.constructor_rules import check_constructors
from scheduler_components.component_lint.field_rules import check_fields
from scheduler_components.component_lint.finding import Finding, LintReport, finding
from scheduler_components.component_lint.gate_rules import check_enabled_gates
from scheduler_components.component_lint.mixin_rules import check_mixin, check_whole_scheduler
from scheduler_components.component_lint.names import ImportedNames
from scheduler_components.component_lint.rules import LintOptions
from scheduler_components.component_lint.suppressions import apply_suppressions, read_suppressions

__all__ = ["lint_source"]

_DEFAULTS = LintOptions()


def lint_source(source: str, path: str = "<source>", options: LintOptions = _DEFAULTS) -> LintReport:
    """Check the text of one file. Pure: nothing is read, imported or run.

    Args:
        source: Python source.
        path: what findings call the file.
        options: limits.
    """
    try:
        tree = ast.parse(source)
        suppressions = read_suppressions(source, tree)
        kept, num_suppressed = apply_suppressions(_findings(tree, PurePath(path).stem, options), suppressions)
    except SyntaxError as error:
        return _report(path, [finding("not-python", error.lineno or 1, error.msg)], 0)
    except (ValueError, RecursionError, tokenize.TokenError) as error:  # a null byte, expressions nested too deeply
        return _report(path, [finding("not-python", 1, str(error))], 0)
    return _report(path, kept, num_suppressed)


def _findings(tree: ast.Module, file_stem: str, options: LintOptions) -> Iterator[Finding]:
    names = ImportedNames(tree)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    siblings = {node.name: node for node in classes}
    for node in classes:
        facts = read_class(node, names, siblings)
        yield from check_mixin(facts)
        yield from check_whole_scheduler(facts)
        yield from check_fields(facts, names, options)
        yield from check_constructors(facts, names)
    yield from check_ambient_context(tree, names, file_stem)
    yield from check_enabled_gates(tree)


def _report(path: str, findings: list[Finding], num_suppressed: int) -> LintReport:
    placed = sorted(msgspec.structs.replace(each, path=path) for each in findings)
    return LintReport(1, num_suppressed, tuple(dict.fromkeys(placed)))
