"""Fixtures that run flake8 on a small file, and the imports of the examples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from flake8.main.cli import main

from scheduler_refactor.component_lint import ComponentChecker

Lint = Callable[..., list[tuple[int, str]]]


@pytest.fixture
def lint(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lint:
    """Run flake8 on the text of one file; returns the line and the code of each problem, in flake8's order."""
    monkeypatch.setattr(ComponentChecker, "limits", ComponentChecker.limits)  # flake8 sets limits per process

    def run(source: str | bytes, *options: str, name: str = "code.py", config: str = "") -> list[tuple[int, str]]:
        path, configuration = tmp_path / name, tmp_path / "flake8.cfg"
        configuration.write_text(f"[flake8]\n{config}\n")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.encode() if isinstance(source, str) else source)
        fixed = [f"--config={configuration}", "--jobs=1", "--select=SCH", "--format=%(row)d %(code)s"]
        status = main([*fixed, *options, str(path)])
        found = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert status == (1 if found else 0)
        return [(int(line), code) for line, code in found]

    return run


@pytest.fixture
def head() -> str:
    """The imports of every example."""
    return dedent(
        """
        import os, re, socket, subprocess, threading, torch, zmq
        from abc import ABC
        from collections import deque
        from collections.abc import Callable, Sequence
        from dataclasses import KW_ONLY, dataclass, field
        from typing import Any, ClassVar, NamedTuple, Optional, Protocol
        import attrs, msgspec, pydantic, runtime_context
        from engine import get_clock, get_global_recorder, get_parallel, get_server_args
        from engine.text import get_banner, get_exception_traceback
        """
    )
