"""Tables of broken variants: one row names a variant, replaces methods of a right class, and says what must find it.

A table is a class body, so that a replacement may call ``super()``::

    class Broken(Queue):
        sleeps = found(checks.check_progress, step=lambda self: None)

        @instead_of("add", checks.check_order, "arrivals")
        def adds_twice(self, request):
            super().add(request)
            super().add(request)

``variants(Broken)`` is then ``{"sleeps": (type, check), "adds_twice": (type, check, "arrivals")}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Row:
    """What must find a variant, and the attributes that the variant replaces, or the variant itself."""

    expected: tuple[Any, ...]
    patches: dict[str, Any]
    variant: type | None = None

    def __call__(self, variant: type) -> Row:
        """Take a whole class as the variant: the row as its decorator."""
        self.variant = variant
        return self


def found(*expected: Any, **patches: Any) -> Row:
    """Return a row whose variant has these attributes. It also decorates a class that is the whole variant."""
    return Row(expected, patches)


def instead_of(attribute: str, *expected: Any, **patches: Any) -> Callable[[Callable[..., Any]], Row]:
    """Return a decorator: the variant has the decorated function as ``attribute``."""
    return lambda replacement: Row(expected, {attribute: replacement, **patches})


def variants(*tables: type) -> dict[str, tuple[Any, ...]]:
    """Return the rows of all tables: the name -> the variant and what must find it."""
    return {name: (variant, *row.expected) for name, variant, row in _rows(tables)}


def _rows(tables: tuple[type, ...]) -> Iterator[tuple[str, type, Row]]:
    for table in tables:
        for name, row in list(vars(table).items()):
            if isinstance(row, Row):
                yield name, row.variant or type(name, (table,), {"__slots__": (), **row.patches}), row
