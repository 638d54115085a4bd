"""Test the plugin in flake8: registration, selection, ``# noqa``, per-file ignores, options and broken files."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.metadata import entry_points
from itertools import combinations
from pathlib import Path

import pytest
from flake8.main.cli import main
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_refactor.component_lint import RULES, ComponentChecker

Lint = Callable[..., list[tuple[int, str]]]

LINES = (
    "class LoadMixin:",
    "    def get_loads(self):",
    "        if self.enabled:",
    "            return 1",
    "        return 2 if self.enable_more else 3",
)
FOUND = {1: "SCH002", 3: "SCH009", 5: "SCH009"}
WIDE = """
class Load:
    def __init__(self, a, b, clock: "Callable[[], float]"):
        self.a = a
        self.b = b
        self.clock = clock
class Made:
    def __init__(self, a, b, c):
        self.all = (a, b, c)
from collections.abc import Callable
"""


def test_the_installed_package_registers_the_checker() -> None:
    (found,) = [each for each in entry_points(group="flake8.extension") if each.name == "SCH"]
    assert found.load() is ComponentChecker


def test_codes_have_the_registered_prefix_and_consecutive_numbers() -> None:
    assert list(RULES) == [f"SCH{number:03}" for number in range(1, len(RULES) + 1)]
    assert len({rule.name for rule in RULES.values()}) == len(RULES)


def test_a_problem_is_one_line_with_position_code_message_and_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.py"
    path.write_text("if x:\n    class LoadMixin:\n        pass\n")
    assert main(["--isolated", "--jobs=1", "--select=SCH", str(path)]) == 1
    message = "SCH002 LoadMixin is a mixin: it reads and writes the fields of its host class"
    assert capsys.readouterr().out == f"{path}:2:5: {message}; {RULES['SCH002'].hint}\n"


def test_flake8_selects_and_ignores_codes(lint: Lint) -> None:
    source = "\n".join(LINES)
    assert lint(source) == list(FOUND.items())
    assert lint(source, "--select=SCH009") == [(3, "SCH009"), (5, "SCH009")]
    assert lint(source, "--extend-ignore=SCH009") == [(1, "SCH002")]
    assert lint(source, "--per-file-ignores=old_*.py:SCH", name="old_parts.py") == []


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("commented", [each for size in (1, 2, 3) for each in combinations(FOUND, size)])
def test_a_noqa_comment_accepts_its_code_on_its_line_only(lint: Lint, commented: tuple[int, ...], others: bool) -> None:
    noqa = {
        number: f"  # noqa: {'E501, ' if others else ''}{FOUND[number]} kept for code that names it"
        for number in commented
    }
    source = "\n".join(text + noqa.get(number, "") for number, text in enumerate(LINES, 1))
    assert lint(source) == [(number, code) for number, code in FOUND.items() if number not in commented]
    assert lint(source, "--disable-noqa") == list(FOUND.items())


def test_a_noqa_comment_with_another_code_has_no_effect(lint: Lint) -> None:
    assert lint("class LoadMixin: ...  # noqa: SCH001") == [(1, "SCH002")]


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ([], []),
        (["--sch-max-fields=2"], ["SCH003"]),
        (["--sch-max-parameters=2"], ["SCH010", "SCH010"]),
        (["--sch-max-fields=2", "--sch-max-parameters=2"], ["SCH003", "SCH010"]),
        (["--sch-max-callables=0"], ["SCH005"]),
    ],
)
def test_options_set_the_limits(lint: Lint, options: list[str], codes: list[str]) -> None:
    assert sorted(code for _, code in lint(WIDE, *options)) == codes


def test_the_configuration_file_sets_the_limits(lint: Lint) -> None:
    """A later run in the same process without the option uses the default again."""
    assert lint(WIDE, config="sch-max-fields = 2") == [(2, "SCH003")]
    assert lint(WIDE) == []


@pytest.mark.parametrize("limit", ["-1", "seven", ""])
def test_an_invalid_limit_is_rejected(lint: Lint, capsys: pytest.CaptureFixture[str], limit: str) -> None:
    with pytest.raises(SystemExit) as raised:
        lint(WIDE, f"--sch-max-fields={limit}")
    assert raised.value.code == 2
    assert "--sch-max-fields" in capsys.readouterr().err


def test_the_declared_encoding_of_a_file_is_used(lint: Lint) -> None:
    assert lint("# coding: latin-1\nclass ÄMixin: ...\n".encode("latin-1")) == [(2, "SCH002")]


@pytest.mark.parametrize("content", [b"class A(:\n", b"x = '\0'\n"])
def test_flake8_reports_a_file_that_does_not_parse(lint: Lint, content: bytes) -> None:
    assert lint(content) == []
    assert {code for _, code in lint(content, "--select=SCH,E9")} <= {"E902", "E999"} != set()


@pytest.mark.soak
@given(source=st.text(max_size=200))
@settings(deadline=None, max_examples=num_examples(4))
@example("class A:\n  x: 'b c' = 1")
@example("class A(B[0], *c, d()): ...")
@example("@a[0]\n@b()()\nclass A:\n  x: 1 = 2\n  y: ''\n  z: [()] = 3")
@example("class A:\n  def __init__(): self.x = x\n  def f(*self): self.y[0].z()\n  def init_(*, a): ...")
@example("class A(A): ...\nclass A(A): ...")
@example("get_x()\nfrom . import get_x\nget_x().y\n(lambda: get_x()[0])()")
def test_any_code_that_parses_gives_problems_within_the_file(source: str) -> None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    num_lines = len(source.splitlines()) + 1
    for line, column, text, checker in ComponentChecker(tree, "a.py").run():
        assert 1 <= line <= num_lines
        assert column >= 0
        assert text.split(" ", 1)[0] in RULES
        assert checker is ComponentChecker
