"""The size of a page on one rank, and the order of its bytes in the host tier and in storage."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import attrs

from scheduler_components._internal.validators import integer_validator
from scheduler_components.errors import ConfigError

__all__ = ["HOST_LAYOUTS", "STORED_LAYOUT", "HostLayout", "PageShape"]

HostLayout: TypeAlias = Literal["page_first", "layer_first"]
"""Which bytes of a host tier are contiguous: all layers of a page, or all pages of a layer."""

HOST_LAYOUTS: tuple[HostLayout, ...] = get_args(HostLayout)

STORED_LAYOUT = "layer,part,token"
"""The order of a stored page's bytes, for ``KeySpace.layout``. It does not depend on the host layout."""


@attrs.frozen(kw_only=True)
class PageShape:
    """One rank's slice of a page.

    Attributes:
        num_layers: layers of this pipeline stage.
        layer_page_bytes: bytes of one page in one layer on this rank, all parts included.
        num_parts: tensors of equal size that a layer stores separately: 2 for keys and values, 1 for an MLA latent.

    Raises:
        ConfigError: a size is below 1, or ``layer_page_bytes`` is not a multiple of ``num_parts``.
    """

    num_layers: int = attrs.field(validator=integer_validator())
    layer_page_bytes: int = attrs.field(validator=integer_validator())
    num_parts: int = attrs.field(default=1, validator=integer_validator())

    def __attrs_post_init__(self) -> None:
        if self.layer_page_bytes % self.num_parts:
            raise ConfigError(
                "layer_page_bytes",
                self.layer_page_bytes,
                f"cannot be divided into {self.num_parts} parts of equal size",
                "give the bytes of keys and values together",
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page on this rank."""
        return self.num_layers * self.layer_page_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of one page in one part of one layer."""
        return self.layer_page_bytes // self.num_parts
