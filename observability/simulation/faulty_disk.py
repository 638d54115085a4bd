"""FaultyDisk: files that may be lost or torn when their machine crashes.

A write that was synced survives a crash, unless the disk lies about it. A write that was not synced may be kept, lost
or torn.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import attrs

from scheduler_components.validators import number_validator

__all__ = ["DiskFaults", "FaultyDisk", "FloorOnFaultyDisk"]

_is_probability = number_validator("is not a probability", or_zero=True)


@attrs.frozen(kw_only=True)
class DiskFaults:
    """How bad a disk is: probabilities at a crash, from 0 to 1.

    Attributes:
        lies: a synced write counts as one that was not synced.
        lost, torn: a write that was not synced is lost, or only a part of it is kept.
    """

    lies: float = attrs.field(default=0.0, validator=_is_probability)
    lost: float = attrs.field(default=0.5, validator=_is_probability)
    torn: float = attrs.field(default=0.1, validator=_is_probability)


@dataclass(slots=True)
class _File:
    """A file of one content, or of records, and what a crash leaves of it."""

    content: bytes | None = None
    durable: bytes | None = None
    is_synced: bool = True


@dataclass(slots=True)
class _Log:
    records: list[bytes] = field(default_factory=list)
    num_synced: int = 0


@dataclass(slots=True, kw_only=True)
class FaultyDisk:
    """The disk of one machine.

    Attributes:
        random: of the world.
        faults: how bad it is.
        counters: writes ``kept``, ``lost`` and ``torn`` by crashes, as far as they were at risk.
    """

    random: random.Random
    faults: DiskFaults
    counters: Counter[str] = field(default_factory=Counter)
    _files: dict[str, _File] = field(default_factory=dict)
    _logs: dict[str, _Log] = field(default_factory=dict)

    # --- files that are replaced as a whole ---

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        return self._files[name].content if name in self._files else None

    def write(self, name: str, content: bytes, *, is_synced: bool) -> None:
        """Replace a file. Only its newest write is at risk in a crash."""
        file = self._files.setdefault(name, _File())
        file.durable, file.content, file.is_synced = file.content, content, is_synced

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        self._files.pop(name, None)

    # --- logs of records ---

    def append(self, name: str, record: bytes) -> None:
        """Append a record to a log. It is at risk until ``sync``."""
        self._logs.setdefault(name, _Log()).records.append(record)

    def sync(self, name: str) -> None:
        """Make all records of a log durable, unless the disk lies."""
        log = self._logs.setdefault(name, _Log())
        log.num_synced = len(log.records)

    def records(self, name: str) -> list[bytes]:
        """Return the records of a log, without those that a crash has taken or torn."""
        return list(self._logs[name].records) if name in self._logs else []

    # --- the crash ---

    def crash(self) -> None:
        """Let the machine crash: what was not durable is kept, lost or torn."""
        for name in sorted(self._files):
            self._crash_file(name)
        for name in sorted(self._logs):
            self._crash_log(self._logs[name])

    def _crash_file(self, name: str) -> None:
        file = self._files[name]
        if file.content is None or (file.is_synced and not self._happens(self.faults.lies)):
            return
        if self._happens(self.faults.lost):
            self.counters["lost"] += 1
            file.content = file.durable
        elif self._happens(self.faults.torn):
            self.counters["torn"] += 1
            file.content = file.content[: self.random.randrange(len(file.content))] if file.content else b""
        else:
            self.counters["kept"] += 1
        if file.content is None:
            del self._files[name]
        else:
            file.durable, file.is_synced = file.content, True

    def _crash_log(self, log: _Log) -> None:
        first = self.random.randrange(log.num_synced + 1) if self._happens(self.faults.lies) else log.num_synced
        num_at_risk = len(log.records) - first
        if num_at_risk and self._happens(self.faults.lost):
            kept = first + self.random.randrange(num_at_risk)
            self.counters["lost"] += len(log.records) - kept
            del log.records[kept:]
        elif num_at_risk and self._happens(self.faults.torn):
            self.counters["torn"] += 1
            log.records.pop()  # its checksum is wrong, so it reads as absent
        log.num_synced = len(log.records)

    def _happens(self, probability: float) -> bool:
        return probability > 0.0 and self.random.random() < probability


@dataclass(slots=True, kw_only=True)
class FloorOnFaultyDisk:
    """The file of a sequence floor, for ``open_floor``.

    Attributes:
        disk: keeps it.
        name: of the file.
        is_open: until the publisher closes it.
    """

    disk: FaultyDisk
    name: str
    is_open: bool = True

    def read(self) -> bytes | None:
        """Return the content; None if there is no file yet."""
        return self.disk.read(self.name)

    def replace(self, content: bytes) -> None:
        """Replace the content, synced."""
        self.disk.write(self.name, content, is_synced=True)

    def close(self) -> None:
        """Let another publisher use the file."""
        self.is_open = False
