"""Storage keys: what a stored page is, which slice of it a rank holds, and who writes it. Declared once, derived here.

Peers decided this rank by rank: with a rank in the key where the data is the same on every rank the cache splits into
keys that nobody reads, and without one where it differs ranks read each other's slices and output is garbled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha256
from itertools import product
from typing import Literal, TypeAlias

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.parallel_state import ParallelState

__all__ = ["Held", "KeySpace", "Placement"]

Held: TypeAlias = Literal["replicated", "sharded"]
"""Along one axis, every rank holds the same bytes of a page (replicated), or its own slice of them (sharded)."""

AXES = ("attn_tp", "attn_cp", "pp")
_MIN_DIGEST_BYTES = 16
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")


def _check_held(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in ("replicated", "sharded"):
        raise ConfigError(attribute.name, value, "is not a placement", 'give "replicated" or "sharded"')


@attrs.frozen(kw_only=True)
class Placement:
    """How a page's bytes lie over the ranks of one replica.

    Pipeline stages hold different layers, so ``pp`` is sharded in every known engine. The defaults are those of
    grouped-query attention whose context-parallel ranks gather the keys and values before they cache them.

    Raises:
        ConfigError: a value is neither "replicated" nor "sharded".
    """

    attn_tp: Held = attrs.field(default="sharded", validator=_check_held)
    attn_cp: Held = attrs.field(default="replicated", validator=_check_held)
    pp: Held = attrs.field(default="sharded", validator=_check_held)

    @classmethod
    def latent(cls) -> Placement:
        """Multi-head latent attention (MLA): one latent for all heads, so the same on every attention-TP rank."""
        return cls(attn_tp="replicated")


def _check_text(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(attribute.name, value, "is empty", "name what the pages hold")


def _check_page_size(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(attribute.name, value, "is not a page size", "give an integer of at least 1, in tokens")


@attrs.frozen(kw_only=True)
class KeySpace:
    """The keys of one rank's pages.

    A key is ``<namespace>/<page digest>[<suffix>]``. The namespace tells apart pages whose bytes mean different things.
    The suffix names the slice of the page: one part for each axis that is sharded over more than one rank. A page
    that is whole along an axis has no part for it, so an engine of another size along that axis can read it.
    Attention-DP ranks and other engines share keys: their pages of one digest have the same content.

    Attributes:
        model: the model and its revision, as all engines that share the store name it.
        dtype: of the cached keys and values.
        page_size: tokens a page.
        layout: order of the bytes within a page, for example ``"page_first"``.
        placement: how pages lie over the ranks.
        parallel: this rank.

    Raises:
        ConfigError: a part is empty, or the placement cannot be so on these ranks.
    """

    model: str = attrs.field(validator=_check_text)
    dtype: str = attrs.field(validator=_check_text)
    page_size: int = attrs.field(validator=_check_page_size)
    layout: str = attrs.field(validator=_check_text)
    placement: Placement
    parallel: ParallelState
    namespace: str = attrs.field(init=False)
    suffix: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.parallel.dcp_size > 1 and self.placement.attn_tp == "replicated":
            raise ConfigError(
                "placement.attn_tp",
                "replicated",
                f"cannot be with dcp_size={self.parallel.dcp_size}: decode context parallelism slices pages over it",
                'give "sharded"',
            )
        object.__setattr__(self, "namespace", self._make_namespace())
        ranks = (getattr(self.parallel, f"{axis}_rank") for axis in AXES)
        object.__setattr__(self, "suffix", self._suffix_of(tuple(ranks)))

    @property
    def writes(self) -> bool:
        """True on the one rank of the replica that writes this rank's slice: the first along each replicated axis."""
        return all(
            getattr(self.parallel, f"{axis}_rank") == 0
            for axis in AXES
            if getattr(self.placement, axis) == "replicated"
        )

    def key(self, page_digest: bytes) -> str:
        """Return the key of this rank's slice of a page.

        Args:
            page_digest: the page's whole chained digest. A 64-bit block hash is too short to be an identity here: two
                pages that share a key would be served for each other.

        Raises:
            ValueError: the digest has fewer than 16 bytes.
        """
        return f"{self._page(page_digest)}{self.suffix}"

    def read_quorum(self, page_digest: bytes) -> tuple[str, ...]:
        """Return the keys of all slices of a page: the replica can use it only if every one of them is there.

        Each rank asks for its own; the MIN over all ranks is the agreement. One rank that can see the store may ask for
        all of them instead.
        """
        page = self._page(page_digest)
        return tuple(f"{page}{suffix}" for suffix in self._all_suffixes())

    def _page(self, page_digest: bytes) -> str:
        if len(page_digest) < _MIN_DIGEST_BYTES:
            raise ValueError(f"a page digest of {len(page_digest)} bytes; give at least {_MIN_DIGEST_BYTES}")
        return f"{self.namespace}/{page_digest.hex()}"

    def _make_namespace(self) -> str:
        fields = (self.model, self.dtype, str(self.page_size), self.layout)
        # Lengths go in, so that no two lists of fields join to the same text.
        identity = "".join(f"{len(field)}:{field}" for field in fields)
        readable = _NOT_PLAIN.sub("-", self.model.rpartition("/")[2])[:40]
        return f"{readable}-{sha256(identity.encode()).hexdigest()[:32]}"

    def _suffix_of(self, ranks: tuple[int, ...]) -> str:
        parts = []
        for axis, rank in zip(AXES, ranks, strict=True):
            size = getattr(self.parallel, f"{axis}_size")
            if getattr(self.placement, axis) == "sharded" and size > 1:
                parts.append(f".{axis}{rank}of{size}")
        return "".join(parts)

    def _all_suffixes(self) -> Iterator[str]:
        sizes = (getattr(self.parallel, f"{axis}_size") for axis in AXES)
        return iter(dict.fromkeys(self._suffix_of(ranks) for ranks in product(*map(range, sizes))))
