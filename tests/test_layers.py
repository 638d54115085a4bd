"""The layers, read from the source: imports only go down, exported names are imported from their package, and sockets,
threads and devices are used in edge files."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
KIT = "scheduler_components"
WHEELS = {
    "scheduler_components": {"observability"},
    "observability": {"scheduler_components"},
    "scheduler_engine": {"scheduler_components", "observability"},
    "scheduler_refactor": {"scheduler_components", "observability"},
}
"""Which packages of this repository a package may import besides itself. The first two are one wheel."""
SOURCES = sorted(path for package in WHEELS for path in (ROOT / package).rglob("*.py"))

FLOORS = (
    ("_internal.old_name_table",),
    ("_internal.old_names",),
    ("_version", "errors", "events"),
    ("_internal",),
    ("values",),
    ("parallel_state",),
    ("ports",),
    ("agreement",),
    ("kv_events", "cache"),
    ("metrics", "hicache", "watchdog", "weight_updater"),
    ("load",),
    ("receiving", "input_blocker"),
    ("request_receiver",),
    ("checks",),
    ("invariant_checker",),
    ("kv_events_publisher", "load_inquirer", "metrics_emitter", "output_streamer", "internal_state"),
    ("forward_pass_publisher",),
    ("batch_result_processor",),
    ("scheduling",),
    ("waiting",),
    ("batcher",),
    ("scheduling.composition",),
    ("profiler_manager",),
    ("load_publisher", "server_info", "kv_pool_reader", "torch_weight_updater"),
    ("quiesce",),
    ("scheduler_components",),
    ("engines",),
    ("testing",),
    ("observability.kv_stream",),
    ("observability.routing",),
    ("observability",),
    ("observability.grafana", "observability.jetstream"),
    ("observability.relay",),
    ("__main__",),
    ("scheduler_refactor",),
    ("scheduler_engine.simulation",),
    ("scheduler_engine", "scheduler_engine.device", "scheduler_engine.text"),
    ("scheduler_engine.engine.log_output",),
    ("scheduler_engine.engine.messages", "scheduler_engine.engine.config", "scheduler_engine.engine.zmq_sockets"),
    ("scheduler_engine.engine.scheduler", "scheduler_engine.frontend"),
    ("scheduler_engine.engine.rank",),
    ("scheduler_engine.engine", "scheduler_engine.proxy"),
    ("scheduler_engine.cli",),
)
"""From the ground: a room may import rooms of lower floors, and its own. Names are below ``scheduler_components``."""
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

EDGE_PREFIXES = (
    "zmq_",
    "torch_",
    "thread_",
    "file_",
    "http_",
    "prometheus_",
    "mooncake_",
    "shm_",
    "nats_",
    "otel_",
    "llguidance_",
    "ray_",
)
EDGE_MODULES = {
    "zmq",
    "torch",
    "threading",
    "multiprocessing",
    "asyncio",
    "prometheus_client",
    "mooncake",
    "nats",
    "opentelemetry",
    "llguidance",
    "ray",
}
HYPOTHESIS_ROOMS = {
    "scheduler_refactor/harness.py",  # for a type
    "scheduler_refactor/workload_search.py",
    "scheduler_components/testing/strategies.py",
    "scheduler_components/testing/machines.py",
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    return name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(module: str) -> str:
    """The room of FLOORS that a module of the kit belongs to: the longest that fits."""
    short = module.removeprefix(f"{KIT}.")
    fitting = [room for room in FLOOR_OF if short == room or short.startswith(f"{room}.")]
    assert fitting, f"{module} has no layer: add it to FLOORS"
    return max(fitting, key=len)


def statements(block: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the statements of a block and of the blocks in it. A walk over their expressions, too, would take long."""
    for node in block:
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, name, ()))


@cache
def imports(path: Path) -> list[tuple[str, str]]:
    """Module and name of everything that a file imports, wherever in the file; TYPE_CHECKING blocks included."""
    found = []
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide which room is asked"
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def kit_imports(path: Path) -> Iterator[tuple[str, str]]:
    """What a file imports of the kit itself."""
    return ((module, what) for module, what in imports(path) if module.partition(".")[0] in WHEELS)


def exports(path: Path) -> list[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return [str(ast.literal_eval(each)) for each in node.value.elts]  # type: ignore[attr-defined]
    return []


@cache
def package_exports(package: str) -> frozenset[str]:
    path = ROOT / package.replace(".", "/") / "__init__.py"
    return frozenset(exports(path) if path.exists() else ())


# One test reads all files and names each one that breaks its rule: as a test per file and rule they would cost seconds.


def test_imports_only_go_down() -> None:
    upward = []
    for path in SOURCES:
        room = room_of(module_of(path))
        for module, _ in kit_imports(path):
            asked = room_of(module)
            if asked != room and FLOOR_OF[asked] >= FLOOR_OF[room]:
                upward.append(f"{name(path)} imports {module} from above")
    assert upward == []


def test_a_wheel_imports_only_the_wheels_below_it() -> None:
    wrong = []
    for path in SOURCES:
        package = path.relative_to(ROOT).parts[0]
        asked = {module.partition(".")[0] for module, _ in kit_imports(path)} - {package}
        wrong += [f"{name(path)} imports {each}" for each in sorted(asked - WHEELS[package])]
    assert wrong == []


def test_exported_names_are_imported_from_their_package() -> None:
    """What a package does not export is imported from one of its public modules."""
    wrong = []
    for path in SOURCES:
        room = room_of(module_of(path))
        for module, what in kit_imports(path):
            asked = room_of(module)
            package = asked if asked.startswith(tuple(WHEELS)) else f"{KIT}.{asked}"
            if asked == room or asked.startswith("scheduler_engine") or module == package:  # the engine exports nothing
                continue
            inner = module.removeprefix(f"{package}.")
            if inner.startswith("_") or "._" in inner:
                wrong.append(f"{name(path)} imports the private module {module}")
            if what in package_exports(package):
                wrong.append(f"{name(path)} imports {what} from {module}, not from {package}")
    assert wrong == []


def test_no_file_imports_itself_through_others() -> None:
    files = {module_of(path) for path in SOURCES}
    graph = {
        module_of(path): {
            module if module in files and f"{module}.{what}" not in files else f"{module}.{what}"
            for module, what in kit_imports(path)
        }
        - {module_of(path)}
        for path in SOURCES
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the files


def test_sockets_threads_and_devices_live_in_edge_files() -> None:
    wrong = []
    for path in SOURCES:
        if room_of(module_of(path)).startswith(("scheduler_engine", "testing")):
            continue
        found = EDGE_MODULES & {module.partition(".")[0] for module, _ in imports(path)}
        if found and not path.name.startswith(EDGE_PREFIXES):
            wrong.append(f"{name(path)} imports {', '.join(sorted(found))}")
    assert wrong == []


def test_only_strategies_and_machines_import_hypothesis() -> None:
    importing = {
        name(path)
        for path in SOURCES
        if any(module.partition(".")[0] in ("hypothesis", "pytest") for module, _ in imports(path))
    }
    assert importing <= HYPOTHESIS_ROOMS


PACKAGES = [path for path in SOURCES if path.name == "__init__.py" and exports(path)]


def test_a_package_has_every_name_that_it_exports() -> None:
    pytest.importorskip("torch")
    missing = []
    for path in PACKAGES:
        package = importlib.import_module(module_of(path))
        missing += [f"{module_of(path)} has no {name}" for name in package.__all__ if not hasattr(package, name)]
    assert missing == []


DOORS = "scheduler_components scheduler_components.kv_events scheduler_components.cache scheduler_components.load "
DOORS += "scheduler_components.metrics scheduler_components.hicache scheduler_components.testing observability "
DOORS += "scheduler_components.engines scheduler_components.request_receiver"


def expect_not_loaded(modules: list[str], heavy: tuple[str, ...]) -> None:
    """Import modules one after another in a fresh interpreter, and name the first that loads one of ``heavy``."""
    script = """
import importlib, json, sys
heavy = tuple(json.loads(sys.argv[1]))
inner = tuple(f"{each}." for each in heavy)
for module in sys.argv[2:]:
    importlib.import_module(module)
    if found := sorted(each for each in sys.modules if each in heavy or each.startswith(inner)):
        sys.exit(f"{module} loads {found}")
"""
    command = [sys.executable, "-c", script, json.dumps(heavy), *modules]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_importing_a_package_loads_no_heavy_module() -> None:
    heavy = "zmq torch pydantic hypothesis prometheus_client starlette httpx rich cyclopts numpy"
    expect_not_loaded(DOORS.split(), tuple(heavy.split()))


RANK_MODULES = (
    "scheduler_engine.engine.scheduler",
    "scheduler_engine.engine.rank",
    "scheduler_components.cache.radix_cache",
    "scheduler_components.cache.page_pool",
    "scheduler_components.hicache.cache",
    "scheduler_components.hicache.controller",
    "scheduler_components.hicache.tiers",
    "scheduler_components.hicache.transfers",
    "torch",
    "numpy",
)
"""What only the scheduler processes of the reference engine need."""


def test_the_frontend_process_loads_no_scheduler() -> None:
    parts = ("engine.messages", "engine.config", "frontend.frontend", "engine.engine", "engine.http_app")
    expect_not_loaded([f"scheduler_engine.{part}" for part in parts], RANK_MODULES)
