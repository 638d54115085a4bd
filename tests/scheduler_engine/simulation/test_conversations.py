"""Generated conversations: repeatable, in order, and each turn continues the one before."""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest

from scheduler_components import ConfigError
from scheduler_engine.simulation import ConversationWorkload, generate_conversations
from scheduler_engine.simulation.trace import TRACE_BLOCK_TOKENS, prompt_tokens

WORKLOAD = ConversationWorkload(num_requests=200, mean_think_s=2.0)


def test_a_workload_follows_from_its_seed() -> None:
    first, second = list(generate_conversations(WORKLOAD)), list(generate_conversations(WORKLOAD))
    assert first == second
    assert [request.index for request in first] == list(range(200))
    other = ConversationWorkload(num_requests=200, mean_think_s=2.0, seed=1)
    assert list(generate_conversations(other)) != first


def test_arrivals_are_in_order_and_ids_cover_the_prompts() -> None:
    requests = list(generate_conversations(WORKLOAD))
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(requests))
    for request in requests:
        assert len(request.hash_ids) == -(-request.input_length // TRACE_BLOCK_TOKENS)
        assert request.output_length >= 1


def test_a_later_turn_begins_with_the_prompt_before() -> None:
    by_first_own_id: dict[int, list[bytes]] = {}
    num_system_blocks = WORKLOAD.system_prompt_tokens // TRACE_BLOCK_TOKENS
    for request in generate_conversations(WORKLOAD):
        by_first_own_id.setdefault(request.hash_ids[num_system_blocks], []).append(prompt_tokens(request))
    conversations = [prompts for prompts in by_first_own_id.values() if len(prompts) > 1]
    assert len(conversations) > 20
    for prompts in conversations:
        assert all(after.startswith(before) for before, after in pairwise(prompts))


def test_less_than_one_turn_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mean_turns=0.5: is less than one turn"):
        ConversationWorkload(mean_turns=0.5)


def test_tenants_keep_their_conversations_and_change_nothing_else() -> None:
    plain, shared = generate_conversations(WORKLOAD), generate_conversations(attrs.evolve(WORKLOAD, num_tenants=3))
    assert {request.tenant for request in plain} == {""}
    tenants: dict[str, set[str]] = {}
    for request in shared:
        if len(request.hash_ids) > 4:  # beyond the shared system prompt
            tenants.setdefault(str(request.hash_ids[4]), set()).add(request.tenant)
    assert all(len(each) == 1 for each in tenants.values())
    assert set.union(*tenants.values()) == {"tenant-1", "tenant-2", "tenant-3"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("conversations_per_s", 1e-300),
        ("mean_turns", 1e300),
        ("mean_think_s", 1e300),
        ("mean_message_tokens", 1e12),
        ("mean_output_tokens", 1e12),
        ("num_system_prompts", 10**9),
        ("system_prompt_tokens", 10**15),
        ("num_tenants", 10**9),
    ],
)
def test_an_impossible_mean_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        attrs.evolve(WORKLOAD, **{name: value})


def test_system_prompts_fit_into_memory() -> None:
    with pytest.raises(ConfigError, match="num_system_prompts=10000: do not fit into memory"):
        attrs.evolve(WORKLOAD, num_system_prompts=10_000, system_prompt_tokens=10_000_000)
