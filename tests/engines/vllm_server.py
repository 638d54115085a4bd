"""A vLLM server as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from vllm_in_process import ENVIRONMENT, POOL_BLOCKS, TRACE_BLOCK_TOKENS

START_S = 600.0
"""A start takes two minutes on two busy cores, because its processes import vLLM."""


class VllmServer:
    """One API server with its engines.

    Args:
        model, folder: the model, and where the log is written.
        port: of its HTTP routes.
        args: further arguments of the server.
        process: options of ``Popen``.
    """

    def __init__(self, model: Path, folder: Path, port: int, *args: str, **process: Any) -> None:
        self.url, self.model, self._log = f"http://127.0.0.1:{port}", str(model), folder / "log"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--dtype", "float32"),
            *("--enforce-eager", "--block-size", str(TRACE_BLOCK_TOKENS), "--max-model-len", "1024"),
            *("--num-gpu-blocks-override", str(POOL_BLOCKS), "--host", "127.0.0.1", "--port", str(port), *args),
        ]
        own = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        with self._log.open("wb") as log:
            process["env"] = os.environ | own
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **process)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read()

    def wait_until_up(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                self.get("/health")
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline_s, self.log[-4000:]
                time.sleep(0.2)
            else:
                return

    def generate(self, prompt: list[int], rank: int) -> None:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=300).close()

    def stop(self) -> None:
        """Kill the server and its engines, which are in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
