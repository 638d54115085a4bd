"""What the benchmarks publish: a few shapes of a step's events, new objects every step as a cache makes them.

A cache's pool is bounded: once it is full, a cache removes as many blocks as it stores.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["SHAPES", "Shape"]

BLOCK_SIZE = 16
_POOL_BLOCKS = 131_072
"""Of a full pool: two million tokens."""

_MAX_POOL_STEPS = 1_000
"""Of small steps the pool is smaller: to fill it would take longer than to measure."""

_TOKENS = list(range(100_000, 100_000 + 8_193))
"""One more than any event takes, so that a slice of them is always a new object."""


class Shape(msgspec.Struct, frozen=True):
    """The events of one step.

    Attributes:
        name: as it is written in the table.
        num_events: stored events a step; where the pool is full, as many removed ones.
        blocks_per_event: each of 16 tokens.
    """

    name: str
    num_events: int
    blocks_per_event: int

    @property
    def pool_steps(self) -> int:
        """After so many steps the pool is full: each step then removes what was stored so many steps before."""
        return min(_MAX_POOL_STEPS, _POOL_BLOCKS // (self.num_events * self.blocks_per_event))

    def fields(self, step: int, sequence: type[list[int]] | type[tuple[int, ...]] = list) -> list[dict[str, Any]]:
        """The fields of the step's BlockStored events; hashes are new in every step, parents are roots.

        ``sequence`` is what the events hold: the peers' caches make lists, the kit's makes tuples.
        """
        tokens = _TOKENS_IN[sequence][: self.blocks_per_event * BLOCK_SIZE]
        return [
            {
                "block_hashes": sequence(self._hashes(step, event)),
                "parent_block_hash": None,
                "token_ids": tokens,
                "block_size": BLOCK_SIZE,
                "lora_id": None,
                "medium": "GPU",  # as every real cache says; without it events are encoded in a quarter of the time
            }
            for event in range(self.num_events)
        ]

    def removed_fields(
        self, step: int, sequence: type[list[int]] | type[tuple[int, ...]] = list
    ) -> list[dict[str, Any]]:
        """The fields of the BlockRemoved events that take out what ``step`` stored: one for each stored event."""
        return [
            {"block_hashes": sequence(self._hashes(step, event)), "medium": "GPU"} for event in range(self.num_events)
        ]

    def _hashes(self, step: int, event: int) -> list[int]:
        return _spread(1 + (step * self.num_events + event) * self.blocks_per_event, self.blocks_per_event)


_TOKENS_IN: dict[Any, Any] = {list: _TOKENS, tuple: tuple(_TOKENS)}


def _spread(first: int, count: int) -> list[int]:
    """Distinct signed 64-bit numbers that look like hashes: all nine bytes of msgpack."""
    return [(index * 0x9E3779B97F4A7C15) % (1 << 64) - (1 << 63) for index in range(first, first + count)]


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("1 block", 1, 1),
        Shape("16 events", 16, 1),
        Shape("64 events", 64, 1),
        Shape("256 events", 256, 1),
        Shape("8,192 tokens", 1, 512),
        Shape("128 events of 64 tokens", 128, 4),
    )
}
