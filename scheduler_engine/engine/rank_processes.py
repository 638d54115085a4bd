"""Start, watch and stop the scheduler processes of an engine.

No rank outlives the process that started it. A rank reads its configuration from standard input, which then stays open.
The end of standard input stops the rank. It comes when the engine closes the pipe, and also when the engine's process
dies in any way. Each rank runs in its own session, so a Ctrl-C reaches the engine's process only.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from scheduler_components import StartError
from scheduler_engine.engine.config import RankConfig
from scheduler_engine.engine.log_output import LogFormat, format_rank_line

_RANK_MODULE = "scheduler_engine.engine.rank.process"
_MAX_LINE_BYTES = 2**20  # of standard error; the longest line of a traceback is far shorter
_STOP_GRACE_S = 5.0  # a stopping rank drains its event stream


@dataclass(slots=True, kw_only=True, frozen=True)
class RankExit:
    """The end of a rank process.

    Attributes:
        rank: ``str(ParallelState)`` of the rank.
        return_code: exit code of the process; a negative value is the number of the signal that killed it.
        last_line: last line of its standard error, which is the name and text of the error that ended it.
    """

    rank: str
    return_code: int
    last_line: str

    def __str__(self) -> str:
        how = f"was killed by signal {-self.return_code}" if self.return_code < 0 else f"exited {self.return_code}"
        return f"rank {self.rank} {how}" + (f": {self.last_line}" if self.last_line else "")


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """One scheduler process.

    Attributes:
        rank, name: number of its rank in the world, and ``str(ParallelState)``.
        process: the process.
        log_format: format of the lines for ``wait``.
    """

    rank: int
    name: str
    process: asyncio.subprocess.Process
    log_format: LogFormat = "text"

    def configure(self, config: RankConfig) -> None:
        """Send the rank its configuration. If the process has died already, ``wait`` reports it."""
        assert self.process.stdin is not None
        self.process.stdin.write(config.to_json() + b"\n")

    async def wait(self, show: Callable[[str], None]) -> RankExit:
        """Pass each line of standard error to ``show`` until the process ends."""
        assert self.process.stderr is not None
        last_line = ""
        while True:
            try:
                line = await self.process.stderr.readline()
            except ValueError:  # the reader has dropped the part of a line that reached its limit
                show(f"rank {self.rank}: (a line of more than {_MAX_LINE_BYTES} bytes is left out)")
                continue
            if not line:
                break
            last_line = line.decode(errors="replace").rstrip()
            show(format_rank_line(last_line, self.rank, self.log_format))
        return_code = await self.process.wait()
        return RankExit(rank=self.name, return_code=return_code, last_line=last_line)

    def request_stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()


@asynccontextmanager
async def open_ranks(
    configs: Sequence[RankConfig], *, show: Callable[[str], None]
) -> AsyncIterator[tuple[list[RankProcess], asyncio.Future[RankExit]]]:
    """Start one process per configuration. All of them have ended when the block is left.

    Args:
        configs: one per rank.
        show: receives each line that a rank writes to standard error.

    Yields:
        The processes, and a future that is done when the first of them ends by itself.
    """
    ranks: list[RankProcess] = []
    watchers: list[asyncio.Task[RankExit]] = []
    first_exit: asyncio.Future[RankExit] = asyncio.get_running_loop().create_future()

    def on_exit(watcher: asyncio.Task[RankExit]) -> None:
        if not watcher.cancelled() and not first_exit.done():
            first_exit.set_result(watcher.result())

    try:
        for config in configs:
            name = str(config.engine.parallel(config.rank))
            logs = config.engine.logs
            rank = RankProcess(rank=config.rank, name=name, process=await _start(name), log_format=logs.log_format)
            ranks.append(rank)
            rank.configure(config)
            watcher = asyncio.create_task(rank.wait(show), name=f"rank {name}")
            watcher.add_done_callback(on_exit)
            watchers.append(watcher)
        yield ranks, first_exit
    finally:
        await asyncio.shield(_stop(ranks, watchers))


async def _start(name: str) -> asyncio.subprocess.Process:
    search_path = os.pathsep.join(_absolute(sys.path))
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # without the working directory, so that a rank imports the same modules as this process
            "-m",
            _RANK_MODULE,
            env=os.environ | {"PYTHONPATH": search_path, "TQDM_DISABLE": "1"},  # noqa: SCH007 passed on to the child
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f"rank {name}", str(error), "free memory or process slots") from error


def _absolute(paths: Iterable[str]) -> Iterator[str]:
    """Resolve search paths as Python does: an empty entry is the working directory."""
    return (str(Path(path).absolute()) for path in paths)


async def _stop(ranks: Sequence[RankProcess], watchers: Sequence[asyncio.Task[RankExit]]) -> None:
    for rank in ranks:
        rank.request_stop()
    if watchers:
        await asyncio.wait(watchers, timeout=_STOP_GRACE_S)
    for rank in ranks:
        rank.kill()
    await asyncio.gather(*watchers)
