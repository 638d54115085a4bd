"""The tests mirror the product: each module with behaviour has a test file of its name, and each test file a module.

``scheduler_components/cache/page_pool.py`` is tested in ``tests/cache/test_page_pool.py``. A large subject has further
files (``test_page_pool_machine.py``) or a folder (``tests/page_pool/``). The other packages keep their names.
"""

from __future__ import annotations

import ast
from pathlib import Path, PurePath

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"

DECLARATIONS = {
    "observability/kv_stream/instructions.py": "instructions",
    "observability/kv_stream/stream_stats.py": "values",
    "scheduler_components/_internal/old_name_table.py": "a table",
    "scheduler_components/values/page_operations.py": "instructions, events and decisions",
    "scheduler_components/ports/control.py": "ports",
    "scheduler_refactor/commands/output.py": "one function",
    "scheduler_components/ports/decisions.py": "ports and their null objects",
    "scheduler_components/ports/grammar.py": "ports",
    "scheduler_components/ports/kv_events.py": "ports",
    "scheduler_components/ports/load.py": "ports",
    "scheduler_components/ports/metrics.py": "ports and their null objects",
    "scheduler_components/ports/outputs.py": "ports and their null objects",
    "scheduler_components/ports/pages.py": "ports and their null objects",
    "scheduler_components/ports/pools.py": "ports and their null objects",
    "scheduler_components/ports/scheduling.py": "ports",
    "scheduler_components/ports/stats.py": "a port",
    "scheduler_engine/frontend/errors.py": "errors",
    "scheduler_engine/text/text_tokenizer.py": "a port",
    "scheduler_components/values/batches.py": "values",
    "scheduler_components/values/metric.py": "a description, and a value",
    "scheduler_components/values/decisions.py": "values",
    "scheduler_components/values/forward_pass.py": "values",
    "scheduler_components/values/kv_events.py": "values",
    "scheduler_components/values/grammar.py": "values",
    "scheduler_components/values/outputs.py": "values",
    "scheduler_components/values/receive.py": "values",
    "scheduler_components/values/request_span.py": "values",
    "scheduler_components/values/sessions.py": "values",
    "scheduler_components/values/stats.py": "values",
    "scheduler_components/values/tiers.py": "values",
    "scheduler_components/values/waiting.py": "values",
}
"""Modules without a test file, because they declare something and do nothing. A function in them is one expression."""

TOGETHER = {
    "scheduler_refactor/test_harness.py": "workload_search",
    "scheduler_refactor/test_measurement.py": "leave_order measure_report source_index source_tree",
    "scheduler_refactor/test_move.py": "apply body_checks code_edits host_tree prepare refusals rename text_edits",
    "kv_events/test_endpoints.py": "stream_address",
}
"""Modules of a folder that are tested as one subject, by the test file of that subject."""

SUBJECTS = {
    "benchmarks": "tests of benchmarks/",
    "scheduler_refactor": "docs/refactor, and the package of that name",
    "worlds": "simulated worlds, next to their modules",
    "observability/test_alerts.py": "the alert rules",
    "test_deploy.py": "the files of deploy/",
    "test_docs.py": "the documents",
    "test_examples.py": "docs/examples",
    "test_footprint.py": "what one part loads",
    "test_layers.py": "imports of all modules",
    "test_mirror.py": "this file",
    "test_rank_gating.py": "the publishing components over all ranks of an engine",
    "test_site.py": "the documents as a site",
    "test_wheel.py": "the packaged wheel",
    "engines/test_measured_sglang_vllm_transformers.py": "docs/refactor/measured.md",
    "engines/test_moved_mixin_sglang.py": "recipes on a real scheduler",
    "engines/test_refactor_page_sglang.py": "docs/refactor/sglang.md",
    "engines/test_transformers_attached.py": "docs/examples/transformers_engine.py",
    "engines/test_transformers_context_parallel.py": "a real model on attention-CP ranks, with HiCache",
    "engines/test_transformers_model_types.py": "the types of models that are served without consent",
    "engines/test_transformers_weights.py": "weights of a real model under transformers",
}
"""Test files and folders whose subject is not one module."""


def mirrored(path: Path) -> PurePath:
    """Return where the tests of a module are, below ``tests``: its path without the suffix."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return PurePath(*parts[parts[0] == "scheduler_components" :])


MODULES = {
    mirrored(path): path.relative_to(ROOT).as_posix()
    for package in ("scheduler_components", "observability", "scheduler_engine", "scheduler_refactor")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.stem not in ("__init__", "__main__", "_version")
}
TESTED_TOGETHER = {PurePath(test).parent / name: test for test, modules in TOGETHER.items() for name in modules.split()}
TEST_FILES = sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))


def module_of(test: PurePath) -> PurePath | None:
    """Return the module that a test file belongs to: the one with the longest name that begins the file's."""
    words = test.stem.removeprefix("test_").split("_")
    for end in range(len(words), 0, -1):
        name = "_".join(words[:end])
        for module in (test.parent / name, test.parent / f"_{name}"):
            if module in MODULES:
                return module
    return test.parent if test.parent in MODULES else None


def test_each_module_has_a_test_file_of_its_name() -> None:
    tested = {module_of(test) for test in TEST_FILES}
    wrong = []
    for module, path in MODULES.items():
        if path in DECLARATIONS:
            wrong += [f"{path} has tests: take it out of DECLARATIONS"] * (module in tested)
        elif module in TESTED_TOGETHER:
            wrong += [f"{path} has tests: take it out of TOGETHER"] * (module in tested)
        elif module not in tested:
            file = module.parent / ("test_" + module.name.strip("_"))
            wrong.append(f"{path} has no test: write tests/{file}.py")
    assert wrong == []


def test_a_declaration_does_nothing() -> None:
    """A function has one expression; one with behaviour needs a test file for its module."""
    behaviour = []
    for path in DECLARATIONS:
        for function in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                body = [each for each in function.body if not isinstance(each, ast.Expr | ast.Pass)]
                if len(body) > 1 or not all(isinstance(each, ast.Return | ast.Raise) for each in body):
                    behaviour.append(f"{path}: {function.name}")
    assert behaviour == []


def test_each_test_file_belongs_to_a_module() -> None:
    strays = [
        f"tests/{test}: no module has this name"
        for test in TEST_FILES
        if test.as_posix() not in SUBJECTS and test.parts[0] not in SUBJECTS and module_of(test) is None
    ]
    assert strays == []


def test_the_exceptions_exist() -> None:
    assert set(DECLARATIONS) <= set(MODULES.values())
    assert TESTED_TOGETHER.keys() <= MODULES.keys()
    assert all((TESTS / name).exists() for name in (*SUBJECTS, *TOGETHER))
