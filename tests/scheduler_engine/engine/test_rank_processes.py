"""Rank processes: their output is shown, the first end is reported, and none outlives the block that started them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_components import StartError
from scheduler_engine.engine import rank_processes
from scheduler_engine.engine.config import EngineConfig, EnginePaths, RankConfig, SchedulerConfig
from scheduler_engine.engine.rank_processes import RankExit, RankProcess, open_ranks

pytestmark = pytest.mark.processes

ENGINE = EngineConfig(dp_size=1, attn_cp_size=1, attn_tp_size=2, scheduler=SchedulerConfig(page_size=4, kv_tokens=64))
WAIT_S = 30.0

OBEDIENT = "sys.stdin.read()\n"
"""Ends when its standard input does, as a rank does."""


def configs(num_ranks: int = 1) -> list[RankConfig]:
    return [RankConfig(ENGINE, rank, EnginePaths("/tmp/x")) for rank in range(num_ranks)]


@pytest.fixture
def run_as_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let every rank run this program, which has read its configuration into ``config``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(rank_processes, "_RANK_MODULE", "rank_of_a_test")

    def write(program: str) -> None:
        head = "import json, os, signal, sys\nconfig = json.loads(sys.stdin.readline())\n"
        (tmp_path / "rank_of_a_test.py").write_text(head + program)

    yield write


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, WAIT_S))


def test_a_rank_gets_its_configuration_and_its_output_is_shown(run_as_rank: Callable[[str], None]) -> None:
    run_as_rank("print('rank', config['rank'], file=sys.stderr)\nprint(end='last', file=sys.stderr)\n" + OBEDIENT)
    shown: list[str] = []

    async def scenario() -> list[RankProcess]:
        async with open_ranks(configs(2), show=shown.append) as (ranks, first_exit):
            while len(shown) < 2:
                await asyncio.sleep(0.01)
            assert not first_exit.done()
            return ranks

    ranks = run(scenario())
    assert sorted(shown) == ["rank 0: last", "rank 0: rank 0", "rank 1: last", "rank 1: rank 1"]
    assert [rank.process.returncode for rank in ranks] == [0, 0]
    assert [rank.name for rank in ranks] == [str(ENGINE.parallel(rank)) for rank in range(2)]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("sys.exit('StartError: no room')\n", " exited 1: StartError: no room"),
        ("sys.exit(0)\n", " exited 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)\n", " was killed by signal 9"),
        ("os.write(2, b'caf\\xff\\n'); sys.exit(3)\n", " exited 3: caf\N{REPLACEMENT CHARACTER}"),
    ],
    ids=["an error", "no error", "a signal", "bytes that are no text"],
)
def test_the_first_rank_that_ends_is_reported_with_its_last_line(
    run_as_rank: Callable[[str], None], program: str, expected: str
) -> None:
    run_as_rank(f"if config['rank'] == 0:\n    {OBEDIENT}else:\n    {program}")

    async def scenario() -> RankExit:
        async with open_ranks(configs(2), show=lambda _: None) as (_, first_exit):
            return await first_exit

    assert str(run(scenario())) == f"rank {ENGINE.parallel(1)}{expected}"


def test_a_line_that_is_too_long_is_left_out_and_the_end_is_still_reported(
    run_as_rank: Callable[[str], None],
) -> None:
    """An error with a whole batch in its text."""
    run_as_rank("os.write(2, b'before\\n' + b'x' * 3_000_000 + b'\\n'); sys.exit('StartError: no room')\n")
    shown: list[str] = []

    async def scenario() -> RankExit:
        async with open_ranks(configs(), show=shown.append) as (_, first_exit):
            return await first_exit

    assert str(run(scenario())).endswith(" exited 1: StartError: no room")
    assert (shown[0], shown[-1]) == ("rank 0: before", "rank 0: StartError: no room")
    assert all(len(line) < 2**20 + 100 for line in shown)


def test_a_rank_that_ignores_the_end_of_its_input_is_killed(
    run_as_rank: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "_STOP_GRACE_S", 0.1)
    run_as_rank("print('deaf', file=sys.stderr)\nsignal.pause()\n")
    shown: list[str] = []

    async def scenario() -> RankProcess:
        async with open_ranks(configs(), show=shown.append) as ([rank], _):
            while not shown:
                await asyncio.sleep(0.01)
            return rank

    assert run(scenario()).process.returncode == -signal.SIGKILL


def test_an_error_of_the_block_ends_the_ranks(run_as_rank: Callable[[str], None]) -> None:
    run_as_rank(OBEDIENT)
    started: list[RankProcess] = []

    async def scenario() -> None:
        async with open_ranks(configs(2), show=lambda _: None) as (ranks, _):
            started.extend(ranks)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(scenario())
    assert [rank.process.returncode for rank in started] == [0, 0]


def test_a_rank_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")

    async def scenario() -> None:
        async with open_ranks(configs(), show=lambda _: None):
            raise AssertionError("it started")

    with pytest.raises(StartError, match=r"^rank .*No such file"):
        run(scenario())


def test_relative_search_paths_become_absolute() -> None:
    """A rank has another working directory rule (``-P``), so an empty entry is resolved by its parent."""
    assert list(rank_processes._absolute(["", "/usr"])) == [str(Path.cwd()), "/usr"]
