"""An AdapterLoader without a thread."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_components import ConfigError
from scheduler_components.waiting.lora_queue import Adapter, AdapterFact
from scheduler_components.waiting.thread_adapter_loader import AdapterStore


class ImmediateLoader:
    """Load when the call comes; the next poll says how it ended."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._facts: list[AdapterFact] = []

    def load(self, key: str, adapter: Adapter) -> None:
        try:
            self._store.load(adapter)
        except ConfigError as error:
            self._facts.append(AdapterFact(key, str(error)))
        else:
            self._facts.append(AdapterFact(key))

    def unload(self, adapter: Adapter) -> None:
        self._store.unload(adapter)

    def poll(self) -> Sequence[AdapterFact]:
        facts, self._facts = self._facts, []
        return facts

    def close(self) -> None:
        pass
