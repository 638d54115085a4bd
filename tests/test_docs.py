"""The documents are correct: their code runs and prints the output below it, generated parts are up to date, and links
work in the repository. ``test_site.py`` reads the site."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from code import InteractiveConsole
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from kit.documents import REFERENCE, ROOT
from kit.forked_programs import Ran, run_programs

from observability.catalog import render_markdown
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_engine.cli.commands import COMMANDS, GROUPS, make_app

pytestmark = pytest.mark.processes

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
PACKAGES = ("scheduler_components", "observability", "scheduler_engine", "scheduler_refactor")
CONTINUED = {"docs/tutorial.md"}
"""Documents whose blocks continue the blocks before them. Elsewhere each block runs alone."""

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
"""A block of code, and the block of text right below it with the output."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def programs() -> Iterator[tuple[str, str, str]]:
    """Yield the name, the code and the output of each program."""
    for path in DOCUMENTS:
        blocks = BLOCK.findall(path.read_text())
        if name(path) in CONTINUED:
            blocks = [tuple("".join(parts) for parts in zip(*blocks, strict=True))]
        for number, (code, printed) in enumerate(blocks):
            yield f"{name(path)}-{number}", code, printed


PROGRAMS = list(programs())


@pytest.fixture(scope="module")
def ran() -> dict[str, Ran]:
    """How each program ended, by its name."""
    names, codes, _ = zip(*PROGRAMS, strict=True)
    imports = {module for code in codes for module in re.findall(r"^(?:from|import) ([\w.]+)", code, re.MULTILINE)}
    imports |= {"observability.kv_stream.zmq_stream", "scheduler_components.kv_events.config"}  # behind lazy names
    imports |= {"observability.prometheus_schedulers", "scheduler_components.kv_events.zmq_publisher"}
    return dict(zip(names, run_programs(codes, imports=sorted(imports)), strict=True))


@pytest.mark.parametrize(("program", "printed"), [(program, printed) for program, _, printed in PROGRAMS])
def test_python_blocks_run_and_print_the_text_below(program: str, printed: str, ran: dict[str, Ran]) -> None:
    assert ran[program].code == 0, ran[program].err
    assert ran[program].out == printed or not printed


def test_python_blocks_are_formatted_and_their_imports_sorted(tmp_path: Path) -> None:
    """Except for empty lines, because a prompt ends a definition at one. One run of ruff reads all blocks as files."""
    blocks = {
        tmp_path / f"{name(path).replace('/', '-')}-{number}.py": block
        for path in DOCUMENTS
        for number, (block, _) in enumerate(BLOCK.findall(path.read_text()))
    }
    for file, block in blocks.items():
        file.write_text(block)
    options = ["--quiet", "--no-cache", "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
    for command in (["check", "--select", "I"], ["format"]):
        checked = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options], cwd=ROOT, check=False, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr

    def filled_lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if line]

    changed = [file.name for file, block in blocks.items() if filled_lines(file.read_text()) != filled_lines(block)]
    assert changed == []


class Prompt(InteractiveConsole):
    """Python's prompt, which reads a pasted block line by line. It compiles, and runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.complaints = ""

    def runcode(self, code: CodeType) -> None:
        """Ignore the statement."""

    def write(self, data: str) -> None:
        self.complaints += data


def test_python_blocks_can_be_pasted_into_a_prompt() -> None:
    """There an empty line ends a definition, and only an empty line does."""
    complaints = []
    for path in DOCUMENTS:
        for block, _ in BLOCK.findall(path.read_text()):
            prompt = Prompt()
            for line in [*block.splitlines(), ""]:
                prompt.push(line)
            complaints += [f"{name(path)}: {prompt.complaints}"] * (prompt.complaints != "")
    assert complaints == []


def test_the_tutorial_runs_at_a_prompt() -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text())
    pasted = "".join(f"{block}\n" for block, _ in blocks)
    command = [sys.executable, "-W", "error", "-i", "-q", "-c", "import sys; sys.ps1 = sys.ps2 = ''"]
    ran = subprocess.run(command, input=pasted, check=False, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr.strip()) == (0, "")
    assert [line for _, printed in blocks for line in printed.splitlines()] == [
        line for line in ran.stdout.splitlines() if not re.match(r"(MatchResult|<|Prefix)", line)
    ]


@cache
def anchors(path: Path) -> set[str]:
    """The anchors that a forge gives to a document's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_within_the_project_work() -> None:
    broken = []
    for path in DOCUMENTS:
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            target, _, anchor = link.partition("#")
            if "://" in target:
                continue
            file = path.parent / target if target else path
            is_of_the_site = file.resolve() in REFERENCE.values()  # which a strict build looks up
            if not file.exists() or (anchor and not is_of_the_site and anchor not in anchors(file)):
                broken.append(f"{name(path)}: {link}")
    assert broken == []


def test_a_blank_line_precedes_each_list() -> None:
    """A forge forgives the missing line; the site would show one long paragraph."""
    joined = []
    for path in DOCUMENTS:
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        found = re.findall(r"^[A-Za-z`*_\[(].*\n(?:[-*]|\d+\.) .*", text, re.MULTILINE)
        joined += [f"{name(path)}: {lines}" for lines in found]
    assert joined == []


def test_the_index_links_to_every_document() -> None:
    index = ROOT / "docs" / "README.md"
    reached, waiting = {index}, [index]
    while waiting:
        page = waiting.pop()
        targets = re.findall(r"\]\(([^)#:]+\.md)", page.read_text())
        found = {(page.parent / target).resolve() for target in targets} - reached
        reached |= found
        waiting += found
    assert {path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")} <= reached


def test_every_named_command_exists() -> None:
    for path in set(DOCUMENTS) - {ROOT / "CHANGELOG.md", ROOT / "docs" / "upgrading.md"}:  # which name the past, too
        # A line of a log is quoted, and begins with the name, too.
        named = set(re.findall(r'(?<!")scheduler-components ([a-z]+(?:-[a-z]+)*)', path.read_text()))
        known = COMMANDS.keys() | GROUPS.keys() | {"refactor"}
        assert named <= known, f"{path}: {named - known}"


def test_the_metrics_table_is_the_catalogue() -> None:
    assert render_markdown().strip() in (ROOT / "docs" / "metrics.md").read_text()


ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
CODE_PAGES = ("ARCHITECTURE.md", "docs/invariants.md", "docs/threads.md", "docs/wire.md", "docs/how-to/extend.md")
"""Pages about the code, whose paths and names must exist."""
CODE_TEXT = "\n".join((ROOT / page).read_text() for page in CODE_PAGES)
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
SPANS = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", CODE_TEXT, flags=re.MULTILINE | re.DOTALL))
"""The text between backticks on these pages, outside of their diagrams."""
DIAGRAMS = re.findall(r"^```mermaid\n(.*?)^```$", CODE_TEXT, re.MULTILINE | re.DOTALL)


def places(path: str) -> list[Path]:
    """The files that a path may name: below the repository, or below a package."""
    candidates = [ROOT / path, *(ROOT / package / path for package in PACKAGES)]
    return [place for place in candidates if place.exists()]


def test_every_path_on_the_pages_about_code_exists() -> None:
    paths = [span for span in SPANS if re.fullmatch(r"[\w./-]+(/|\.(py|md|json))", span) and not span.startswith("/")]
    assert len(paths) > 100
    names = {path.name for path in SOURCES}
    assert [path for path in paths if not places(path) and path not in names] == []


NAMES_OF_OTHERS = {"prometheus_client", "event_publishers", "NullX", "attrs", "frozen", "msgspec", "Struct"}
"""Names in these pages that the kit does not define."""


@cache
def bound_names(path: Path) -> frozenset[str]:
    """Return every name that a file binds: modules, classes, functions, parameters, fields, constants."""
    found = {*path.relative_to(ROOT).with_suffix("").parts}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(found)


def test_every_name_of_the_glossary_is_defined_in_its_file() -> None:
    named = re.findall(r"`(\w+)` \(`([\w./]+)`\)", (ROOT / "docs" / "glossary.md").read_text())
    assert len(named) > 60
    wrong = []
    for defined, place in named:
        files = [path for path in SOURCES if place in name(path)]
        if not any(defined in bound_names(path) for path in files):
            wrong.append(f"{defined} is not in {place}")
    assert wrong == []


def test_every_name_on_the_pages_about_code_exists() -> None:
    """Names with capitals, underscores, dots or parentheses; in diagrams, names with capitals inside."""
    known = {bound for path in [*SOURCES, ROOT / "tests" / "test_layers.py"] for bound in bound_names(path)}
    known |= NAMES_OF_OTHERS
    chains = [found[1] for span in SPANS if (found := re.fullmatch(r"([A-Za-z_][\w.]*\w)(?:\(\w*\))?", span))]
    spoken = [chain for chain in chains if re.search(r"[A-Z_.]", chain) and not chain.endswith((".py", ".md", ".json"))]
    spoken += [found for diagram in DIAGRAMS for found in re.findall(r"\b[A-Z]\w*[a-z][A-Z]\w*\b", diagram)]
    assert len(spoken) > 100
    unknown = {chain for chain in spoken if not set(chain.split(".")) <= known}
    assert {chain for chain in unknown if not chain.endswith("_")} == set()  # a name that ends so is a prefix


def load_writer(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_code_map_shows_the_docstrings() -> None:
    """Else run ``make generated``."""
    assert load_writer("make_code_map").render_code_map() == (ROOT / "docs" / "code-map.md").read_text()


def test_the_layers_of_the_architecture_are_those_of_the_imports() -> None:
    """Else run ``make generated``."""
    writer = load_writer("make_code_map")
    assert [name for layer in writer.read_layers() for name in layer] != []
    assert writer.with_layers(ARCHITECTURE) == ARCHITECTURE


def test_the_names_of_the_upgrading_page_are_those_that_work() -> None:
    """Else run ``make generated``."""
    page = (ROOT / "docs" / "upgrading.md").read_text()
    assert load_writer("make_upgrading").with_names(page) == page


@pytest.mark.parametrize("event", [BlockStored, BlockRemoved, AllBlocksCleared])
def test_the_wire_page_has_the_fields_of_each_event_in_their_order(event: type) -> None:
    written = re.search(rf'`\["{event.__name__}"([^`]*)\]`', (ROOT / "docs" / "wire.md").read_text())
    assert written
    assert re.findall(r"\w+", written[1]) == list(event.__struct_fields__)


def test_every_package_that_exports_names_has_a_page_of_reference() -> None:
    inits = [init for package in PACKAGES for init in (ROOT / package).rglob("__init__.py")]
    exporting = [".".join(init.parent.relative_to(ROOT).parts) for init in inits if "__all__" in init.read_text()]
    shown = [each for each in exporting if not each.startswith("scheduler_engine")]  # an example engine
    assert set(shown) <= set(REFERENCE)


WITHOUT_A_PAGE = {"events", "load_publisher", "server_info", "sync"}
"""Files whose other names serve this kit only."""
OPEN_PACKAGES = (".", "scheduling", "agreement", "waiting", "checks", "receiving")
"""Packages whose files users import from."""


def exported_names(path: Path) -> set[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_every_component_in_a_flat_file_is_on_a_page_of_reference() -> None:
    shown = {each for module in REFERENCE for each in importlib.import_module(module).__all__}
    flat = [(ROOT / "scheduler_components" / package).glob("[!_]*.py") for package in OPEN_PACKAGES]
    hidden = {
        path.stem
        for path in chain.from_iterable(flat)
        if exported_names(path) - shown and path.stem not in WITHOUT_A_PAGE
    }
    assert hidden == set()


def test_a_flowchart_in_other_mermaid_is_an_error() -> None:
    hook = load_writer("site_hooks/flowcharts")
    assert hook.draw('flowchart LR\n    a["one"] -->|label| b["two"]\n    b --> a\n').count("<rect") == 2
    for text in ("graph LR\n    a --> b\n", "flowchart LR\n    a --> b --> c\n"):
        with pytest.raises(hook.FlowchartError):
            hook.draw(text)


HERE = re.findall(
    r"^\|[^|]+\| (\*\*[^|]+)\|", (ROOT / "docs" / "explanation" / "side-by-side.md").read_text(), re.MULTILINE
)
"""What this kit has of each feature that the comparison names."""


def test_every_option_and_route_of_the_comparison_exists() -> None:
    assert len(HERE) > 25
    spans = [span for cell in HERE for span in re.findall(r"`([^`]+)`", cell)]
    completion = make_app().generate_completion(shell="bash")
    options = [span.partition(" ")[0] for span in spans if span.startswith("--")]
    assert len(options) > 5
    assert [option for option in options if not re.search(rf"{option}(?![\w-])", completion)] == []
    sources = "\n".join(path.read_text() for path in SOURCES)
    left_out = {route for cell in HERE for route in re.findall(r"no `(/\w+)`", cell)}
    routes = {span.partition("NAME")[0] for span in spans if span.startswith("/")} - left_out
    assert len(routes) > 5
    assert {route for route in routes if f'"{route}' not in sources} == set()
    commands = {span for span in spans if re.fullmatch(r"[a-z]+", span)}
    assert commands <= COMMANDS.keys()


def test_every_feature_of_the_comparison_is_here_partly_here_or_left_out() -> None:
    assert {cell[: cell.index("**", 2) + 2] for cell in HERE} == {
        "**yes**",
        "**partly**",
        "**refused**",
        "**left out**",
    }
