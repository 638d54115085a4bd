"""What an examination finds: how bad, what, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import attrs

from observability.terminal_text import printable

__all__ = ["Finding", "Severity", "exit_code"]


class Severity(StrEnum):
    """OK is as it should be; WARNING works but will hurt; ERROR does not work."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@attrs.frozen
class Finding:
    """One thing that was looked at; ``mend`` is empty when nothing has to be done."""

    severity: Severity
    what: str
    mend: str = ""

    def __str__(self) -> str:
        line = printable(f"{self.severity.upper():<7} {self.what}")
        return f"{line}\n        -> {printable(self.mend)}" if self.mend else line


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when anything does not work, else 0: warnings alone do not fail."""
    return int(any(finding.severity is Severity.ERROR for finding in findings))
