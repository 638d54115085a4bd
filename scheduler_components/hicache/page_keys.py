"""Storage keys: which rank reads and writes which slice of a page.

``Placement`` declares once how a page's bytes are distributed over the ranks, and ``KeySpace`` derives the keys. Other
engines decide this rank by rank. If the key contains a rank although all ranks hold the same bytes, the cache splits
into keys that no other rank reads. If the key lacks a rank although the bytes differ, ranks read each other's slices
and the output is garbage.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Literal, TypeAlias, get_args

import attrs

from scheduler_components._internal.validators import choice_validator, integer_validator
from scheduler_components.errors import ConfigError
from scheduler_components.parallel_state import ParallelState

__all__ = ["AXES", "AxisPlacement", "KeySpace", "Placement"]

AxisPlacement: TypeAlias = Literal["replicated", "sharded"]
"""Along one axis, every rank holds the same bytes of a page (replicated), or its own slice (sharded)."""

AXES = ("attn_tp", "attn_cp", "pp")
_IS_PLACEMENT = choice_validator(*get_args(AxisPlacement), problem="is not a placement")
_MIN_DIGEST_BYTES = 16
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")


@attrs.frozen(kw_only=True)
class Placement:
    """How a page's bytes are distributed over the ranks of one replica.

    Pipeline stages hold different layers, so ``pp`` is sharded in every known engine. The defaults fit grouped-query
    attention whose context-parallel ranks gather keys and values before they cache them.

    Raises:
        ConfigError: a value is neither "replicated" nor "sharded".
    """

    attn_tp: AxisPlacement = attrs.field(default="sharded", validator=_IS_PLACEMENT)
    attn_cp: AxisPlacement = attrs.field(default="replicated", validator=_IS_PLACEMENT)
    pp: AxisPlacement = attrs.field(default="sharded", validator=_IS_PLACEMENT)

    @classmethod
    def mla(cls) -> Placement:
        """Return the placement of multi-head latent attention (MLA): all attention-TP ranks hold the same latent."""
        return cls(attn_tp="replicated")


def _check_text(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(attribute.name, value, "is empty", "give a name")


@attrs.frozen(kw_only=True)
class KeySpace:
    """The storage keys of one rank's pages.

    A key is ``<namespace>/<page digest>[<suffix>]``. The namespace separates pages whose bytes mean different things.
    The suffix names the slice of the page: one part for each axis that is sharded over more than one rank. A page that
    is not sharded along an axis has no part for that axis, so an engine of another size along it can read the page.
    Attention-DP ranks and other engines share keys, because their pages of one digest have the same content.

    Attributes:
        model: the model and its revision, by the name that all engines of the store use.
        dtype: data type of the cached keys and values.
        page_size: tokens per page.
        layout: order of the bytes within a page, for example ``STORED_LAYOUT``.
        placement: how pages are distributed over the ranks.
        parallel: this rank.

    Raises:
        ConfigError: a field is empty, or the placement does not fit these ranks.
    """

    model: str = attrs.field(validator=_check_text)
    dtype: str = attrs.field(validator=_check_text)
    page_size: int = attrs.field(validator=integer_validator("is not a page size"))
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
                f"does not work with dcp_size={self.parallel.dcp_size}, which shards pages over attn_tp",
                'give "sharded"',
            )
        object.__setattr__(self, "namespace", self._make_namespace())
        object.__setattr__(self, "suffix", self._make_suffix())

    @property
    def is_writer(self) -> bool:
        """True on the one rank that writes this slice: the first rank along each replicated axis."""
        return all(
            getattr(self.parallel, f"{axis}_rank") == 0
            for axis in AXES
            if getattr(self.placement, axis) == "replicated"
        )

    def key(self, page_digest: bytes) -> str:
        """Return the key of this rank's slice of a page.

        Args:
            page_digest: the page's full chained digest. A 64-bit block hash is too short for an identity: two pages
                that share a key would be served for each other.

        Raises:
            ValueError: the digest has fewer than 16 bytes.
        """
        if len(page_digest) < _MIN_DIGEST_BYTES:
            raise ValueError(f"a page digest of {len(page_digest)} bytes; give at least {_MIN_DIGEST_BYTES}")
        return f"{self.namespace}/{page_digest.hex()}{self.suffix}"

    def _make_namespace(self) -> str:
        fields = (self.model, self.dtype, str(self.page_size), self.layout)
        # The lengths make the encoding injective.
        identity = "".join(f"{len(field)}:{field}" for field in fields)
        readable = _NOT_PLAIN.sub("-", self.model.rpartition("/")[2])[:40]
        return f"{readable}-{sha256(identity.encode()).hexdigest()[:32]}"

    def _make_suffix(self) -> str:
        parts = []
        for axis in AXES:
            rank, size = getattr(self.parallel, f"{axis}_rank"), getattr(self.parallel, f"{axis}_size")
            if getattr(self.placement, axis) == "sharded" and size > 1:
                parts.append(f".{axis}{rank}of{size}")
        return "".join(parts)
