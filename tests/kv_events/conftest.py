"""What tests of one payload's changes share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components.kv_events.dialects import BlockChanges


@pytest.fixture(scope="session")
def joined() -> Callable[[BlockChanges], list[tuple[object, object, bytes]]]:
    """BlockChanges with neighbours of one kind and location as one: a writer and a reader may cut them differently."""

    def join(changes: BlockChanges) -> list[tuple[object, object, bytes]]:
        found: list[tuple[object, object, bytes]] = []
        for change in changes:
            place = (change.kind, change.location)
            before = found.pop()[2] if found and found[-1][:2] == place else b""
            found.append((*place, before + change.hashes))
        return found

    return join
