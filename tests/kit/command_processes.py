"""Processes of the command line: started, read, and stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = [sys.executable, "-m", "scheduler_engine.cli.main"]
TWO_REPLICAS = ["--dp-size", "2", "--attn-cp-size", "1", "--attn-tp-size", "1"]
TWO_RANKS = ["--dp-size", "1", "--attn-cp-size", "1", "--attn-tp-size", "2"]
TWO_BY_TWO = ["--dp-size", "2", "--attn-cp-size", "1", "--attn-tp-size", "2"]
ONE_RANK = ["--dp-size", "1", "--attn-cp-size", "1", "--attn-tp-size", "1"]
DEADLINE_S = 90


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run of the command line. Its ranks inherit its output, so the output ends when the last of them has."""
    with tempfile.TemporaryDirectory(prefix="sc-") as directory:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"TMPDIR": directory},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=DEADLINE_S)
        assert process.returncode == -signal.SIGKILL or list(Path(directory).iterdir()) == []


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def wait_for_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://[0-9.]+:[0-9]+", line):
            return found.group()
    raise AssertionError("it never said where it serves")
