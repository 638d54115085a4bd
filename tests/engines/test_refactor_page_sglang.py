"""The page on SGLang's remaining mixins names methods that the installed SGLang has, and leaves out none."""

from __future__ import annotations

import ast
import fnmatch
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine]

PAGE = Path(__file__).parents[2] / "docs" / "refactor" / "sglang.md"
FILES = {
    "SchedulerDisaggregationDecodeMixin": "disaggregation/decode.py",
    "SchedulerDisaggregationPrefillMixin": "disaggregation/prefill.py",
    "SchedulerDllmMixin": "dllm/mixin/scheduler.py",
    "SchedulerMlxOverlapMixin": "hardware_backend/mlx/scheduler_mixin.py",
    "SchedulerMultiplexMixin": "multiplex/multiplexing_mixin.py",
    "SchedulerPPMixin": "managers/scheduler_pp_mixin.py",
}
NOT_NAMED = {"SchedulerDisaggregationPrefillMixin": 5, "SchedulerDllmMixin": 9}
"""Methods that the page counts and does not name."""


@pytest.mark.parametrize("mixin", FILES)
def test_the_table_covers_each_method(mixin: str) -> None:
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("`make engines` makes an environment with sglang")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "srt" / FILES[mixin]).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == mixin)
    methods = [node.name for node in found.body if isinstance(node, ast.FunctionDef)]
    section = re.search(rf"\| \*\*`{mixin}`\*\* \((\d+) methods\)(.*?)(\| \*\*|\n\n)", PAGE.read_text(), re.DOTALL)
    assert section is not None
    assert int(section[1]) == len(methods)
    named: set[str] = set()
    for row in section[2].splitlines()[1:]:
        for pattern in re.findall(r"`([\w*]+)`", row.split("|")[1]):
            matched = fnmatch.filter(methods, pattern)
            assert matched, pattern
            named.update(matched)
    assert len(set(methods) - named) == NOT_NAMED.get(mixin, 0), set(methods) - named
