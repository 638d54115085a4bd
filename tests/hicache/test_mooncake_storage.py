"""Mooncake's real store, over TCP on this machine: the same checks, two processes, an engine, a master that dies."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
from kit.mooncake_master import free_ports, master_of, needs_mooncake

from scheduler_components import ConfigError, StartError
from scheduler_components.hicache import (
    CheckedPageStore,
    MooncakeAddress,
    open_deadline_page_store,
    open_mooncake_page_store,
)
from scheduler_components.hicache.mooncake_storage import MooncakePageStore
from scheduler_components.ports import PageStore, ZeroCopyPageStore
from scheduler_components.testing import IN_PLACE_STORE_CHECKS, PAGE_STORE_CHECKS
from scheduler_components.testing.interfaces import PAGE_BYTES, page_of

pytestmark = [pytest.mark.sockets, pytest.mark.processes, needs_mooncake]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeAddress]:
    with master_of(tmp_path_factory.mktemp("mooncake") / "master.log") as (_, address):
        yield address


@pytest.fixture(scope="module")
def bare(address: MooncakeAddress) -> Iterator[MooncakePageStore]:
    store = open_mooncake_page_store(address)
    yield store
    store.close()


@pytest.mark.parametrize("check", PAGE_STORE_CHECKS)
def test_bare(bare: PageStore, check: Callable[[PageStore, str], None]) -> None:
    check(bare, f"bare {check.__name__} ")


@pytest.mark.parametrize("check", PAGE_STORE_CHECKS)
def test_verified(bare: PageStore, check: Callable[[PageStore, str], None]) -> None:
    store = CheckedPageStore(store=bare, page_bytes=PAGE_BYTES)
    check(store, f"verified {check.__name__} ")
    assert store.stats().failures + store.stats().bad_answers + store.stats().pages_corrupt == 0


@pytest.mark.parametrize("check", IN_PLACE_STORE_CHECKS)
def test_zero_copy(address: MooncakeAddress, check: Callable[[ZeroCopyPageStore, str], None]) -> None:
    store = open_mooncake_page_store(address)
    check(store, f"in place {check.__name__} ")
    store.close()


def test_one_process_reads_what_another_wrote(bare: PageStore, address: MooncakeAddress) -> None:
    keys = [f"shared {at}" for at in range(10)]
    script = f"""
from scheduler_components.hicache.mooncake_storage import MooncakeAddress, open_mooncake_page_store
from scheduler_components.hicache.storage import CheckedPageStore
from scheduler_components.testing.interfaces import PAGE_BYTES, page_of
bare = open_mooncake_page_store(MooncakeAddress(master={address.master!r}, metadata={address.metadata!r},
    segment_bytes=0, buffer_bytes=32 << 20))
store = CheckedPageStore(store=bare, page_bytes=PAGE_BYTES)
assert store.batch_set({keys!r}, [page_of(key) for key in {keys!r}]) == [True] * 10, store.stats()
store.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)
    store = CheckedPageStore(store=bare, page_bytes=PAGE_BYTES)
    assert store.batch_exists([*keys, "shared 10"]) == 10
    assert store.batch_get(keys) == [page_of(key) for key in keys]


def test_a_leased_page_stays_until_its_lease_ends(bare: PageStore) -> None:
    assert list(bare.batch_set(["leased"], [page_of("leased")])) == [True]
    assert bare.batch_exists(["leased"]) == 1  # takes a lease of 500 ms
    tries = Event()
    num_deleted = bare.delete(["leased"])
    for _ in range(600):
        if num_deleted:
            break
        tries.wait(0.05)
        num_deleted = bare.delete(["leased"])
    assert num_deleted == 1
    assert bare.batch_exists(["leased"]) == 0


def test_pages_that_do_not_fit_are_refused(bare: PageStore) -> None:
    assert list(bare.batch_set(["huge"], [bytes(65 << 20)])) == [False]
    assert list(bare.batch_set(["fits"], [page_of("fits")])) == [True]


def test_without_its_master_a_store_returns_misses(tmp_path: Path) -> None:
    with master_of(tmp_path / "master.log") as (_, address):
        deadline = open_deadline_page_store(open_mooncake_page_store(address), deadline_s=2)
        store = CheckedPageStore(store=deadline, page_bytes=PAGE_BYTES)
        assert store.batch_set(["a"], [page_of("a")]) == [True]
    assert store.batch_exists(["a"]) == 0
    assert store.batch_get(["a"]) == [None]
    assert store.batch_set(["b"], [page_of("b")]) == [False]  # retries for seconds, or fails immediately
    stats = store.stats()
    assert stats.failures + stats.stalls >= 2
    assert stats.last_problem
    store.close()
    deadline.join()  # its client looks for the master for some 10 s more


def test_an_unreachable_cluster_is_a_start_error_immediately() -> None:
    [port] = free_ports(1)
    address = MooncakeAddress(master=f"127.0.0.1:{port}", metadata=f"http://127.0.0.1:{port}/metadata")
    with pytest.raises(StartError, match="start mooncake_master"):
        open_mooncake_page_store(address)


@pytest.mark.parametrize("master", ["", "host", "host:", ":1", "host:port", "host:0", "host:65536"])
def test_a_bad_address_is_refused(master: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        MooncakeAddress(master=master, metadata="http://127.0.0.1:1/metadata")


@pytest.mark.soak_only  # ten seconds; the other tests hold the store, and the suite an engine over file storage
def test_an_engine_finds_the_pages_of_its_cluster(address: MooncakeAddress, trace_beyond_the_host: Path) -> None:
    """What the small host tier evicts comes back from the cluster, whole, on every rank."""
    command = [sys.executable, "-m", "scheduler_components", "serve", "--trace", str(trace_beyond_the_host)]
    command += ["--port", "0", "--speed", "4", "--dp-size", "1", "--kv-tokens", "2048"]
    command += ["--hicache", "--hicache-host-tokens", "4096", "--hicache-storage", "mooncake"]
    command += ["--hicache-prefetch", "wait_complete"]
    command += ["--hicache-mooncake-master", address.master, "--hicache-mooncake-metadata", address.metadata]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks in 1 replicas, each in lockstep with its leader" in done.stdout
    found = re.search(r"hits by tier .*storage ([\d.]+)%", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 5
