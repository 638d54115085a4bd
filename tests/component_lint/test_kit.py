"""The kit keeps its own rules; each exception is named here with its reason."""

from __future__ import annotations

import re
from pathlib import Path

from scheduler_components.component_lint.file_lint import lint_paths

ROOT = Path(__file__).parent.parent.parent
KIT = [ROOT / "scheduler_components", ROOT / "observability"]
CHECKER = ROOT / "scheduler_components" / "component_lint"  # quotes the comment in its own documentation

EXCEPTIONS = {
    ("scheduler_components/hicache/mooncake_storage.py", "any-field"): "a C++ class without type information",
    (
        "scheduler_components/kv_events/zmq_publisher.py",
        "io-in-constructor",
    ): "code written for SGLang's class of this name counts on a listening publisher once it is made",
    (
        "scheduler_components/kv_events/zmq_sockets.py",
        "ambient-context",
    ): "inproc peers meet in one context only: the process's, where none is given",
    (
        "scheduler_components/reference/engine/rank_loop.py",
        "whole-scheduler",
    ): "drives the scheduler from above, which does not know it",
    ("scheduler_components/testing/zmq_probe.py", "io-in-constructor"): "a probe that listens once made",
    (
        "scheduler_components/testing/zmq_scripted_publisher.py",
        "io-in-constructor",
    ): "a fake of a publisher that listens once made",
    (
        "scheduler_components/testing/machines.py",
        "io-in-constructor",
    ): "Hypothesis makes a machine for each example: its constructor is the set-up",
}


def test_the_checker_finds_nothing_but_the_named_exceptions() -> None:
    findings = lint_paths(KIT).findings
    assert [
        str(each) for each in findings if (str(Path(each.path).relative_to(ROOT)), each.rule) not in EXCEPTIONS
    ] == []


def test_what_is_suppressed_in_place_is_named_too() -> None:
    for path in (path for folder in KIT for path in folder.rglob("*.py")):
        if not path.is_relative_to(CHECKER):
            for rules in re.findall(r"# component-lint: ignore\[([^\]]*)\]", path.read_text()):
                for rule in rules.split(","):
                    assert (str(path.relative_to(ROOT)), rule.strip()) in EXCEPTIONS
