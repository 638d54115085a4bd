"""The main program of a rank: it reads one line of configuration, and ends with one sentence when it cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler_engine.engine.config import EngineConfig, EnginePaths, RankConfig, SchedulerConfig
from scheduler_engine.engine.rank import process

pytestmark = pytest.mark.processes

Give = Callable[[bytes], None]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Iterator[Give]:
    """Write to the standard input of the rank, and end it."""
    reader, writer = os.pipe()
    monkeypatch.setattr(process, "_STDIN", reader)
    opened = [writer]

    def start(text: bytes) -> None:
        os.write(writer, text)
        os.close(opened.pop())

    yield start
    os.close(reader)
    for descriptor in opened:
        os.close(descriptor)


def config(directory: Path, rank: int = 0, **settings: object) -> RankConfig:
    engine = EngineConfig(
        dp_size=1, attn_cp_size=1, attn_tp_size=1, scheduler=SchedulerConfig(page_size=4, kv_tokens=64), **settings
    )
    return RankConfig(engine=engine, rank=rank, paths=EnginePaths(directory=str(directory)))


@pytest.mark.parametrize("line", [b"nonsense\n", b"", b"\n", b"{}\n", b'{"rank": 0}', b"\xff\n"])
def test_a_broken_configuration_is_one_line_and_exit_code_1(
    line: bytes, give: Give, capfd: pytest.CaptureFixture[str]
) -> None:
    give(line)
    assert process.main() == 1
    complaint = capfd.readouterr().err
    assert complaint.count("\n") == 1
    assert complaint.startswith("DecodeError: the text is not the configuration of a rank: ")


def test_no_byte_after_the_configuration_is_read(give: Give) -> None:
    """``StopPipe`` polls the descriptor: a byte that was read ahead would hide that the engine closed it."""
    give(b"first\nsecond\n")
    assert process._read_line(process._STDIN) == b"first"
    assert process._read_line(process._STDIN) == b"second"
    assert process._read_line(process._STDIN) == b""


def test_a_rank_whose_engine_is_gone_ends_by_itself(tmp_path: Path, give: Give) -> None:
    """Standard input has ended before the first step, so the rank opens its parts, closes them and returns 0."""
    give(config(tmp_path).to_json() + b"\n")
    assert process.main() == 0
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".lock"]


def test_an_event_stream_that_cannot_open_is_one_line_and_exit_code_1(
    tmp_path: Path, give: Give, capfd: pytest.CaptureFixture[str]
) -> None:
    events = '{"publisher": "zmq", "endpoint": "ipc:///no/such/directory/kv"}'
    give(config(tmp_path, kv_events=events).to_json() + b"\n")
    assert process.main() == 1
    assert capfd.readouterr().err.startswith(("StartError: ", "ConfigError: "))


def test_a_rank_without_a_configuration_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "scheduler_engine.engine.rank.process"]
    done = subprocess.run(command, input=b"nonsense\n", capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"DecodeError: ")
    assert done.stderr.count(b"\n") == 1


def test_a_rank_loads_no_module_of_the_frontend() -> None:
    """Eight of them start together, often on few cores."""
    program = "import sys, scheduler_engine.engine.rank.process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"cyclopts", "rich", "starlette", "uvicorn", "httpx", "prometheus_client", "numpy"}
    assert heavy.isdisjoint(loaded.stdout.split())
