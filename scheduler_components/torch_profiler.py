"""TorchProfiler: what torch's operators and the device do, as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

from pathlib import Path

import torch

from scheduler_components.errors import ConfigError, StartError

__all__ = ["TorchProfiler"]


class TorchProfiler:
    """A ``Profiler`` over ``torch.profiler``: CPU, and CUDA where there is one.

    Args:
        directory: where traces are written; made if it is not there.
        with_stack: note Python's stack with each operator, which costs a lot more.
    """

    __slots__ = ("_directory", "_profile", "_with_stack")

    def __init__(self, directory: Path, *, with_stack: bool = False) -> None:
        self._directory = directory
        self._with_stack = with_stack
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """Begin to record.

        Raises:
            ConfigError: it does already.
            RuntimeError: torch's profiler is in use elsewhere in this process.
        """
        if self._profile is not None:
            raise ConfigError("profiler", "torch", "records already", "stop it first")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities, with_stack=self._with_stack)
        profile.start()
        self._profile = profile

    def stop(self, name: str) -> str:
        """Write what was recorded to ``<name>.trace.json.gz``; returns its path.

        Raises:
            ConfigError: it was not started.
            StartError: the file cannot be written.
        """
        profile, self._profile = self._profile, None
        if profile is None:
            raise ConfigError("profiler", "torch", "does not record", "start it first")
        profile.stop()
        path = self._directory / f"{name}.trace.json.gz"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except OSError as error:
            raise StartError(str(path), str(error), "give a directory that can be written to") from error
        return str(path)
