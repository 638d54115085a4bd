"""Dynamo's index of who holds what, its ``RadixTree``, where ``ai-dynamo-runtime`` is installed (read in 1.6.1)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

__all__ = ["DynamoTree", "has_dynamo"]

_MODULE = "dynamo._core"


def has_dynamo() -> bool:
    """Whether the tree can be measured here."""
    try:
        importlib.import_module(_MODULE)
    except ImportError:
        return False
    return True


class DynamoTree:
    """The tree behind the two calls that a view is compared by. A block's hash stands for its tokens' hash, too."""

    def __init__(self) -> None:
        self._tree: Any = importlib.import_module(_MODULE).RadixTree()
        self._number = 0

    def store(self, worker: int, hashes: Sequence[int], parent: int | None = None) -> None:
        """Let a worker hold a run of blocks below ``parent``."""
        blocks = [{"block_hash": each % (1 << 64), "tokens_hash": each % (1 << 64)} for each in hashes]
        below = None if parent is None else parent % (1 << 64)
        data = {"stored": {"parent_hash": below, "blocks": blocks}}
        self._number += 1
        self._tree.apply_event(worker, msgspec.json.encode({"event_id": self._number, "data": data, "dp_rank": 0}))

    def match_lengths(self, hashes: Sequence[int]) -> Mapping[object, int]:
        """How many leading blocks each worker holds; unsigned hashes."""
        scores: Mapping[object, int] = self._tree.find_matches(hashes).scores
        return scores

    def find(self, hashes: Sequence[int]) -> object:
        """The same without a dict of the answer."""
        return self._tree.find_matches(hashes)
