"""Test the page about the codes: each "Before" breaks exactly its code, and each "After" breaks none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from scheduler_refactor.component_lint import RULES, Limits

Lint = Callable[..., list[tuple[int, str]]]

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "lint-components.md").read_text()
SECTIONS = dict(re.findall(r"^## (SCH\d+) [\w-]+\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
IMPORTS = """
import zmq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
"""


def block(code: str, title: str) -> str:
    (found,) = re.findall(rf"^{title}:\n\n```py\n(.*?)^```", SECTIONS[code], re.MULTILINE | re.DOTALL)
    return IMPORTS + found


def test_each_code_has_one_section() -> None:
    assert re.findall(r"^## (SCH\d+ [\w-]+)$", PAGE, re.MULTILINE) == [f"{r.code} {r.name}" for r in RULES.values()]


def test_the_table_equals_the_rules() -> None:
    rows = re.findall(r"^\| \[(SCH\d+)\]\(#(.*?)\) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert rows == [(r.code, f"{r.code.lower()}-{r.name}", r.name, r.subject, r.hint) for r in RULES.values()]


def test_the_page_lists_each_limit_with_its_default() -> None:
    rows = re.findall(r"^\| `--sch-([\w-]+)` \| (\d+) \|", PAGE, re.MULTILINE)
    assert rows == [(limit.name.replace("_", "-"), str(limit.default)) for limit in attrs.fields(Limits)]


@pytest.mark.parametrize("code", RULES)
def test_the_before_breaks_only_its_code(lint: Lint, code: str) -> None:
    assert {found for _, found in lint(block(code, "Before"))} == {code}


@pytest.mark.parametrize("code", RULES)
def test_the_after_breaks_none(lint: Lint, code: str) -> None:
    assert lint(block(code, "After")) == []
