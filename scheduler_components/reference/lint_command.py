"""The command ``scheduler-components lint-components``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scheduler_components.component_lint import RULES, LintOptions, lint_paths

__all__ = ["lint_components"]

_DEFAULTS = LintOptions()


def lint_components(
    paths: Annotated[list[Path] | None, typer.Argument(help="Python files, or folders of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    max_fields: Annotated[int, typer.Option(help="Fields of one component.")] = _DEFAULTS.max_fields,
    max_callables: Annotated[int, typer.Option(help="Callables among them.")] = _DEFAULTS.max_callables,
    rules: Annotated[bool, typer.Option("--rules", help="Say what is looked for, and stop.")] = False,
) -> int:
    """Find mixins in disguise and other smells of components in anyone's code, by reading it; exit code 1 if any."""
    if rules:
        for rule in RULES.values():
            typer.echo(f"{rule.id}: {rule.smell}; {rule.hint}")
        return 0
    if not paths:
        raise typer.BadParameter("give a Python file or a folder of them", param_hint="'PATHS'")
    report = lint_paths(paths, LintOptions(max_fields=max_fields, max_callables=max_callables))
    typer.echo(report.as_json() if as_json else report.as_text())
    return report.exit_code
