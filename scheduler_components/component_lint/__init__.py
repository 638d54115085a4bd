"""Smells of components in anyone's code, found without importing it."""

from __future__ import annotations

from scheduler_components.component_lint.file_lint import lint_paths
from scheduler_components.component_lint.rules import RULES, LintOptions

__all__ = ["RULES", "LintOptions", "lint_paths"]
