"""TorchProfiler: record torch's operators and the device as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path

from scheduler_components._internal.extras import naming_extras
from scheduler_components._internal.file_unused_path import unused_path
from scheduler_components.errors import ConfigError, StartError

with naming_extras:
    import torch

__all__ = ["TorchProfiler"]


class TorchProfiler:
    """A `Profiler` over `torch.profiler`: CPU, and CUDA if available.

    Args:
        directory: where traces are written; created if missing.
        with_stack: record Python's stack with each operator, which is much slower.
    """

    __slots__ = ("_directory", "_profile", "_with_stack")

    def __init__(self, directory: Path, *, with_stack: bool = False) -> None:
        self._directory = directory
        self._with_stack = with_stack
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """Start recording.

        Raises:
            ConfigError: it is recording already.
            RuntimeError: other code of this process uses torch's profiler.
        """
        if self._profile is not None:
            raise ConfigError("profiler", "torch", "is recording already", "stop it first")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities, with_stack=self._with_stack)
        profile.start()
        self._profile = profile

    def stop(self, name: str) -> str:
        """Write the trace to ``<name>.trace.json.gz``, or ``<name>.1.trace.json.gz`` if that exists; return its path.

        Raises:
            ConfigError: it is not recording.
            StartError: the file cannot be written.
        """
        profile, self._profile = self._profile, None
        if profile is None:
            raise ConfigError("profiler", "torch", "is not recording", "start it first")
        profile.stop()
        path = unused_path(self._directory, name, ".trace.json.gz")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except OSError as error:
            raise StartError(str(path), str(error), "give a writable directory") from error
        return str(path)
