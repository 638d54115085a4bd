"""Links that lose, repeat, reorder, delay and cut messages.

``FaultyLink`` is a queue of messages in transit. Its owner decides when the next one arrives, and with which fault: the
steps of a test, or ``TimedLink``, which draws both from a ``Timeline``.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

import attrs

from scheduler_components._internal.validators import number_validator
from worlds.timeline import Timeline

M = TypeVar("M")


class LinkFault(StrEnum):
    """What happens to the next message of a link."""

    NONE = "none"
    LOSE = "lose"
    REPEAT = "repeat"
    REORDER = "reorder"


@dataclass(slots=True)
class LinkCounters:
    """What became of the messages of a link.

    Attributes:
        sent: accepted by the link.
        arrived: including the repeated ones.
        lost, repeated, reordered: by a fault.
        overflowed: not accepted, because the link was full.
        cut: in transit when the link was cut.
    """

    sent: int = 0
    arrived: int = 0
    lost: int = 0
    repeated: int = 0
    reordered: int = 0
    overflowed: int = 0
    cut: int = 0


@dataclass(slots=True, kw_only=True)
class FaultyLink(Generic[M]):
    """Messages in transit, one way, the oldest first.

    At any time, ``sent + repeated = arrived + lost + cut + len(in_transit)``.

    Attributes:
        capacity: messages in transit at most, as the high-water mark of a socket; None for no limit.
    """

    capacity: int | None = None
    in_transit: deque[M] = field(default_factory=deque)
    counters: LinkCounters = field(default_factory=LinkCounters)

    def send(self, message: M) -> bool:
        """Send a message. Return False if the link is full: the message is dropped."""
        if self.capacity is not None and len(self.in_transit) >= self.capacity:
            self.counters.overflowed += 1
            return False
        self.counters.sent += 1
        self.in_transit.append(message)
        return True

    def deliver(self, fault: LinkFault = LinkFault.NONE) -> M | None:
        """Return the next message that arrives; None if it is lost, or if none is in transit."""
        messages, counters = self.in_transit, self.counters
        if not messages:
            return None
        if fault is LinkFault.REORDER and len(messages) > 1:
            messages[0], messages[1] = messages[1], messages[0]
            counters.reordered += 1
        message = messages.popleft()
        if fault is LinkFault.LOSE:
            counters.lost += 1
            return None
        if fault is LinkFault.REPEAT:
            messages.appendleft(message)
            counters.repeated += 1
        counters.arrived += 1
        return message

    def cut(self) -> None:
        """Drop everything that is in transit."""
        self.counters.cut += len(self.in_transit)
        self.in_transit.clear()


_is_probability = number_validator("is not a probability", or_zero=True)


@attrs.frozen(kw_only=True)
class LinkQuality:
    """How good a link is.

    Attributes:
        latency_s, jitter_s: a message takes ``latency_s``, and up to ``jitter_s`` more. Messages keep their order.
        loss, duplication, reordering: probability for each message, from 0 to 1.
        capacity: messages in transit at most; None for no limit.

    Raises:
        ConfigError: a value is out of range.
    """

    latency_s: float = attrs.field(default=0.001, validator=number_validator(or_zero=True))
    jitter_s: float = attrs.field(default=0.0, validator=number_validator(or_zero=True))
    loss: float = attrs.field(default=0.0, validator=_is_probability)
    duplication: float = attrs.field(default=0.0, validator=_is_probability)
    reordering: float = attrs.field(default=0.0, validator=_is_probability)
    capacity: int | None = None

    @property
    def max_latency_s(self) -> float:
        """The longest time that a message takes."""
        return self.latency_s + self.jitter_s


PERFECT = LinkQuality()
"""A link without faults."""


class TimedLink(Generic[M]):
    """A ``FaultyLink`` whose messages arrive by the time line.

    Args:
        timeline: of the world.
        quality: may be replaced at any time; it applies to messages that are sent or arrive from then on.
        receive: called with each message that arrives.
        on_fault: called with each fault and the message that it hits, before its effect.
    """

    __slots__ = ("_arrival_s", "_is_cut", "_on_fault", "_receive", "_timeline", "link", "quality")

    def __init__(
        self,
        timeline: Timeline,
        quality: LinkQuality,
        receive: Callable[[M], None],
        *,
        on_fault: Callable[[LinkFault, M], None],
    ) -> None:
        self.link: FaultyLink[M] = FaultyLink(capacity=quality.capacity)
        self.quality = quality
        self._timeline = timeline
        self._receive = receive
        self._on_fault = on_fault
        self._arrival_s = 0.0
        self._is_cut = False

    def send(self, message: M) -> bool:
        """Send a message. Return False if the link is full or was cut: the message is dropped."""
        if self._is_cut or not self.link.send(message):
            return False
        self._schedule()
        return True

    def _schedule(self) -> None:
        quality, timeline = self.quality, self._timeline
        delay_s = quality.latency_s + (timeline.random.random() * quality.jitter_s if quality.jitter_s else 0.0)
        self._arrival_s = max(self._arrival_s, timeline.now_s + delay_s)
        timeline.at(self._arrival_s, self._arrive)

    def _arrive(self) -> None:
        if not self.link.in_transit:
            return
        fault = self._draw_fault()
        if fault is not LinkFault.NONE:
            self._on_fault(fault, self.link.in_transit[0])
        message = self.link.deliver(fault)
        if fault is LinkFault.REPEAT:
            self._schedule()
        if message is not None:
            self._receive(message)

    def _draw_fault(self) -> LinkFault:
        quality, happens = self.quality, self._timeline.happens
        if happens(quality.loss):
            return LinkFault.LOSE
        if happens(quality.duplication):
            return LinkFault.REPEAT
        if len(self.link.in_transit) > 1 and happens(quality.reordering):
            return LinkFault.REORDER
        return LinkFault.NONE

    def cut(self) -> None:
        """Close the link: nothing arrives any more."""
        self._is_cut = True
        self.link.cut()


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
