"""How large a page is on one rank, whatever memory it is in."""

from __future__ import annotations

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.validators import is_integer

__all__ = ["PageShape"]


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

    num_layers: int = attrs.field(validator=is_integer())
    layer_page_bytes: int = attrs.field(validator=is_integer())
    num_parts: int = attrs.field(default=1, validator=is_integer())

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
