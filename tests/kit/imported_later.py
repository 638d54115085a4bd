"""Modules that take seconds to import: only the worker that runs their tests imports them, not each that collects."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["ImportedLater"]


class ImportedLater:
    """A module that is imported at its first use. A test that uses it is skipped if it is not installed.

    Args:
        name: the module's full name.
        least_version: an older version is skipped as well.
        reason: how to install it.
    """

    def __init__(self, name: str, least_version: str | None = None, *, reason: str) -> None:
        self._name, self._least_version, self._reason = name, least_version, reason

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every name of a test file for `__test__` when it collects
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name, self._least_version, reason=self._reason), attribute)
