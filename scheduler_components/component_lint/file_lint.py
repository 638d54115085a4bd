"""The checker over files and folders."""

from __future__ import annotations

import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from scheduler_components.component_lint.finding import Finding, LintReport, finding
from scheduler_components.component_lint.rules import LintOptions
from scheduler_components.component_lint.source_lint import lint_source
from scheduler_components.errors import ConfigError

__all__ = ["lint_paths"]

_DEFAULTS = LintOptions()


def lint_paths(paths: Iterable[Path], options: LintOptions = _DEFAULTS) -> LintReport:
    """Check files, and every ``*.py`` below folders. Hidden folders and ``__pycache__`` are left out.

    Raises:
        ConfigError: a path does not exist, or a folder has no Python file.
    """
    findings: list[Finding] = []
    num_files = num_suppressed = 0
    for file in dict.fromkeys(file for path in paths for file in _files_at(path)):
        report = _lint_file(file, options)
        num_files += report.num_files
        num_suppressed += report.num_suppressed
        findings.extend(report.findings)
    return LintReport(num_files, num_suppressed, tuple(sorted(findings)))


def _lint_file(file: Path, options: LintOptions) -> LintReport:
    try:
        with tokenize.open(file) as text:  # honours the file's own encoding line
            source = text.read()
    except (SyntaxError, UnicodeDecodeError) as error:
        return _unreadable(file, str(error))
    except OSError as error:
        return _unreadable(file, error.strerror or str(error))
    return lint_source(source, str(file), options)


def _unreadable(file: Path, problem: str) -> LintReport:
    found = finding("not-python", 1, problem)
    return LintReport(1, 0, (Finding(str(file), found.line, found.rule, found.message, found.hint),))


def _files_at(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise ConfigError("path", str(path), "does not exist", "give a Python file or a folder of them")
    below = [file for file in sorted(path.rglob("*.py")) if not _is_hidden(file.relative_to(path))]
    if not below:
        raise ConfigError("path", str(path), "has no Python file", "give a folder of Python source")
    yield from below


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
