"""Wrap Dynamo's ``RadixTree`` index if ``ai-dynamo-runtime`` is installed (written for 1.6.1)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_MODULE = "dynamo._core"


def has_dynamo() -> bool:
    """Return whether the tree is installed."""
    try:
        importlib.import_module(_MODULE)
    except ImportError:
        return False
    return True


class DynamoTree:
    """The tree behind the calls of a comparison. A block's hash also serves as the hash of its tokens."""

    def __init__(self) -> None:
        self._tree: Any = importlib.import_module(_MODULE).RadixTree()
        self._number = 0

    def store(self, worker: int, hashes: Sequence[int], parent: int | None = None) -> None:
        """Store a run of blocks below ``parent`` for a worker."""
        blocks = [{"block_hash": each % (1 << 64), "tokens_hash": each % (1 << 64)} for each in hashes]
        below = None if parent is None else parent % (1 << 64)
        self._apply(worker, {"stored": {"parent_hash": below, "blocks": blocks}})

    def remove(self, worker: int, hashes: Sequence[int]) -> None:
        """Remove blocks of a worker."""
        self._apply(worker, {"removed": {"block_hashes": [each % (1 << 64) for each in hashes]}})

    def _apply(self, worker: int, data: object) -> None:
        self._number += 1
        self._tree.apply_event(worker, msgspec.json.encode({"event_id": self._number, "data": data, "dp_rank": 0}))

    def match_lengths(self, hashes: Sequence[int]) -> Mapping[object, int]:
        """Return the number of leading blocks per worker, for unsigned hashes."""
        scores: Mapping[object, int] = self._tree.find_matches(hashes).scores
        return scores

    def find(self, hashes: Sequence[int]) -> object:
        """Do the same without converting the answer to a dict."""
        return self._tree.find_matches(hashes)
