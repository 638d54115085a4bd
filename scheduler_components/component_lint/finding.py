"""A finding, and a report of findings as text or JSON."""

from __future__ import annotations

import msgspec

from scheduler_components.component_lint.rules import RULES

__all__ = ["Finding", "LintReport", "finding"]


class Finding(msgspec.Struct, frozen=True, gc=False, order=True):
    """One smell in one place.

    Attributes:
        path: the file, as it was given or found.
        line: counted from 1.
        rule: an id of ``RULES``.
        message: what stands there.
        hint: what to do instead.
    """

    path: str
    line: int
    rule: str
    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}; {self.hint}"


class LintReport(msgspec.Struct, frozen=True, gc=False):
    """What a run found.

    Attributes:
        num_files: files read.
        num_suppressed: findings that a comment with a reason took out.
        findings: by file and line.
    """

    num_files: int
    num_suppressed: int
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 when something was found, else 0."""
        return 1 if self.findings else 0

    def as_text(self) -> str:
        """One line a finding, and a last line that counts."""
        count = f"files: {self.num_files}, findings: {len(self.findings)}, suppressed: {self.num_suppressed}"
        return "\n".join([*map(str, self.findings), count])

    def as_json(self) -> str:
        """The report's fields as one JSON object."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def finding(rule: str, line: int, message: str) -> Finding:
    """Make a finding whose file is not known yet; the hint is the rule's."""
    return Finding("", line, rule, message, RULES[rule].hint)
