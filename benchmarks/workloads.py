"""The events that the benchmarks publish: a few shapes per step, new objects every step as a cache makes them.

The pool of a cache is bounded. Once it is full, the cache removes as many blocks as it stores.
"""

from __future__ import annotations

from typing import Any

import msgspec

BLOCK_SIZE = 16
_POOL_BLOCKS = 131_072
"""Blocks of a full pool: two million tokens."""

_MAX_POOL_STEPS = 1_000
"""Steps that fill the pool of small steps. A larger pool would take longer to fill than to measure."""

_TOKENS = list(range(100_000, 100_000 + 8_193))
"""One more than any event has, so that a slice is always a new object."""


class Shape(msgspec.Struct, frozen=True):
    """The events of one step.

    Attributes:
        name: name in the table.
        num_events: stored events per step; in a full pool also as many removed events.
        blocks_per_event: blocks of 16 tokens.
    """

    name: str
    num_events: int
    blocks_per_event: int

    @property
    def pool_steps(self) -> int:
        """Return the number of steps that fill the pool. Later steps remove what was stored as many steps before."""
        return min(_MAX_POOL_STEPS, _POOL_BLOCKS // (self.num_events * self.blocks_per_event))

    def fields(self, step: int, sequence: type[list[int]] | type[tuple[int, ...]] = list) -> list[dict[str, Any]]:
        """Return the fields of the step's BlockStored events. Hashes are new in every step; parents are None.

        ``sequence`` is the container type: the peers' caches make lists, the kit's makes tuples.
        """
        tokens = _TOKENS_IN[sequence][: self.blocks_per_event * BLOCK_SIZE]
        return [
            {
                "block_hashes": sequence(self._hashes(step, event)),
                "parent_block_hash": None,
                "token_ids": tokens,
                "block_size": BLOCK_SIZE,
                "lora_id": None,
                "medium": "GPU",  # every real cache sets it; events without it encode in a quarter of the time
            }
            for event in range(self.num_events)
        ]

    def removed_fields(
        self, step: int, sequence: type[list[int]] | type[tuple[int, ...]] = list
    ) -> list[dict[str, Any]]:
        """Return the fields of the BlockRemoved events that remove what ``step`` stored, one per stored event."""
        return [
            {"block_hashes": sequence(self._hashes(step, event)), "medium": "GPU"} for event in range(self.num_events)
        ]

    def _hashes(self, step: int, event: int) -> list[int]:
        return _spread(1 + (step * self.num_events + event) * self.blocks_per_event, self.blocks_per_event)


_TOKENS_IN: dict[Any, Any] = {list: _TOKENS, tuple: tuple(_TOKENS)}


def _spread(first: int, count: int) -> list[int]:
    """Return distinct signed 64-bit numbers that take nine bytes in msgpack, as hashes do."""
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
