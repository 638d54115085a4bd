"""The house's layers, read from the source: who may import whom, and which rooms may hold sockets and threads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("scheduler_components/**/*.py"), *ROOT.glob("observability/**/*.py")])
EDGE_PREFIXES = ("zmq_", "torch_", "thread_", "file_", "http_", "prometheus_", "mooncake_", "shm_")
EDGE_MODULES = {"zmq", "torch", "threading", "multiprocessing", "asyncio", "prometheus_client", "mooncake"}
MAX_LINES = 300
# The one door of the test kit: `scheduler-components conformance` is a check of the kit that people run by hand.
CONFORMANCE_COMMAND = ROOT / "scheduler_components" / "reference" / "conformance_command.py"


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; TYPE_CHECKING blocks included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide which room is asked"
            yield node.module or ""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_in(path: Path, *rooms: str) -> bool:
    return any(path.is_relative_to(ROOT / "scheduler_components" / room) for room in rooms)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_layers(path: Path) -> None:
    for module in imports(path):
        if is_in(path, ".") and not is_in(path, "reference", "testing"):
            assert not module.startswith("observability"), f"{name(path)} is inside a scheduler and imports {module}"
        if not path.is_relative_to(ROOT / "observability" / "testing"):
            assert not module.startswith("observability.testing"), f"{name(path)} imports {module}"
        if not is_in(path, "reference"):
            assert not module.startswith("scheduler_components.reference"), f"{name(path)} imports {module}"
        if not is_in(path, "testing") and path != CONFORMANCE_COMMAND:
            assert not module.startswith("scheduler_components.testing"), f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_sockets_threads_and_devices_live_in_edge_files(path: Path) -> None:
    if is_in(path, "reference", "testing") or path.name.startswith(EDGE_PREFIXES):
        return
    found = EDGE_MODULES & {module.partition(".")[0] for module in imports(path)}
    assert not found, f"{name(path)} imports {', '.join(found)} but is not an edge file"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_hypothesis_is_asked_for_in_strategies_and_machines_alone(path: Path) -> None:
    found = any(module.partition(".")[0] in ("hypothesis", "pytest") for module in imports(path))
    assert not found or is_in(path, "testing/strategies", "testing/machines"), name(path)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_fits_on_a_few_screens(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_importing_the_kit_loads_nothing_heavy() -> None:
    heavy = "zmq torch pydantic hypothesis prometheus_client starlette httpx rich typer numpy"
    script = f"import sys, scheduler_components; print(*[m for m in '{heavy}'.split() if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_importing_the_components_loads_no_sockets() -> None:
    modules = "ports parallel_state kv_events kv_events_publisher load_inquirer metrics_emitter cache.radix_cache"
    script = "import sys\n" + "".join(f"import scheduler_components.{module}\n" for module in modules.split())
    script += "print(*[m for m in ('zmq', 'torch', 'pydantic', 'hypothesis') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
