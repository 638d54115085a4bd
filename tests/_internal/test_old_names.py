"""Every public name of 0.4 works where it was, with a warning that names the place where it is now."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from scheduler_components._internal.old_name_table import OLD_NAMES, REMOVED_NAMES

pytestmark = pytest.mark.processes

NAMES = (Path(__file__).parent / "names_of_0_4.txt").read_text().split()
"""What the pages of the reference listed in 0.4.0."""
REMOVED = ("observability.simulation.", "observability.testing.Recovery", "observability.testing.Traffic")
"""What judged this repository's own cores alone: they are simulated worlds below ``tests`` now."""


def read(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def forget_old_modules() -> None:
    """A module that is loaded already does not warn again."""
    for module in [each for each in sys.modules if each in OLD_NAMES]:
        del sys.modules[module]


def test_every_public_name_of_0_4_works() -> None:
    failed = []
    for name in NAMES:
        if name.startswith(REMOVED) or name in REMOVED_NAMES:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(name)
        except (ImportError, AttributeError) as error:
            failed.append(f"{name}: {error}")
    assert failed == []


def test_an_old_name_warns_and_the_new_one_does_not() -> None:
    forget_old_modules()
    for old, new in OLD_NAMES.items():
        load = read if old in NAMES else importlib.import_module
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = load(old)
        assert f"{old} is {new} now, and goes in 0.6" in {str(each.message) for each in caught}
        assert {each.category for each in caught} == {DeprecationWarning}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert load is not read or read(new) is found
            importlib.import_module(new.rpartition(".")[0] if load is read else new)


def test_the_warning_points_to_the_line_that_uses_the_old_name(tmp_path: Path) -> None:
    program = tmp_path / "old.py"
    program.write_text("from scheduler_components.agreed_queue import AgreedQueue\nprint(AgreedQueue.__name__)\n")
    ran = subprocess.run([sys.executable, "-W", "always", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "AgreedQueue\n")
    assert re.search(rf"{program}:1: DeprecationWarning: scheduler_components\.agreed_queue is ", ran.stderr)


def test_a_removed_name_says_what_to_write_instead() -> None:
    for name, instead in REMOVED_NAMES.items():
        assert name in NAMES
        with warnings.catch_warnings(), pytest.raises(AttributeError) as raised:
            warnings.simplefilter("ignore")
            read(name)
        assert str(raised.value) == f"{name} was removed in 0.5: {instead}"


def test_a_name_that_never_was_is_an_error() -> None:
    forget_old_modules()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("scheduler_components.never")
    with pytest.warns(DeprecationWarning), pytest.raises(AttributeError, match="never"):
        read("scheduler_components.agreed_queue.never")


def test_the_table_is_loaded_for_an_old_name_only() -> None:
    check = "import sys, scheduler_components.kv_events as kit; kit.KVEventsConfig; "
    check += "sys.exit('scheduler_components._internal.old_name_table' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
