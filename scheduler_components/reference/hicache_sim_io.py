"""Simulated I/O of one rank: every transfer takes its own random time and may fail, as on a machine of its own.

What moves is not bytes but the digest that a page's bytes would be made from, so that a page which ends up under
another name is found out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import attrs

from scheduler_components.cache.block_hash import DIGEST_BYTES
from scheduler_components.cache.page_pool import PagePool
from scheduler_components.errors import CacheIntegrityError, OutOfPagesError
from scheduler_components.hicache.operations import (
    BackupDone,
    CopyToDevice,
    CopyToHost,
    Instruction,
    IoEvent,
    LoadDone,
    PagesLanded,
    QueryStorage,
    ReadEnded,
    ReadStorage,
    StopReading,
    StorageAnswered,
    StorageUnused,
    WriteDone,
    WriteToStorage,
)

__all__ = ["FaultRates", "SimulatedHostPages", "SimulatedMover", "SimulatedStorage"]

_TORN = b"torn"  # what a copy that failed leaves behind


@attrs.frozen(kw_only=True)
class FaultRates:
    """How unlike the ranks' machines are.

    Attributes:
        max_latency_steps: a transfer ends 1 to this many steps after it began.
        failure: chance that a transfer or a query fails on one rank.
        no_host_page: chance that a rank finds no host page though the ledger says that there is one.
        no_load_room: chance, a step, that a rank can begin no copy to the device.
        storage_outage: chance, a step, that a rank's storage is away for a while.
    """

    max_latency_steps: int = 8
    failure: float = 0.02
    no_host_page: float = 0.02
    no_load_room: float = 0.1
    storage_outage: float = 0.002


class SimulatedHostPages:
    """``HostPages`` whose reservations fail now and then, on this rank alone."""

    def __init__(self, num_pages: int, *, rng: random.Random, failure: float) -> None:
        self.pool = PagePool(num_pages)
        self._rng = rng
        self._failure = failure

    def reserve(self, num_pages: int) -> list[int]:
        if self._rng.random() < self._failure:
            raise OutOfPagesError(num_pages, 0)
        return self.pool.allocate(num_pages)

    def commit(self, pages: Sequence[int]) -> None:
        self.pool.to_cache(pages)

    def abort(self, pages: Sequence[int]) -> None:
        self.pool.free(pages)

    def release(self, pages: Sequence[int]) -> None:
        self.pool.from_cache(pages)

    def check_integrity(self, committed: Sequence[int]) -> None:
        self.pool.check(committed)


@dataclass(slots=True)
class SimulatedStorage:
    """What all ranks share: slice -> digests of the pages whose slice is stored, with their content."""

    pages: dict[str, dict[bytes, bytes]] = field(default_factory=dict)

    def slice_of(self, name: str) -> dict[bytes, bytes]:
        return self.pages.setdefault(name, {})


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One ``ReadStorage`` under way."""

    instruction: ReadStorage
    num_landed: int = 0
    is_stopped: bool = False


@dataclass(slots=True, kw_only=True)
class SimulatedMover:
    """A ``PageMover`` and ``PageWitness`` in one thread; ``poll`` lets one step of time pass.

    Attributes:
        rng: this rank's own.
        rates: how bad it is.
        stored: the slice of storage that this rank reads.
        writes: this rank is the one that writes its slice.
    """

    rng: random.Random
    rates: FaultRates
    stored: dict[bytes, bytes]
    writes: bool
    _device: dict[int, bytes] = field(default_factory=dict, init=False)
    _host: dict[int, bytes] = field(default_factory=dict, init=False)
    _copies: list[tuple[int, Instruction]] = field(default_factory=list, init=False)
    _readings: dict[int, _Reading] = field(default_factory=dict, init=False)
    _step: int = field(default=0, init=False)
    _storage_back_at: int = field(default=0, init=False)
    load_room_pages: int = field(default=2**31, init=False)

    @property
    def has_storage(self) -> bool:
        return self._step >= self._storage_back_at

    def submit(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, ReadStorage):
                self._readings[instruction.op] = _Reading(instruction=instruction)
            elif isinstance(instruction, StopReading):
                if instruction.op in self._readings:
                    self._readings[instruction.op].is_stopped = True
            elif not isinstance(instruction, StorageUnused):
                self._copies.append((self._step + self.rng.randint(1, self.rates.max_latency_steps), instruction))

    def poll(self) -> list[IoEvent]:
        self._step += 1
        rng, rates = self.rng, self.rates
        self.load_room_pages = 0 if rng.random() < rates.no_load_room else rng.randint(1, 64)
        if rng.random() < rates.storage_outage:
            self._storage_back_at = self._step + rng.randint(1, 4 * rates.max_latency_steps)
        due = [instruction for at, instruction in self._copies if at <= self._step]
        self._copies = [(at, instruction) for at, instruction in self._copies if at > self._step]
        events = [self._end(instruction) for instruction in due]
        for reading in list(self._readings.values()):
            events += self._read_on(reading)
        return events

    def close(self) -> None:
        """Nothing to let go of."""

    def computed(self, digests: bytes, pages: Sequence[int]) -> None:
        self._device.update(zip(pages, _each(digests), strict=True))

    def loaded(self, digests: bytes, pages: Sequence[int]) -> None:
        for digest, page in zip(_each(digests), pages, strict=True):
            if self._device.get(page) != digest:
                raise CacheIntegrityError(f"device page {page} was loaded with another page's content")

    def _end(self, instruction: Instruction) -> IoEvent:
        is_good = self.rng.random() >= self.rates.failure
        if isinstance(instruction, CopyToHost):
            for device_page, host_page in zip(instruction.device_pages, instruction.host_pages, strict=True):
                self._host[host_page] = self._device[device_page] if is_good else _TORN
            return WriteDone(instruction.op, is_good)
        if isinstance(instruction, CopyToDevice):
            for host_page, device_page in zip(instruction.host_pages, instruction.device_pages, strict=True):
                self._device[device_page] = self._host[host_page] if is_good else _TORN
            return LoadDone(instruction.op, is_good)
        if isinstance(instruction, WriteToStorage):
            return BackupDone(instruction.op, self._back_up(instruction, is_good))
        assert isinstance(instruction, QueryStorage)
        digests = _each(instruction.digests) if is_good and self.has_storage else []
        hit = next((at for at, digest in enumerate(digests) if digest not in self.stored), len(digests))
        return StorageAnswered(instruction.op, hit)

    def _back_up(self, instruction: WriteToStorage, is_good: bool) -> bool:
        if not self.writes:
            return True  # the one that writes this slice answers for it
        if is_good and self.has_storage:
            pages = (self._host[page] for page in instruction.host_pages)
            self.stored.update(zip(_each(instruction.digests), pages, strict=True))
        return is_good and self.has_storage

    def _read_on(self, reading: _Reading) -> list[IoEvent]:
        """Land a random number of further pages; end when all are there, one is not to be had, or told to."""
        instruction, events = reading.instruction, list[IoEvent]()
        digests = _each(instruction.digests)
        fails = self.rng.random() < self.rates.failure
        for _ in range(0 if fails or reading.is_stopped else self.rng.randint(0, 4)):
            content = self.stored.get(digests[reading.num_landed])
            if content is None:
                fails = True
                break
            self._host[instruction.host_pages[reading.num_landed]] = content
            reading.num_landed += 1
            events.append(PagesLanded(instruction.op, reading.num_landed))
            if reading.num_landed == len(digests):
                break
        if fails or reading.is_stopped or reading.num_landed == len(digests):
            del self._readings[instruction.op]
            events.append(ReadEnded(instruction.op))
        return events


def _each(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
