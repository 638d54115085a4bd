"""FaultyDisk: files that may be lost or torn when their machine crashes.

The product syncs every write. An honest disk keeps it; one that lies about syncs may lose or tear the newest write of a
file.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import attrs

from scheduler_components._internal.validators import number_validator

__all__ = ["DiskFaults", "FaultyDisk", "FloorOnFaultyDisk", "WriteFate"]

_is_probability = number_validator("is not a probability", or_zero=True)


@attrs.frozen(kw_only=True)
class DiskFaults:
    """How bad a disk is: probabilities at a crash, from 0 to 1.

    Attributes:
        lies: the newest write of a file was not synced.
        lost, torn: a write that was not synced is lost, or only a part of it is kept.
    """

    lies: float = attrs.field(default=0.0, validator=_is_probability)
    lost: float = attrs.field(default=0.5, validator=_is_probability)
    torn: float = attrs.field(default=0.1, validator=_is_probability)


class WriteFate(StrEnum):
    """What has become of the newest write of a file."""

    KEPT = "kept"
    LOST = "lost"
    TORN = "torn"


@dataclass(slots=True)
class _File:
    """The content of a file, and the one before its newest write. None if there is no file."""

    content: bytes | None = None
    before: bytes | None = None
    fate: WriteFate = WriteFate.KEPT


@dataclass(slots=True, kw_only=True)
class FaultyDisk:
    """The disk of one machine.

    Attributes:
        random: of the world.
        faults: how bad it is.
        counters: ``disk writes lost`` and ``disk writes torn``.
    """

    random: random.Random
    faults: DiskFaults
    counters: Counter[str] = field(default_factory=Counter)
    _files: dict[str, _File] = field(default_factory=dict)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        return self._files[name].content if name in self._files else None

    def fate(self, name: str) -> WriteFate:
        """Return what has become of the newest write of a file."""
        return self._files[name].fate if name in self._files else WriteFate.KEPT

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a file."""
        file = self._files.setdefault(name, _File())
        file.before, file.content, file.fate = file.content, content, WriteFate.KEPT

    def lose(self, name: str) -> None:
        """Lose a file for good, as an operator may."""
        file = self._files.setdefault(name, _File())
        file.content, file.before, file.fate = None, None, WriteFate.LOST

    def crash(self) -> None:
        """Let the machine crash: of a disk that lies, the newest write of each file is kept, lost or torn."""
        for name in sorted(self._files):
            self._crash_file(self._files[name])

    def _crash_file(self, file: _File) -> None:
        if file.content is None or file.fate is not WriteFate.KEPT or not self._happens(self.faults.lies):
            return
        if self._happens(self.faults.lost):
            file.content, file.fate = file.before, WriteFate.LOST
        elif self._happens(self.faults.torn):
            file.content = file.content[: self.random.randrange(len(file.content))]
            file.fate = WriteFate.TORN
        else:
            return
        self.counters[f"disk writes {file.fate}"] += 1

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
        """Replace the content."""
        self.disk.write(self.name, content)

    def close(self) -> None:
        """Let another publisher use the file."""
        self.is_open = False
