"""A missing library of an extra is an error that names the extra, wherever it is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

from scheduler_components import __version__
from scheduler_components._internal.extras import EXTRA_OF, naming_extras, require_modules
from scheduler_components.errors import MissingExtraError, StartError

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def read_wheel(folder: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the extras of a wheel, and what it needs itself."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"], project["dependencies"]


EXTRAS, _ = read_wheel(".")
OTHER_WHEELS = {
    "scheduler-components-engine": read_wheel("scheduler_engine"),
    "scheduler-components-refactor": read_wheel("scheduler_refactor"),
}

WITHOUT_EXTRAS = """
import importlib, json, pkgutil, sys, traceback
import observability, scheduler_components
from scheduler_components._internal.extras import EXTRA_OF, MissingExtraError


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRA_OF:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())
named, bare = {}, {}
for package in (scheduler_components, observability):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        if ".engines" in found.name or found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except MissingExtraError as error:
            named[found.name] = error.extra
        except Exception:
            bare[found.name] = traceback.format_exc()
print(json.dumps([named, bare]))
"""


@pytest.fixture(scope="module")
def without_extras() -> tuple[dict[str, str], dict[str, str]]:
    """Import every module without any extra: the extra that each names, and the other errors."""
    command = [sys.executable, "-W", "error", "-c", WITHOUT_EXTRAS]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    named, bare = json.loads(ran.stdout)
    return named, bare


def test_no_module_raises_a_bare_import_error(without_extras: tuple[dict[str, str], dict[str, str]]) -> None:
    assert without_extras[1] == {}


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("observability.http_status", "metrics"),
        ("observability.prometheus_schedulers", "metrics"),
        ("observability.jetstream.nats_writer", "jetstream"),
        ("scheduler_components.metrics.otel_spans", "otel"),
        ("scheduler_components.hicache.memory", "hicache"),
        ("scheduler_components.agreement.torch_sync", "torch"),
        ("scheduler_components.waiting.llguidance_backend", "grammar"),
        ("scheduler_components.testing.machines", "testing"),
    ],
)
def test_a_module_names_the_extra_that_it_needs(
    without_extras: tuple[dict[str, str], dict[str, str]], module: str, extra: str
) -> None:
    assert without_extras[0][module] == extra


def test_the_core_needs_no_extra(without_extras: tuple[dict[str, str], dict[str, str]]) -> None:
    needing = set(without_extras[0])
    assert needing.isdisjoint({"scheduler_components", "scheduler_components.kv_events", "observability.kv_stream"})
    assert not [name for name in needing if name.startswith("scheduler_components.cache")]


def test_the_error_is_a_start_error_and_an_import_error() -> None:
    with pytest.raises(MissingExtraError) as raised, naming_extras:
        raise ModuleNotFoundError("No module named 'nats.js'", name="nats.js")
    assert isinstance(raised.value, StartError) and isinstance(raised.value, ModuleNotFoundError)
    assert str(raised.value) == "nats: is not installed; pip install 'scheduler-components[jetstream]'"
    assert (raised.value.name, raised.value.extra) == ("nats", "jetstream")


def test_another_import_error_is_not_changed() -> None:
    with pytest.raises(ModuleNotFoundError) as raised, naming_extras:
        import nowhere  # type: ignore[import-not-found]  # noqa: F401
    assert type(raised.value) is ModuleNotFoundError


def test_a_required_module_is_checked_without_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(MissingExtraError, match=r"\[mooncake\]', or wait$"):
        require_modules("msgspec" if "msgspec" in EXTRA_OF else "numpy", "mooncake", otherwise="wait")


def requirements(extra: str) -> set[str]:
    """The distributions that an extra lists itself, or that the extra of another wheel lists, to which it points."""
    listed = list(EXTRAS[extra])
    if pointer := re.match(r"(scheduler-components-\w+)(?:\[(\w+)\])?==", listed[0]):
        extras, needed = OTHER_WHEELS[pointer[1]]
        listed = [*needed, *extras.get(pointer[2] or "", ())]
    return {re.split(r"[\[<>=;, ]", each)[0].lower().replace("_", "-") for each in listed}


@pytest.fixture(scope="module")
def installed() -> Mapping[str, list[str]]:
    """The distributions of each module. All their files are read for it."""
    return packages_distributions()


@pytest.mark.parametrize("module", EXTRA_OF)
def test_the_named_extra_installs_the_module(module: str, installed: Mapping[str, list[str]]) -> None:
    known = {"mooncake": ["mooncake-transfer-engine-non-cuda"], "nats": ["nats-py"]}  # not installed everywhere
    distributions = known.get(module) or installed.get(module)
    if distributions is None:
        pytest.skip(f"{module} is not installed")
    assert {each.lower().replace("_", "-") for each in distributions} & requirements(EXTRA_OF[module])


def test_status_routes_need_the_extra_http_alone() -> None:
    assert "scheduler-components[metrics]" in EXTRAS["http"]


def test_the_table_of_extras_is_that_of_the_package() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    _, _, table = page.partition("## Extras")
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(EXTRAS)


def test_all_wheels_have_one_version_and_ask_for_it() -> None:
    files = [
        ROOT / package / "_version.py" for package in ("scheduler_components", "scheduler_engine", "scheduler_refactor")
    ]
    assert len({path.read_text().partition("__version__")[2] for path in files}) == 1
    asked = [each for extra in EXTRAS.values() for each in extra]
    asked += [each for extras, needed in OTHER_WHEELS.values() for each in (*needed, *chain(*extras.values()))]
    pinned = [each for each in asked if re.match(r"scheduler-components(-\w+)?(\[[\w,]+\])?==", each)]
    assert len(pinned) > 5
    assert {each.partition("==")[2] for each in pinned} == {__version__}
