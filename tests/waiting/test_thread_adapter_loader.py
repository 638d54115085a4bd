"""Loads run in a thread, in the order of the calls, and their ends arrive by poll."""

from __future__ import annotations

from threading import Event

from kit.waiting import wait_until

from scheduler_components.waiting.lora_queue import Adapter, AdapterFact
from scheduler_components.waiting.thread_adapter_loader import ThreadAdapterLoader, open_thread_adapter_loader

A, B = Adapter("a", "/a", 1), Adapter("b", "/b", 2)


class NativePanic(BaseException):
    """A panic of a native library, which is no ``Exception``."""


class Store:
    """A store that waits for ``go`` and fails for a path that says so."""

    def __init__(self) -> None:
        self.go = Event()
        self.calls: list[str] = []

    def load(self, adapter: Adapter) -> None:
        self.go.wait()
        self.calls.append(f"load {adapter.name}")
        if "broken" in adapter.path:
            raise ValueError(f"{adapter.path} lacks weights\nand much more")
        if "panic" in adapter.path:
            raise NativePanic("index out of bounds")

    def unload(self, adapter: Adapter) -> None:
        self.calls.append(f"unload {adapter.name}")
        if "broken" in adapter.path:
            raise KeyError(adapter.name)


def polled(loader: ThreadAdapterLoader, number: int) -> list[AdapterFact]:
    facts: list[AdapterFact] = []

    def poll() -> bool:
        facts.extend(loader.poll())
        return len(facts) >= number

    wait_until(poll)
    return facts


def test_calls_do_not_block_and_run_in_their_order() -> None:
    store = Store()
    loader = open_thread_adapter_loader(store)
    loader.load("1", A)
    loader.unload(A)
    loader.load("2", B)
    assert loader.poll() == []
    store.go.set()
    assert polled(loader, 2) == [AdapterFact("1"), AdapterFact("2")]
    loader.close()
    loader.close()
    assert store.calls == ["load a", "unload a", "load b"]
    assert loader.poll() == []


def test_a_failed_load_is_a_fact_of_one_line_and_the_thread_goes_on() -> None:
    store = Store()
    store.go.set()
    loader = open_thread_adapter_loader(store)
    broken = Adapter("c", "/broken", 3)
    loader.load("1", broken)
    loader.unload(broken)
    loader.load("2", A)
    assert polled(loader, 2) == [AdapterFact("1", "/broken lacks weights"), AdapterFact("2")]
    loader.close()


def test_a_panic_of_a_native_library_is_a_failed_load() -> None:
    store = Store()
    store.go.set()
    loader = open_thread_adapter_loader(store)
    loader.load("1", Adapter("c", "/panic", 3))
    loader.load("2", B)
    assert polled(loader, 2) == [AdapterFact("1", "index out of bounds"), AdapterFact("2")]
    loader.close()
