"""Documents say what is true: their code runs and prints what stands below it, what is generated is up to date, their
links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from observability.catalog import render_markdown
from scheduler_components.reference.commands import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
GENERATED = "docs/reference/"
CONTINUED = {"docs/tutorial.md"}
"""Documents whose blocks each go on from the ones before; in all others a block stands alone."""

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
"""A block of code, and the block of text right below it, which is what the code prints."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def programs() -> Iterator[object]:
    for path in DOCUMENTS:
        blocks = BLOCK.findall(path.read_text())
        if name(path) in CONTINUED:
            blocks = [tuple("".join(parts) for parts in zip(*blocks, strict=True))]
        for number, (code, printed) in enumerate(blocks):
            yield pytest.param(code, printed, id=f"{name(path)}-{number}")


@pytest.mark.parametrize(("code", "printed"), list(programs()))
def test_python_blocks_run_and_print_what_stands_below_them(code: str, printed: str) -> None:
    command = [sys.executable, "-W", "error", "-c", code]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == printed or not printed


def anchors(path: Path) -> set[str]:
    """The anchors that a forge gives to a document's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_within_the_project_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = path.parent / target if target else path
        assert file.exists(), f"{path}: {link}"
        assert not anchor or anchor in anchors(file), f"{path}: {link}"


def test_every_document_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    reached, waiting = {index}, [index]
    while waiting:
        page = waiting.pop()
        targets = re.findall(r"\]\(([^)#:]+\.md)", page.read_text())
        found = {(page.parent / target).resolve() for target in targets} - reached
        reached |= found
        waiting += found
    assert {path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")} <= reached


def test_every_command_that_is_named_exists() -> None:
    known = {
        (command.name or command.callback.__name__).replace("_", "-")
        for command in app.registered_commands
        if command.callback
    }
    for path in DOCUMENTS:
        named = set(re.findall(r"scheduler-components ([a-z]+(?:-[a-z]+)*)", path.read_text()))
        assert named <= known, f"{path}: {named - known}"


def test_the_metrics_table_is_the_catalogue() -> None:
    assert render_markdown().strip() in (ROOT / "docs" / "metrics.md").read_text()


@pytest.fixture
def make_reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that writes the reference; documents are no package that could be imported."""
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclass looks there for the module's names
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_docstrings_say(make_reference: ModuleType) -> None:
    written = {path.name: path.read_text() for path in (ROOT / GENERATED).glob("*.md")}
    assert written == make_reference.render(), "run python docs/make_reference.py"


def test_every_module_of_the_reference_exists(make_reference: ModuleType) -> None:
    for page in make_reference.PAGES:
        found = list(page.sources())
        assert found
        assert page.modules == "*" or len(found) == len(page.modules.split()), page.title
