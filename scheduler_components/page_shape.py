"""How large a page is on one rank, whatever memory it is in, and in which order its bytes lie there."""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.validators import integer_validator

__all__ = ["STORED_LAYOUT", "HostLayout", "PageShape", "check_layout"]

HostLayout: TypeAlias = Literal["page_first", "layer_first"]
"""Which bytes of a host tier lie together: all layers of a page, or all pages of a layer."""

STORED_LAYOUT = "layer,part,token"
"""The order of a stored page's bytes, for ``KeySpace.layout``: the same whatever the host's layout."""


def check_layout(field: str, value: str) -> None:
    """Raise ConfigError where ``value`` is no ``HostLayout``."""
    if value not in ("page_first", "layer_first"):
        raise ConfigError(field, value, "is not a layout of host memory", "give page_first or layer_first")


@attrs.frozen(kw_only=True)
class PageShape:
    """What one rank holds of one page.

    Attributes:
        num_layers: layers of this pipeline stage.
        layer_page_bytes: one page's tokens in one layer, as this rank's slice of them, all parts together.
        num_parts: pieces of equal size that a layer keeps apart: 2 for keys and values, 1 for a latent.

    Raises:
        ConfigError: a size is below 1, or the parts are not of equal size.
    """

    num_layers: int = attrs.field(validator=integer_validator())
    layer_page_bytes: int = attrs.field(validator=integer_validator())
    num_parts: int = attrs.field(default=1, validator=integer_validator())

    def __attrs_post_init__(self) -> None:
        if self.layer_page_bytes % self.num_parts:
            raise ConfigError(
                "layer_page_bytes",
                self.layer_page_bytes,
                f"is not {self.num_parts} parts of equal size",
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
