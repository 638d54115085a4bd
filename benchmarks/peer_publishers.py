"""The peers' own publishers, where they can be had: installed, or as a file named by an environment variable.

``BENCH_SGLANG_KV_EVENTS=/path/to/sglang/srt/disaggregation/kv_events.py`` and
``BENCH_VLLM_KV_EVENTS=/path/to/vllm/distributed/kv_events.py`` load that one file of a release, whose whole package
wants a GPU's libraries. What it imports from the rest of its package is replaced by placeholders: the publisher uses
none of it while it publishes.
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

__all__ = ["PEERS", "Placeholders", "find_peers", "load_peer"]

PEERS = {
    "SGLang": ("sglang.srt.disaggregation.kv_events", "BENCH_SGLANG_KV_EVENTS"),
    "vLLM": ("vllm.distributed.kv_events", "BENCH_VLLM_KV_EVENTS"),
}


def find_peers() -> tuple[list[str], list[str]]:
    """The peers that can be measured here, and one line for each that cannot."""
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
    """Import a peer's module of KV events.

    Raises:
        ImportError: it is not installed and no file is named, or it cannot be loaded.
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
    """A class that has every attribute: an enum's members, say."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _PlaceholderModule(ModuleType):
    """Gives a class for every name that looks like one, and for any other a function that returns a logger."""

    __path__: list[str] = []  # noqa: RUF012 - a package that has no files
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return _PlaceholderClass(name, (), {"__init__": lambda *_, **__: None})
        return lambda *_, **__: logging.getLogger("peer")


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of one package, and makes it a placeholder."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to execute."""
