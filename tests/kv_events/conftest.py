"""What tests of one payload's changes share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components.kv_events.lowering import Changes


@pytest.fixture(scope="session")
def joined() -> Callable[[Changes], list[tuple[object, object, bytes]]]:
    """Changes with neighbours of one kind and site as one: a writer and a reader may cut them differently."""

    def join(changes: Changes) -> list[tuple[object, object, bytes]]:
        found: list[tuple[object, object, bytes]] = []
        for change in changes:
            place = (change.kind, change.site)
            before = found.pop()[2] if found and found[-1][:2] == place else b""
            found.append((*place, before + change.hashes))
        return found

    return join
