"""Load the peers' publishers: installed ones, or files named by environment variables.

``BENCH_SGLANG_KV_EVENTS=/path/to/sglang/srt/disaggregation/kv_events.py`` and
``BENCH_VLLM_KV_EVENTS=/path/to/vllm/distributed/kv_events.py`` load this single file of a release, because the whole
package needs GPU libraries. Placeholders replace its other imports, which the publisher does not use while it
publishes.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PEERS = {
    "SGLang": ("sglang.srt.disaggregation.kv_events", "BENCH_SGLANG_KV_EVENTS"),
    "vLLM": ("vllm.distributed.kv_events", "BENCH_VLLM_KV_EVENTS"),
}


def find_peers() -> tuple[list[str], list[str]]:
    """Return the available peers, and one line per missing peer."""
    found, missing = [], []
    for name, (_, variable) in PEERS.items():
        try:
            load_peer(name)
        except ImportError as error:
            missing.append(f"{name} is not measured: {error} ({variable} may name its kv_events.py)")
        else:
            found.append(name)
    return found, missing


def load_peer(name: str) -> ModuleType:
    """Import a peer's KV events module.

    Raises:
        ImportError: the module is not installed and no file is named, or it cannot be loaded.
    """
    module_name, variable = PEERS[name]
    path = os.environ.get(variable)
    if not path:
        return importlib.import_module(module_name)
    alone = f"peer_{name.lower()}_kv_events"
    if alone in sys.modules:
        return sys.modules[alone]
    if not Path(path).is_file():
        raise ImportError(f"{variable}={path} is not a file")
    spec = importlib.util.spec_from_file_location(alone, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alone] = module  # msgspec looks a struct's module up by its name
    placeholders = Placeholders(module_name.partition(".")[0])
    sys.meta_path.insert(0, placeholders)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alone]
        raise
    finally:
        sys.meta_path.remove(placeholders)
    return module


class _PlaceholderClass(type):
    """A class with every attribute, such as the members of an enum."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _PlaceholderModule(ModuleType):
    """A module with a class for every capitalized name, and a function that returns a logger for any other."""

    __path__: list[str] = []  # noqa: RUF012 - a package that has no files
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return _PlaceholderClass(name, (), {"__init__": lambda *_, **__: None})
        return lambda *_, **__: logging.getLogger("peer")


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import any module of one package as a placeholder."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""
