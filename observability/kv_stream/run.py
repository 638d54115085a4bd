"""What a stream cursor remembers: the run of batches that it is on, and the replay question that it has open."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NOTHING_APPLIED", "Question", "Run"]

NOTHING_APPLIED = -1
"""``last_seq`` before the first batch: one below the number of a publisher's first."""


@dataclass(slots=True)
class Run:
    """The unbroken run of batches that the view is built from.

    ``complete`` means that it began where the publisher's state was known. ``adopting`` means that it may begin at
    any number: there is no history to be had. ``hole_after`` is the number after which one answer had a hole; the
    same hole twice means that the batches are lost.
    """

    last: int = NOTHING_APPLIED
    payload: bytes = b""
    complete: bool = False
    adopting: bool = False
    hole_after: int | None = None


@dataclass(slots=True)
class Question:
    """One open replay question.

    ``full`` asks for all history; otherwise it continues the run. ``has_batches`` means that the stream is known not
    to be empty, ``newer_seen`` that a live batch was dropped since.
    """

    ask: int
    full: bool
    has_batches: bool
    answers: int = 0
    applied: int = 0
    has_hole: bool = False
    newer_seen: bool = False
