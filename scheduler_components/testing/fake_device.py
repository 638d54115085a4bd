"""The device and the model of a scheduler under check. A step takes no time.

``PagedModel`` computes each token from pages of KV, so that a wrong page gives a wrong token.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

__all__ = ["InstantDevice", "PagedModel", "next_token"]

B = TypeVar("B")
R = TypeVar("R")


class InstantDevice(Generic[B, R]):
    """``launch`` keeps the batch, ``wait`` computes its answer; a scheduler with such a device takes no time.

    Args:
        compute: a batch's answer.

    Attributes:
        scripted: answers or errors given first, one per step, instead of computed ones.
        launched: every batch so far.
    """

    def __init__(self, compute: Callable[[B], R]) -> None:
        self._compute = compute
        self.scripted: list[R | Exception] = []
        self.launched: list[B] = []

    def launch(self, batch: B) -> None:
        """Begin a step."""
        self.launched.append(batch)

    def wait(self) -> R:
        """End it.

        Raises:
            IndexError: nothing was launched; otherwise what ``scripted`` says.
        """
        batch = self.launched[-1]
        if not self.scripted:
            return self._compute(batch)
        answer = self.scripted.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class PagedModel:
    """Answers ``next_token`` as long as the pages of a request hold its KV, and other tokens otherwise.

    A page that was given away too early, shared before it was computed, or never computed changes what comes out.

    Args:
        page_size: tokens per page.

    Attributes:
        kv: the value of each position of each page that was ever written.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.kv: dict[int, list[int]] = {}

    def forward(self, token_ids: Sequence[int], pages: Sequence[int], start: int) -> int:
        """Compute positions ``start`` to ``len(token_ids)`` into their pages; returns the token after them.

        Args:
            token_ids: from the first position of the request on.
            pages: one index per page of them, in order.
            start: positions before it are read from the pages as they are.

        Raises:
            IndexError: there is no page for a position.
            ValueError: no position is left to compute, and so nothing tells the next token.
        """
        if start >= len(token_ids):
            raise ValueError(f"all {len(token_ids)} positions are computed; leave the last one out of a cached prefix")
        kv: list[int] = []
        for position, token in enumerate(token_ids):
            page = self.kv.setdefault(pages[position // self.page_size], [0] * self.page_size)
            place = position % self.page_size
            if position >= start:
                page[place] = kv_value(token, kv[-1] if kv else 0)
            kv.append(page[place])
        return token_after(kv)


def next_token(token_ids: Sequence[int]) -> int:
    """The token after ``token_ids``, all u32: what the model of a scheduler under check must answer.

    It depends on every token before it. ``PagedModel`` of the fakes computes it from pages of KV.
    """
    kv: list[int] = []
    for token in token_ids:
        kv.append(kv_value(token, kv[-1] if kv else 0))
    return token_after(kv)


def kv_value(token: int, before: int) -> int:
    """The KV of one position, of its token and the KV of the position before it; 0 stands before the first."""
    return _hash_u32((token, before))


def token_after(kv: Sequence[int]) -> int:
    """The token that follows positions with this KV."""
    return _hash_u32(kv)


def _hash_u32(values: Sequence[int]) -> int:
    # Not a CRC: that of numbers which are followed by their own CRC is always the same.
    return int.from_bytes(blake2b(array("I", values).tobytes(), digest_size=4).digest(), "little")
