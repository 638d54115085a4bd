"""Ballots: everything that ranks must agree on at one point, packed into one int64 vector for one MIN reduction.

One operator is enough: MAX(v) is ``~MIN(~v)`` (``~`` reverses the order of int64 and cannot overflow), "all agree" is
the MIN of 0 and 1, "any agrees" their MAX, and values are equal when their MIN is their MAX.

A ballot's first block has a fixed length and begins with a header that every rank must share: operation and slots (as
a digest), step, and call number. So ranks that come with different questions find out in the very collective that
they share, at no cost, and only then may the rest of a long ballot follow: gloo ends a process whose peers come with
a vector of another length (measured, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from scheduler_components.hicache.sync_call import MAX_OPERATION_BYTES

__all__ = ["BLOCK_INTS", "Ballot", "Outcome", "elementwise_min"]

BLOCK_INTS = 256
"""Length of the first block, which every agreement reduces: 250 integers of slots and the header."""

_HEADER_INTS = 6
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_ROOM_FOR_PADDING = [0] * BLOCK_INTS


def elementwise_min(vectors: Sequence[Sequence[int]]) -> list[int]:
    """Return the minimum at each place of vectors of one length."""
    return [min(column) for column in zip(*vectors, strict=True)]


class Outcome(msgspec.Struct, frozen=True):
    """What all ranks agreed on: the same value on each of them.

    Attributes:
        numbers: results of ``min`` and ``max`` slots by name.
        verdicts: results of ``all``, ``any`` and ``equal`` slots by name.
    """

    numbers: dict[str, int]
    verdicts: dict[str, bool]


class Ballot:
    """What one rank brings to one agreement. Every rank fills the same slots, in the same order.

    Args:
        operation: what the agreement is for, at most 64 bytes; shown in every error.
        step: the caller's step; ranks at different steps part here.

    Raises:
        ValueError: the name is too long, a slot is named twice, or a value is not an int64.
    """

    __slots__ = ("_kinds", "_values", "operation", "step")

    def __init__(self, operation: str, *, step: int) -> None:
        if not 0 < len(operation.encode()) <= MAX_OPERATION_BYTES:
            raise ValueError(f"operation {operation!r} is not 1 to {MAX_OPERATION_BYTES} bytes long")
        self.operation = operation
        self.step = step
        self._kinds: dict[str, str] = {}
        self._values: list[int] = []

    def min(self, name: str, value: int) -> None:
        """Ask for the smallest value of all ranks."""
        self._add("min", name, value)

    def max(self, name: str, value: int) -> None:
        """Ask for the largest value of all ranks."""
        self._add("max", name, value)

    def all(self, name: str, agrees: bool) -> None:
        """Ask whether every rank agrees."""
        self._add("all", name, int(agrees))

    def any(self, name: str, agrees: bool) -> None:
        """Ask whether at least one rank agrees."""
        self._add("any", name, int(agrees))

    def equal(self, name: str, value: int) -> None:
        """Ask whether all ranks have the same value, for example a digest."""
        self._add("equal", name, value)

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._values)

    def pack(self, call_number: int) -> list[int]:
        """Return the vector to reduce: at least ``BLOCK_INTS`` long, and as long on every rank that has these slots."""
        packed: list[int] = []
        for value in (self._layout_digest(), self.step, call_number):
            packed += (value, ~value)
        for kind, value in zip(self._kinds.values(), self._values, strict=True):
            if kind == "equal":
                packed += (value, ~value)
            else:
                packed.append(~value if kind in ("max", "any") else value)
        return packed + _ROOM_FOR_PADDING[len(packed) :]

    @staticmethod
    def header_agrees(reduced: Sequence[int]) -> bool:
        """Say whether all ranks came with the same operation, slots, step and call number."""
        return all(reduced[at] == ~reduced[at + 1] for at in range(0, _HEADER_INTS, 2))

    def open(self, reduced: Sequence[int]) -> Outcome:
        """Read the reduced vector; ask ``header_agrees`` first."""
        numbers: dict[str, int] = {}
        verdicts: dict[str, bool] = {}
        at = _HEADER_INTS
        for name, kind in self._kinds.items():
            least = reduced[at]
            at += 1
            if kind == "min":
                numbers[name] = least
            elif kind == "max":
                numbers[name] = ~least
            elif kind == "all":
                verdicts[name] = bool(least)
            elif kind == "any":
                verdicts[name] = bool(~least)
            else:
                verdicts[name] = least == ~reduced[at]
                at += 1
        return Outcome(numbers, verdicts)

    def _add(self, kind: str, name: str, value: int) -> None:
        if name in self._kinds:
            raise ValueError(f"{self.operation!r} has two slots named {name!r}")
        if not _INT64_MIN <= value <= _INT64_MAX:
            raise ValueError(f"{self.operation!r}: {name}={value} is not a signed 64-bit integer")
        self._kinds[name] = kind
        self._values.append(value)

    def _layout_digest(self) -> int:
        slots = "\0".join(f"{kind}:{name}" for name, kind in self._kinds.items())
        digest = blake2b(f"{self.operation}\0{slots}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)
