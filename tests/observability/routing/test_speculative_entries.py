"""SpeculativeEntries: an entry ends with its confirmation, its expiry or its replica, and never later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.events import removed_run, stored, stored_run

from observability.routing import SpeculativeEntries
from scheduler_components import AllBlocksCleared, ConfigError

PROMPT = (1, 2, 3, 4)


def test_blocks_extend_the_cached_prefix() -> None:
    entries = SpeculativeEntries()
    entries.add("a", PROMPT[1:], 0.0)
    assert entries.extend("a", PROMPT, 0, 1.0) == 0, "the first block is not there"
    assert entries.extend("a", PROMPT, 1, 1.0) == 4
    assert entries.extend("b", PROMPT, 1, 1.0) == 1


def test_an_event_about_a_block_ends_its_entry() -> None:
    entries = SpeculativeEntries()
    entries.add("a", PROMPT, 0.0)
    entries.on_events("a", [stored_run(1, 2)])
    assert len(entries) == 2
    entries.on_events("a", [removed_run(3, 1)])
    assert len(entries) == 1
    entries.on_events("b", [AllBlocksCleared()])
    assert len(entries) == 1
    entries.on_events("a", [AllBlocksCleared()])
    assert len(entries) == 0


def test_blocks_elsewhere_confirm_nothing() -> None:
    entries = SpeculativeEntries()
    entries.add("a", PROMPT, 0.0)
    window = {"kv_cache_spec_kind": "sliding_window"}
    entries.on_events("a", [stored(1, medium="CPU"), stored(1, locality="REMOTE"), stored(1, **window)])
    entries.on_events("a", [stored(1, medium="TAPE"), removed_run(1, 1, "CPU")])
    assert len(entries) == 4


def test_entries_expire_after_the_last_request_with_the_block() -> None:
    entries = SpeculativeEntries(ttl_s=2)
    entries.add("a", PROMPT, 0.0)
    entries.add("a", PROMPT[:2], 1.0)
    assert entries.extend("a", PROMPT, 0, 1.9) == 4
    assert entries.extend("a", PROMPT, 0, 2.0) == 2
    assert entries.extend("a", PROMPT, 0, 3.0) == 0
    entries.add("a", (9,), 2.0)
    assert (len(entries), entries.num_expired) == (3, 2)
    entries.add("a", (), 4.0)
    assert (len(entries), entries.num_expired, list(entries.replicas)) == (0, 5, [])


def test_a_block_that_is_sent_again_does_not_hide_older_ones() -> None:
    entries = SpeculativeEntries(ttl_s=2)
    for now_s, block in ((0.0, 1), (0.5, 2), (1.5, 1)):
        entries.add("a", (block,), now_s)
    entries.add("a", (), 2.5)
    assert (len(entries), entries.num_expired) == (1, 1)


def test_entries_are_bounded() -> None:
    entries = SpeculativeEntries(max_blocks_per_replica=3)
    entries.add("a", PROMPT, 0.0)
    entries.add("b", PROMPT[:1], 0.0)
    assert (len(entries), entries.num_dropped) == (4, 1)
    assert entries.extend("a", PROMPT, 0, 0.0) == 3, "the end of the prefix was dropped"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "stored", "removed", "discard", "clear", "wait"]),
        st.integers(0, 1),
        st.integers(0, 5),
        st.integers(1, 4),
        st.sampled_from([0.0, 0.5, 1.5]),
    ),
    max_size=30,
)


@given(STEPS)
def test_an_entry_never_outlives_its_confirmation_or_its_time(steps: list[tuple[str, int, int, int, float]]) -> None:
    entries, model, now_s = SpeculativeEntries(ttl_s=2.0), dict[tuple[int, int], float](), 0.0
    for act, replica, first, count, wait_s in steps:
        now_s += wait_s
        run = range(first, first + count)
        if act == "add":
            entries.add(replica, run, now_s)
            model |= dict.fromkeys(((replica, each) for each in run), now_s + 2.0)
        elif act == "clear":
            entries.clear(replica)
            model = {key: value for key, value in model.items() if key[0] != replica}
        elif act != "wait":
            if act == "discard":
                entries.discard(replica, run)
            else:
                entries.on_events(replica, [stored_run(first, count) if act == "stored" else removed_run(first, count)])
            model = {key: value for key, value in model.items() if key not in {(replica, each) for each in run}}
        model = {key: value for key, value in model.items() if value > now_s}
        for each in range(2):
            held = {block for block in range(10) if entries.extend(each, (block,), 0, now_s)}
            assert held == {block for name, block in model if name == each}
        assert len(entries) >= len(model)
    for each in range(2):
        entries.add(each, (), now_s)
    assert len(entries) == len(model)
    assert set(entries.replicas) == {name for name, _ in model}


@pytest.mark.parametrize("setting", [{"ttl_s": 0}, {"max_blocks_per_replica": 0}])
def test_a_wrong_bound_is_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        SpeculativeEntries(**setting)
