"""ThreadAdapterLoader: load and unload adapters in a thread, one after the other."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeAlias

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components.errors import first_line
from scheduler_components.waiting.lora_queue import Adapter, AdapterFact

__all__ = ["AdapterStore", "NullAdapterStore", "ThreadAdapterLoader", "open_thread_adapter_loader"]

logger = logging.getLogger(__name__)

_JOIN_S = 5.0  # a store that hangs ends with the process
_MAX_PROBLEM_CHARACTERS = 300
_UNLOADING = "unloading an adapter"

_Job: TypeAlias = "tuple[str, Adapter] | Adapter | None"


class AdapterStore(Protocol):
    """The adapters on one rank's device. Called in the loader's thread, while the device may compute with others."""

    def load(self, adapter: Adapter) -> None:
        """Read the adapter's files and copy its weights to the device. An exception's first line is for the client."""
        ...

    def unload(self, adapter: Adapter) -> None:
        """Free the weights. No effect if they are not loaded."""
        ...


class NullAdapterStore:
    """The store of a device that keeps no adapters."""

    def load(self, adapter: Adapter) -> None:
        pass

    def unload(self, adapter: Adapter) -> None:
        pass


class ThreadAdapterLoader:
    """The ``AdapterLoader`` over a store that blocks. Create it with ``open_thread_adapter_loader``.

    Args:
        store: called in the loader's thread only.
    """

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._facts: deque[AdapterFact] = deque()
        self._failures = FailureLog(logger)
        # A daemon, because the interpreter would wait at its exit for a store that never returns.
        self._thread = Thread(target=self._work, name="adapter-loader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, key: str, adapter: Adapter) -> None:
        self._jobs.put((key, adapter))

    def unload(self, adapter: Adapter) -> None:
        self._jobs.put(adapter)

    def poll(self) -> Sequence[AdapterFact]:
        return [self._facts.popleft() for _ in range(len(self._facts))]

    def close(self) -> None:
        """End the thread after the jobs before. Return after a few seconds if the store does not."""
        self._jobs.put(None)
        self._thread.join(_JOIN_S)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Adapter):
                with self._failures.guard(_UNLOADING):
                    self._store.unload(job)
                continue
            key, adapter = job
            try:
                self._store.load(adapter)
            except BaseException as error:
                logger.info("adapter %r cannot be loaded", adapter.name, exc_info=error)
                self._facts.append(AdapterFact(key, first_line(error)[:_MAX_PROBLEM_CHARACTERS]))
            else:
                self._facts.append(AdapterFact(key))


def open_thread_adapter_loader(store: AdapterStore) -> ThreadAdapterLoader:
    """Start the loader of a rank."""
    loader = ThreadAdapterLoader(store)
    loader.start()
    return loader
