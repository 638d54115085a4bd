"""Helpers of the tests that compare changes of payloads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components.kv_events.dialects import BlockChanges


@pytest.fixture(scope="session")
def joined() -> Callable[[BlockChanges], list[tuple[object, object, bytes]]]:
    """Join consecutive BlockChanges of one kind and location, because encoder and reader may split them differently."""

    def join(changes: BlockChanges) -> list[tuple[object, object, bytes]]:
        found: list[tuple[object, object, bytes]] = []
        for change in changes:
            place = (change.kind, change.location)
            before = found.pop()[2] if found and found[-1][:2] == place else b""
            found.append((*place, before + change.hashes))
        return found

    return join
