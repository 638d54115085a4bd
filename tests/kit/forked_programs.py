"""Programs that each run in a process of their own, forked from one interpreter that has imported the kit.

A start of an interpreter and the imports take half a second, a fork milliseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_RUNNER = """
def fork_each():
    import importlib, json, os, sys, tempfile
    while len(sys.argv) > 1:
        importlib.import_module(sys.argv.pop())
    ran = []
    for program in json.load(sys.stdin):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            if not (pid := os.fork()):
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                return program
            _, status = os.waitpid(pid, 0)
            texts = [file.seek(0) or file.read().decode() for file in (out, err)]
            ran.append((os.waitstatus_to_exitcode(status), *texts))
    print(json.dumps(ran))
    sys.exit()

exec(compile(globals().pop("fork_each")(), "<string>", "exec"))
"""
"""A fork returns its program, runs it as ``__main__`` without a name of the runner, and ends as a program does."""


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    code: int
    out: str
    err: str


def run_programs(programs: Sequence[str], *, imports: Sequence[str], timeout_s: float = 120.0) -> list[Ran]:
    """Run each program with warnings as errors and without input. The modules ``imports`` are imported before."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _RUNNER, *imports],
        input=json.dumps(list(programs)),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return [Ran(*each) for each in json.loads(done.stdout)]
