"""A comment with a reason takes out exactly what it names, where it stands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components.component_lint.source_lint import lint_source

IGNORE = "# component-lint: ignore[{}] kept for code that names it"
LINES = (
    "class LoadMixin:",
    "    def get_loads(self):",
    "        if self.enabled:",
    "            return 1",
    "        return 2 if self.enable_more else 3",
)
RULES = {1: "mixin", 3: "enabled-gate", 5: "enabled-gate"}


def rules_of(source: str) -> list[tuple[int, str]]:
    return [(each.line, each.rule) for each in lint_source(source).findings]


def test_without_comments_all_is_found() -> None:
    assert rules_of("\n".join(LINES)) == list(RULES.items())


@given(lines=st.sets(st.sampled_from(list(RULES)), min_size=1))
@settings(deadline=None, max_examples=20)
def test_a_comment_on_the_line_takes_out_that_line_alone(lines: set[int]) -> None:
    commented = [
        f"{text}  {IGNORE.format(RULES[number])}" if number in lines else text for number, text in enumerate(LINES, 1)
    ]
    # The comment of line 1 stands on the line of the class, but names the mixin alone.
    report = lint_source("\n".join(commented))
    assert [(each.line, each.rule) for each in report.findings] == [
        (number, rule) for number, rule in RULES.items() if number not in lines
    ]
    assert report.num_suppressed == len(lines)


@pytest.mark.parametrize(
    ("above", "left"), [("the method", [(1, "mixin")]), ("the first branch", [(1, "mixin"), (6, "enabled-gate")])]
)
def test_a_comment_alone_covers_the_statement_below(above: str, left: list[tuple[int, str]]) -> None:
    place = 1 if above == "the method" else 2
    source = "\n".join([*LINES[:place], IGNORE.format("enabled-gate"), *LINES[place:]])
    assert rules_of(source) == left


def test_a_comment_on_a_definition_covers_all_of_it() -> None:
    source = "\n".join([f"{LINES[0]}  {IGNORE.format('mixin, enabled-gate')}", *LINES[1:], "x = 1"])
    report = lint_source(source)
    assert report.findings == ()
    assert report.num_suppressed == 3


def test_a_comment_above_a_decorator_covers_the_class() -> None:
    source = f"{IGNORE.format('mixin')}\n@final\nclass LoadMixin: ...\n"
    assert rules_of(source) == []


def test_a_comment_may_share_its_line_with_another_tools() -> None:
    assert rules_of(f"class LoadMixin: ...  # noqa: N801 {IGNORE.format('mixin')}") == []


def test_a_comment_that_ignores_nothing_is_itself_found() -> None:
    source = "\n".join([*LINES, f"x = 1  {IGNORE.format('any-field')}"])
    assert (6, "unused-suppression") in rules_of(source)


def test_a_bad_comment_suppresses_nothing() -> None:
    source = "class LoadMixin: ...  # component-lint: ignore[mixin]"
    assert rules_of(source) == [(1, "bad-suppression"), (1, "mixin")]


def test_the_rules_about_comments_cannot_be_suppressed() -> None:
    source = "x = 1  # component-lint: ignore[unused-suppression] no"
    assert rules_of(source) == [(1, "bad-suppression")]
