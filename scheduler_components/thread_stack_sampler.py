"""StackSampler: where threads of this process spend their time, by looking at their stacks now and then.

As py-spy does it, from inside: nothing to install, and no other process that must be let in. What it cannot see is a
call that keeps the GIL: then no look comes about.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from scheduler_components.errors import ConfigError, StartError
from scheduler_components.validators import check_number

__all__ = ["StackSampler"]

_MAX_DEPTH = 128
_MAX_STACKS = 100_000  # distinct ones; further ones count as one stack, "(others)"


class StackSampler:
    """A ``Profiler`` that writes folded stacks, one line each: frames from the outermost to the innermost, joined by
    semicolons, then how often they were seen. speedscope and flamegraph.pl read it.

    Args:
        directory: where traces are written; made if it is not there.
        interval_s: between two looks. 5 ms: a step of 20 ms is seen four times, and a look at ten threads costs 0.1 ms.
        thread_ids: the threads to look at, as ``threading.get_ident`` gives them; none means all but its own.

    Raises:
        ConfigError: the interval is not a positive number.

    Attributes:
        num_samples: since the last start.
    """

    __slots__ = ("num_samples", "_counts", "_directory", "_interval_s", "_stop", "_thread", "_thread_ids")

    def __init__(self, directory: Path, *, interval_s: float = 0.005, thread_ids: Sequence[int] = ()) -> None:
        check_number("interval_s", interval_s)
        self.num_samples = 0
        self._directory = directory
        self._interval_s = interval_s
        self._thread_ids = frozenset(thread_ids)
        self._counts: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look.

        Raises:
            ConfigError: it does already.
        """
        if self._thread is not None:
            raise ConfigError("profiler", "stacks", "records already", "stop it first")
        self.num_samples = 0
        self._counts.clear()
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="stack-sampler", daemon=True)
        self._thread.start()

    def stop(self, name: str) -> str:
        """Write what was seen to ``<name>.folded``; returns its path.

        Raises:
            ConfigError: it was not started.
            StartError: the file cannot be written.
        """
        thread = self._thread
        if thread is None:
            raise ConfigError("profiler", "stacks", "does not record", "start it first")
        self._stop.set()
        thread.join()
        self._thread = None
        path = self._directory / f"{name}.folded"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{stack} {count}\n" for stack, count in sorted(self._counts.items())))
        except OSError as error:
            raise StartError(str(path), str(error), "give a directory that can be written to") from error
        return str(path)

    def _run(self) -> None:
        own = threading.get_ident()
        while True:
            for ident, frame in sys._current_frames().items():
                if ident != own and (not self._thread_ids or ident in self._thread_ids):
                    stack = _folded(frame)
                    known = stack in self._counts or len(self._counts) < _MAX_STACKS
                    self._counts[stack if known else "(others)"] += 1
            self.num_samples += 1
            if self._stop.wait(self._interval_s):
                return


def _folded(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None and len(names) < _MAX_DEPTH:
        code = frame.f_code
        names.append(f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return ";".join(name.replace(";", ",") for name in reversed(names))
