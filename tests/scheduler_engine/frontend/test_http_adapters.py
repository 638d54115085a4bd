"""The routes of adapters have SGLang's and vLLM's paths, and read files below one directory only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.asgi import ask
from starlette.applications import Starlette

from scheduler_engine.engine.config import AdapterSpec, LoraConfig
from scheduler_engine.frontend.adapter_directory import AdapterDirectory
from scheduler_engine.frontend.http_adapters import adapter_routes
from scheduler_engine.frontend.http_body import BodyReceiver


class LoadedDirectory(AdapterDirectory):
    """A directory whose replicas have loaded each adapter already."""

    def __init__(self) -> None:
        self.config, self.adapters = LoraConfig(), {}

    async def load(self, spec: AdapterSpec) -> None:
        self.adapters[spec.name] = spec

    async def unload(self, name: str) -> None:
        del self.adapters[name]


def posted(root: Path | None, path: str, body: Any, *, has_files: bool = True) -> httpx.Response:
    directory = LoadedDirectory()
    directory.adapters["old"] = AdapterSpec(name="old", path="/old")
    app = Starlette(routes=adapter_routes(directory, BodyReceiver(), has_files=has_files, adapters_root=root))
    return ask(app, path, json=body)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_path_below_the_root_is_loaded_and_both_apis_have_the_route(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "poems").mkdir()
    body = {"lora_name": "new", "lora_path": "poems", "pinned": True}
    answer = posted(tmp_path, f"{prefix}/load_lora_adapter", body).json()
    assert answer["loaded_adapters"] == {"old": "/old", "new": str((tmp_path / "poems").resolve())}
    answer = posted(tmp_path, f"{prefix}/unload_lora_adapter", {"lora_name": "old", "lora_int_id": 3}).json()
    assert answer["loaded_adapters"] == {}


@pytest.mark.parametrize("path", ["missing", "/etc", "../.."])
def test_no_other_path_is_read(tmp_path: Path, path: str) -> None:
    for root in (tmp_path, None):
        answer = posted(root, "/load_lora_adapter", {"lora_name": "new", "lora_path": path})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")


def test_a_simulated_device_reads_no_files() -> None:
    answer = posted(None, "/load_lora_adapter", {"lora_name": "new", "lora_path": "anything"}, has_files=False)
    assert answer.status_code == 200


@pytest.mark.parametrize("body", [{}, {"lora_name": ""}, {"lora_name": "a", "lora_path": "b", "other": 1}, []])
def test_a_malformed_body_is_refused(tmp_path: Path, body: Any) -> None:
    assert posted(tmp_path, "/load_lora_adapter", body).status_code == 400
