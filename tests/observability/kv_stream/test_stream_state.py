"""The state of a stream changes by the table alone, and each change to ``PARTIAL`` is one loss."""

from __future__ import annotations

import pytest

from observability.kv_stream import StreamState
from observability.kv_stream.stream_state import STATE_TRANSITIONS, UNCONNECTED, CursorCounters, change_state


@pytest.mark.parametrize("new", list(StreamState))
@pytest.mark.parametrize("old", list(StreamState))
def test_a_state_changes_only_by_the_table(old: StreamState, new: StreamState) -> None:
    counters = CursorCounters()
    if new is not old and new not in STATE_TRANSITIONS[old]:
        with pytest.raises(AssertionError, match="may not become"):
            change_state(old, new, counters)
        return
    assert change_state(old, new, counters) is new
    assert counters.losses == (new is StreamState.PARTIAL and old is not new)


def test_a_new_connection_never_becomes_live_directly() -> None:
    assert all(StreamState.LIVE not in STATE_TRANSITIONS[state] for state in UNCONNECTED)
