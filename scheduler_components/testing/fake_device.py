"""The device and the model of a scheduler under check. A step takes no time.

``PagedModel`` computes each token from pages of KV, so that a wrong page gives a wrong token.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Generic, TypeVar

__all__ = ["InstantDevice", "PagedModel", "next_token"]

B = TypeVar("B")
R = TypeVar("R")


class InstantDevice(Generic[B, R]):
    """A device without latency: ``launch`` keeps the batch, and ``wait`` computes its result.

    Args:
        compute: computes the result of a batch.

    Attributes:
        scripted: results or errors for the next steps, used before computed results.
        launched: all batches.
    """

    def __init__(self, compute: Callable[[B], R]) -> None:
        self._compute = compute
        self.scripted: list[R | Exception] = []
        self.launched: list[B] = []

    def launch(self, batch: B) -> None:
        self.launched.append(batch)

    def wait(self) -> R:
        """Return the result of the last batch.

        Raises:
            IndexError: no batch was launched.
            Exception: the next item of ``scripted`` is an error.
        """
        batch = self.launched[-1]
        if not self.scripted:
            return self._compute(batch)
        result = self.scripted.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


class PagedModel:
    """A model that returns ``next_token`` if the pages of a request hold its KV, and another token otherwise.

    So a page that was freed too early, shared before its computation, or never computed changes the tokens.

    Args:
        page_size: tokens per page.

    Attributes:
        kv: the values of all written pages, by page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.kv: dict[int, list[int]] = {}

    def forward(self, token_ids: Sequence[int], pages: Sequence[int], start: int) -> int:
        """Compute the KV of positions ``start`` to ``len(token_ids)``, and return the next token.

        Args:
            token_ids: all tokens of the request.
            pages: their page indices, in order.
            start: the first position to compute; earlier positions are read from the pages.

        Raises:
            IndexError: a position has no page.
            ValueError: no position is left to compute.
        """
        if start >= len(token_ids):
            raise ValueError(f"all {len(token_ids)} positions are computed; leave the last one out of a cached prefix")
        size = self.page_size
        held = [self.kv.setdefault(page, [0] * size) for page in pages[: -(-len(token_ids) // size)]]
        kv = [value for page in held for value in page][:start]
        for position in range(start, len(token_ids)):
            kv.append(kv_value(token_ids[position], kv[-1] if kv else 0))
            held[position // size][position % size] = kv[-1]
        return token_after(kv)


def next_token(token_ids: Sequence[int]) -> int:
    """Return the token after ``token_ids`` (u32), which the model of a scheduler under check must return.

    It depends on every earlier token. ``PagedModel`` computes it from pages of KV.
    """
    kv: list[int] = []
    for token in token_ids:
        kv.append(kv_value(token, kv[-1] if kv else 0))
    return token_after(kv)


@lru_cache(maxsize=65_536)
def kv_value(token: int, before: int) -> int:
    """Return the KV of a position, from its token and the KV of the previous position (0 for the first).

    The verifier of a check computes the values of each request again at each of its tokens, so they are kept.
    """
    return _hash_u32((token, before))


def token_after(kv: Sequence[int]) -> int:
    """Return the token after positions with this KV."""
    return _hash_u32(kv)


def _hash_u32(values: Sequence[int]) -> int:
    # A CRC is unsuitable: the CRC of numbers followed by their own CRC is constant.
    return int.from_bytes(blake2b(array("I", values).tobytes(), digest_size=4).digest(), "little")
