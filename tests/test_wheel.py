"""The wheels install in a clean environment, import with and without extras, and run a demo."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import scheduler_components

ROOT = Path(__file__).parent.parent
WHEELS = {
    ".": ("scheduler_components", "observability"),
    "scheduler_engine": ("scheduler_engine",),
    "scheduler_refactor": ("scheduler_refactor",),
}
"""The folder that each wheel is built from, and the packages that it has."""
KIT, ENGINE, REFACTOR = WHEELS
PACKAGES = WHEELS[KIT]
CORE = """
import sys
from scheduler_components import ParallelState, RadixCache, SchedulerKvEventsPublisher
cache = RadixCache(page_size=2, capacity_tokens=16, record=True)
config = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:*", "bind": true}'
publisher = SchedulerKvEventsPublisher.open(config, parallel=ParallelState.trivial(), source=cache)
cache.insert([1, 2, 3, 4], cache.allocate(2))
publisher.publish_kv_events()
publisher.shutdown()
assert publisher.stats().batches_sent == 1
assert not {"prometheus_client", "starlette", "cyclopts", "hypothesis"} & set(sys.modules)
"""
LINT = ("--isolated", "--require-plugins", "scheduler-components-refactor", "--select", "SCH")
# Opens every name of every door; prints the modules that are not installed, which extras bring.
DOORS = """
import importlib, sys
missing = set()
for door in map(importlib.import_module, sys.argv[1:]):
    for name in door.__all__:
        try:
            getattr(door, name)
        except ModuleNotFoundError as error:
            missing.add(error.name.partition(".")[0])
print(*sorted(missing))
"""
DEMO = ("demo", "--dp-size", "1", "--attn-cp-size", "1", "--attn-tp-size", "2", "--requests", "4", "--speed", "4")

pytestmark = [pytest.mark.packaging, pytest.mark.processes, pytest.mark.timeout(300)]  # the package index may be slow


def run(*command: str | Path, cwd: Path) -> str:
    """Run in a folder from which the checkout cannot be imported; returns what it printed."""
    ran = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


Built = dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist and the wheel of each folder. The wheel was built from the sdist and not from the checkout."""
    found = {}
    for folder in WHEELS:
        out = tmp_path_factory.mktemp("built")
        run(sys.executable, "-m", "build", "--outdir", out, ROOT / folder, cwd=out)
        (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
        found[folder] = sdist, wheel
    return found


@pytest.fixture(scope="module")
def clean(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment that has the kit's wheel and its core dependencies alone."""
    environment = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(environment)
    programs = environment / "bin"
    install(programs, str(built[KIT][1]))
    return programs


def install(programs: Path, *requirements: str) -> None:
    """Install in one call, so that no wheel of this repository is fetched from the index. The kit must come first."""
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", *requirements, cwd=programs)


def files_of(package: str) -> set[str]:
    """Every file of a package in the checkout, by its path in a wheel."""
    files = (path.relative_to(ROOT) for path in (ROOT / package).rglob("*") if path.is_file())
    return {str(path) for path in files if "__pycache__" not in path.parts}


@pytest.mark.parametrize("folder", WHEELS)
def test_a_wheel_has_every_file_of_its_packages_and_no_other(built: Built, folder: str) -> None:
    """Type marker, dashboard and golden bytes among them; no test, benchmark or document."""
    with zipfile.ZipFile(built[folder][1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {file for package in WHEELS[folder] for file in files_of(package)}
    assert names == expected - {f"{folder}/pyproject.toml"}
    assert {f"{package}/py.typed" for package in WHEELS[folder]} <= names
    assert folder != KIT or "observability/grafana/dashboard.json" in names


def test_the_description_on_an_index_page_has_no_link_that_breaks_there(built: Built) -> None:
    """An index page has none of the repository's files: a link is to the web, or to a heading of the page."""
    with zipfile.ZipFile(built[KIT][1]) as archive:
        [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        fields, _, description = archive.read(path).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in fields
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert [target for target in targets if not target.startswith(("https://", "http://", "#"))] == []
    headings = re.findall(r"^#+ (.+)$", description, re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert {target for target in targets if target.startswith("#")} <= anchors
    readme = (ROOT / "README.md").read_text()
    assert headings == re.findall(r"^#+ (.+)$", readme, re.MULTILINE), "the description is the README"
    assert "CHANGELOG.md lists changes" in " ".join(description.split()), "a link lost its text"


def test_the_sdist_has_what_a_reader_needs(built: Built) -> None:
    with tarfile.open(built[KIT][0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "docs/README.md"} <= names
    assert "mkdocs.yml" in names
    assert "tests/test_wheel.py" in names
    assert not [name for name in names if name.startswith("site/")], "the built documentation is not shipped"


def test_every_door_opens_in_what_is_installed(clean: Path) -> None:
    """Without extras: what is not there is a library of an extra, never a file of the packages."""
    inits = [init for package in PACKAGES for init in (ROOT / package).rglob("__init__.py")]
    doors = [".".join(init.parent.relative_to(ROOT).parts) for init in inits if "__all__" in init.read_text()]
    kit = [door for door in doors if not door.startswith(("scheduler_engine", "scheduler_refactor.component_lint"))]
    missing = run(clean / "python", "-W", "error", "-c", DOORS, *kit, cwd=clean).split()
    assert set(missing) <= {
        "httpx",
        "hypothesis",
        "nats",
        "numpy",
        "opentelemetry",
        "prometheus_client",
        "starlette",
        "torch",
    }


def test_the_core_runs_without_extras_then_the_engine_with_its_own(built: Built, clean: Path) -> None:
    run(clean / "python", "-W", "error", "-c", CORE, cwd=clean)
    bare = subprocess.run(
        [clean / "python", "-m", "scheduler_components"], check=False, capture_output=True, text=True, cwd=clean
    )
    assert (bare.returncode, bare.stderr.count("\n")) == (1, 1)
    assert "pip install 'scheduler-components[engine]'" in bare.stderr
    install(clean, f"{built[KIT][1]}[engine]", str(built[ENGINE][1]))
    assert run(clean / "scheduler-components", "--version", cwd=clean).strip() == scheduler_components.__version__
    assert "PASS" in run(clean / "scheduler-components", *DEMO, cwd=clean)


def test_flake8_finds_the_plugin_and_the_command_line_its_further_commands(
    built: Built, clean: Path, tmp_path: Path
) -> None:
    install(clean, *(str(built[each][1]) for each in (KIT, ENGINE)), f"{built[REFACTOR][1]}[lint,refactor]")
    path = tmp_path / "load.py"
    path.write_text("class LoadMixin: ...\n")
    ran = subprocess.run([clean / "flake8", *LINT, path], check=False, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert ran.stdout.startswith(f"{path}:1:1: SCH002 ")
    assert "measure" in run(clean / "scheduler-components", "refactor", "--help", cwd=clean)
