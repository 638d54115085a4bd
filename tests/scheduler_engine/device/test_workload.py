"""The generated workload is repeatable and has the requested length and the documented shape."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_engine.device.workload import WorkloadConfig, generate_chats

sizes = st.builds(
    WorkloadConfig,
    num_requests=st.integers(1, 60),
    seed=st.integers(0, 2**32),
    num_system_prompts=st.integers(1, 8),
    chats_per_s=st.floats(0.1, 100),
    mean_turns=st.floats(1, 10),
    mean_message_tokens=st.floats(1, 100),
    mean_output_tokens=st.floats(1, 100),
    mean_think_s=st.floats(0.01, 10),
)


@settings(deadline=None)
@given(sizes)
def test_a_workload_has_the_requested_length_and_is_in_order(config: WorkloadConfig) -> None:
    chats = list(generate_chats(config))
    assert sum(len(chat.turns) for chat in chats) == config.num_requests
    assert all(first.start_s <= second.start_s for first, second in pairwise(chats))
    assert len({chat.chat_id for chat in chats}) == len(chats)
    assert len({chat.system_ids for chat in chats}) <= config.num_system_prompts
    for chat in chats:
        assert chat.turns[0].think_s == 0
        for turn in chat.turns:
            assert turn.think_s >= 0
            assert turn.output_tokens >= 1
            assert len(turn.message_ids) >= 1
        assert all(0 <= token < 32_768 for turn in chat.turns for token in turn.message_ids)


@settings(deadline=None)
@given(sizes)
def test_one_seed_gives_one_workload(config: WorkloadConfig) -> None:
    assert list(generate_chats(config)) == list(generate_chats(config))


def test_another_seed_gives_another_workload() -> None:
    assert list(generate_chats(WorkloadConfig(seed=1))) != list(generate_chats(WorkloadConfig(seed=2)))


def test_the_means_are_about_the_requested_ones() -> None:
    config = WorkloadConfig(num_requests=20_000, mean_turns=3.0, mean_output_tokens=60.0, chats_per_s=6.0)
    chats = list(generate_chats(config))
    turns = [turn for chat in chats for turn in chat.turns]
    assert len(turns) / len(chats) == pytest.approx(3.0, rel=0.1)
    assert sum(turn.output_tokens for turn in turns) / len(turns) == pytest.approx(60.0, rel=0.05)
    assert len(chats) / chats[-1].start_s == pytest.approx(6.0, rel=0.05)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_requests", 0),
        ("num_system_prompts", -1),
        ("chats_per_s", 0.0),
        ("mean_think_s", float("nan")),
        ("mean_turns", 0.5),
    ],
)
def test_a_size_that_cannot_work_is_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError) as refused:
        WorkloadConfig(**{field: value})
    assert refused.value.field == field


def test_the_default_chats_fit_two_cores_and_end_within_half_a_minute() -> None:
    """Eight scheduler processes on two cores take some 45 requests per second; near that the first token takes long."""
    chats = list(generate_chats(WorkloadConfig()))
    last_s = chats[-1].start_s
    assert sum(len(chat.turns) for chat in chats) / last_s < 25
    assert last_s < 30
