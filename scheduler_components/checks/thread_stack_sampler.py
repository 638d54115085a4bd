"""StackSampler: sample the stacks of this process's threads, to show where they spend their time.

It works like py-spy, but inside the process: it needs no installation and no permission to attach. It cannot see a call
that holds the GIL, because the sampling thread does not run meanwhile.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from scheduler_components._internal.file_unused_path import unused_path
from scheduler_components._internal.validators import check_number
from scheduler_components.errors import ConfigError, StartError

__all__ = ["StackSampler"]

_MAX_DEPTH = 128
_MAX_STACKS = 100_000
"""Distinct stacks. Further ones are counted together as "(others)"."""


class StackSampler:
    """A `Profiler` that writes folded stacks, as speedscope and flamegraph.pl read them.

    Each line has the frames from the outermost to the innermost, joined by semicolons, and the number of samples.

    Args:
        directory: where traces are written; created if missing.
        interval_s: seconds between two samples. 5 ms samples a step of 20 ms four times; sampling ten threads costs
            0.1 ms.
        thread_ids: the threads to sample, as `threading.get_ident` returns them; empty means all but its own.

    Raises:
        ConfigError: the interval is not a positive number.

    Attributes:
        num_samples: samples since the last start.
    """

    __slots__ = ("_counts", "_directory", "_interval_s", "_stop", "_thread", "_thread_ids", "num_samples")

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
        """Start sampling.

        Raises:
            ConfigError: it is recording already.
        """
        if self._thread is not None:
            raise ConfigError("profiler", "stacks", "is recording already", "stop it first")
        self.num_samples = 0
        self._counts.clear()
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="stack-sampler", daemon=True)
        self._thread.start()

    def stop(self, name: str) -> str:
        """Write the samples to ``<name>.folded``, or ``<name>.1.folded`` if that exists; return its path.

        Raises:
            ConfigError: it is not recording.
            StartError: the file cannot be written.
        """
        thread = self._thread
        if thread is None:
            raise ConfigError("profiler", "stacks", "is not recording", "start it first")
        self._stop.set()
        thread.join()
        self._thread = None
        path = unused_path(self._directory, name, ".folded")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{stack} {count}\n" for stack, count in sorted(self._counts.items())))
        except OSError as error:
            raise StartError(str(path), str(error), "give a writable directory") from error
        return str(path)

    def _run(self) -> None:
        own = threading.get_ident()
        while True:
            for ident, frame in sys._current_frames().items():
                if ident != own and (not self._thread_ids or ident in self._thread_ids):
                    stack = _folded(frame)
                    is_known = stack in self._counts or len(self._counts) < _MAX_STACKS
                    self._counts[stack if is_known else "(others)"] += 1
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
