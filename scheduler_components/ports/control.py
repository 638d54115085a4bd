"""Control: what a control request pauses, flushes, changes and releases."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

from scheduler_components.errors import ConfigError

__all__ = [
    "StateValue",
    "StateProvider",
    "Profiler",
    "NullProfiler",
    "ComputeGate",
    "NullComputeGate",
    "PausableRequests",
    "FlushableCache",
    "WeightStore",
    "NullWeightStore",
    "MemoryOccupation",
    "NullMemoryOccupation",
]


StateValue: TypeAlias = int | float | bool | str | None
"""What a value of the internal state is: what JSON has without nesting."""


class StateProvider(Protocol):
    """A part that shows values of its own, and lets some be set. Called by ``InternalState``, between two steps."""

    @property
    def settable(self) -> Collection[str]:
        """Names of the values that can be set; always the same, and all of them are in ``state()``."""
        ...

    def state(self) -> Mapping[str, StateValue]:
        """Return the values of this moment, by name; the names are always the same."""
        ...

    def check_state(self, changes: Mapping[str, StateValue]) -> None:
        """Look at values for names of ``settable``, together, and set none.

        Raises:
            ConfigError: naming the value that cannot work.
        """
        ...

    def set_state(self, changes: Mapping[str, StateValue]) -> None:
        """Set values that ``check_state`` has let through."""
        ...


class Profiler(Protocol):
    """Records what this process does: ``profiling.TorchProfiler``, ``profiling.StackSampler``.

    Called by ``ProfilerManager``, on the scheduler's thread.
    """

    def start(self) -> None:
        """Begin to record. What it raises ends the session."""
        ...

    def stop(self, name: str) -> str:
        """End the recording and write it under this name, to which it adds its own ending; returns where it is."""
        ...


class NullProfiler:
    """The profiler of a scheduler that has none."""

    def start(self) -> None:
        pass

    def stop(self, name: str) -> str:  # noqa: ARG002
        return ""


class ComputeGate(Protocol):
    """Says what a scheduler may do now: ``quiesce.QuiesceState``. Read by the scheduler when it makes a batch."""

    @property
    def can_admit(self) -> bool:
        """Requests that wait may begin to run."""
        ...

    @property
    def can_compute(self) -> bool:
        """Requests that run may go on."""
        ...


class NullComputeGate:
    """The gate of a scheduler that nobody pauses."""

    can_admit = True
    can_compute = True


class PausableRequests(Protocol):
    """The requests of a scheduler, as a pause sees them: the scheduler itself. Called between two steps."""

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        ...

    def abort_all(self) -> int:
        """End every request, running and waiting, and tell its client; returns how many."""
        ...

    def retract_all(self) -> int:
        """Take the pages of every running request and let it wait, its output kept; returns how many."""
        ...


class FlushableCache(Protocol):
    """The cache, its tiers and its stream, as a flush sees them. Called while no request holds a page."""

    @property
    def num_operations(self) -> int:
        """Transfers of pages under way on this rank."""
        ...

    def clear(self, weight_version: str) -> None:
        """Forget every cached prefix on device and host, and send so at once, also where no step follows.

        What is cached from now on was computed by the weights of this version, and never matches what others have.
        """
        ...

    def clear_storage_index(self) -> None:
        """Count no page as stored any more, and send so at once."""
        ...


class WeightStore(Protocol):
    """One rank's weights and, beside them, those of an update. What ``begin``, ``load`` and ``checksum`` raise ends the
    update on all ranks; the other two must not fail.
    """

    def begin(self, weight_version: str) -> None:
        """Make room beside the weights for those of this version."""
        ...

    def load(self, name: str, content: bytes) -> None:
        """Load one part of them."""
        ...

    def checksum(self) -> int:
        """Return 63 bits over all that was loaded, as it came: equal on ranks that keep different slices of it."""
        ...

    def commit(self) -> None:
        """Compute with what was loaded from now on."""
        ...

    def roll_back(self) -> None:
        """Forget what was loaded; nothing may have been."""
        ...


class NullWeightStore:
    """The weights of a scheduler that keeps those that it started with: an update is refused at its beginning."""

    def begin(self, weight_version: str) -> None:
        raise ConfigError("weight_version", weight_version, "cannot be loaded", "give this scheduler a WeightStore")

    def load(self, name: str, content: bytes) -> None:  # noqa: ARG002 - the port's
        self.begin(name)

    def checksum(self) -> int:
        return 0

    def commit(self) -> None:
        pass

    def roll_back(self) -> None:
        pass


class MemoryOccupation(Protocol):
    """One rank's device memory by region: ``weights`` and ``kv_cache``, SGLang's tags."""

    def release(self, tags: Sequence[str], *, keep_weights: bool) -> None:
        """Give regions back, also those that are not held; weights go to the host, or are lost. Must not fail."""
        ...

    def resume(self, tags: Sequence[str]) -> None:
        """Take regions again, and bring weights back that were kept. What it raises undoes it on all ranks."""
        ...


class NullMemoryOccupation:
    """The memory of a scheduler that gives none back: a release stops it, and changes nothing else."""

    def release(self, tags: Sequence[str], *, keep_weights: bool) -> None:
        pass

    def resume(self, tags: Sequence[str]) -> None:
        pass
