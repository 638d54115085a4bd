"""The tables of measured schedulers are those of the installed engines."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from scheduler_refactor.measurement import find_host, measure_host
from scheduler_refactor.source_index import SourceIndex
from scheduler_refactor.source_tree import find_module_file, python_files, read_text

sys.path.append(str(Path(__file__).parents[2] / "docs" / "refactor"))

from measured import ENGINES, find_engine, render_engine, written_section, written_version

pytestmark = [pytest.mark.engine]
NUM_LINES, LIMIT_S = 45_000, 45.0


@pytest.mark.parametrize("name", ENGINES)
def test_the_tables_are_those_of_the_installed_engine(name: str) -> None:
    package = find_engine(name)
    if package is None:
        pytest.skip(f"`make engines` makes an environment with {name}")
    if name == "transformers" and version(name) != written_version(name):  # SGLang asks for an older one
        pytest.skip(f"the page measures transformers {written_version(name)}")
    assert render_engine(name, package) == written_section(name)


@pytest.mark.timing
def test_the_managers_of_sglang_are_measured_in_time() -> None:
    package = find_engine("sglang")
    if package is None:
        pytest.skip("`make engines` makes an environment with sglang")
    began = time.process_time()
    texts = {file.as_posix(): read_text(file) for file in python_files(package / "srt" / "managers")}
    assert sum(text.count("\n") for text in texts.values()) > NUM_LINES
    index = SourceIndex.parse(texts)
    index.find_module = find_module_file
    assert measure_host(index, find_host(index, "Scheduler")).parts
    assert time.process_time() - began < LIMIT_S
