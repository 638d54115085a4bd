"""Property: any sizes and ranks give a valid ParallelState or a ConfigError."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, ParallelState

ANY = st.one_of(st.integers(-2, 9), st.sampled_from([None, True, 1.0, "2", 10**30]))
FIELDS = [field.name for field in attrs.fields(ParallelState)]
GIVEN_SIZES = [name for name in FIELDS if name.endswith("_size") and name not in ("tp_size", "attn_tp_size")]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), ANY))
@example({"tp_size": 2, "attn_tp_size": 2, "moe_ep_size": 2, "moe_ep_rank": 1})
def test_the_constructor_accepts_valid_fields_and_names_invalid_ones(given_fields: dict[str, Any]) -> None:
    try:
        state = ParallelState.trivial(**given_fields)
    except ConfigError as error:
        assert error.field in FIELDS
    else:
        assert state.tp_rank == (
            (state.attn_dp_rank * state.attn_cp_size + state.attn_cp_rank) * state.attn_tp_size + state.attn_tp_rank
        )
        assert 0 <= state.kv_stream_index < state.kv_stream_count


@settings(deadline=None)
@given(ANY, st.fixed_dictionaries({"tp_size": ANY}, optional=dict.fromkeys(GIVEN_SIZES, ANY)))
@example(0, {"tp_size": 0})
@example(0, {"tp_size": 4, "attn_cp_size": 0})
@example(0, {"tp_size": 4, "moe_ep_size": -1})
@example(0, {"tp_size": 2, "attn_dp_size": 4})
@example("0", {"tp_size": "2"})
def test_from_tp_rank_accepts_valid_sizes_and_names_invalid_ones(tp_rank: Any, sizes: dict[str, Any]) -> None:
    try:
        state = ParallelState.from_tp_rank(tp_rank, **sizes)
    except ConfigError as error:
        assert error.field in FIELDS
    else:
        assert state.tp_rank == tp_rank
        assert state.attn_tp_size * state.attn_cp_size * state.attn_dp_size == sizes["tp_size"]


def test_a_single_process_owns_and_leads_everything() -> None:
    state = ParallelState.trivial()
    assert (state.owns_kv_stream, state.reports_metrics, state.leads_replica) == (True, True, True)
    assert (state.kv_stream_index, state.kv_stream_count) == (0, 1)
    assert ParallelState.trivial(gpu_id=3).gpu_id == 3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tp_rank": 1}, "tp_rank"),
        ({"tp_size": 2}, "tp_size"),
        ({"tp_size": 2, "attn_tp_size": 2, "tp_rank": 1}, "tp_rank"),
        ({"tp_size": 0}, "tp_size"),
        ({"pp_rank": 2, "pp_size": 2}, "pp_rank"),
        ({"dp_size": 2}, "dp_rank"),
        ({"dp_size": 2, "dp_rank": 2}, "dp_rank"),
        ({"tp_size": 2, "attn_dp_size": 2, "dp_size": 1}, "dp_size"),
        ({"tp_size": 2, "attn_dp_size": 2, "dp_size": 2, "dp_rank": 1}, "dp_rank"),
        ({"tp_size": 2, "attn_tp_size": 2, "dcp_size": 3}, "dcp_size"),
        ({"tp_size": 2, "attn_tp_size": 2, "moe_ep_size": 4}, "moe_ep_size"),
        ({"tp_size": 2, "attn_tp_size": 2, "moe_ep_size": 2, "moe_ep_rank": 1}, "moe_ep_rank"),
        ({"tp_size": 2, "attn_tp_size": 2, "moe_dp_size": 2, "moe_dp_rank": 1}, "moe_dp_rank"),
        ({"gpu_id": -1}, "gpu_id"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ParallelState(**fields)
    assert refused.value.field == named


def test_the_attention_layout_is_that_of_sglang() -> None:
    """8 ranks as 2 DP x 2 CP x 2 TP: attention-DP outermost, attention-TP innermost."""
    states = [ParallelState.from_tp_rank(rank, tp_size=8, attn_dp_size=2, attn_cp_size=2) for rank in range(8)]
    assert [(s.attn_dp_rank, s.attn_cp_rank, s.attn_tp_rank) for s in states] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert [s.dp_rank for s in states] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [s.gpu_id for s in states] == list(range(8))


def test_the_expert_layout_is_that_of_sglang() -> None:
    """8 ranks as 2 MoE-DP x 2 EP x 2 MoE-TP: ``moe_dp_rank = tp_rank // (tp_size // moe_dp_size)`` and
    ``moe_ep_rank = tp_rank % (tp_size // moe_dp_size) // (tp_size // moe_dp_size // ep_size)``."""
    states = [ParallelState.from_tp_rank(rank, tp_size=8, moe_ep_size=2, moe_dp_size=2) for rank in range(8)]
    assert [s.moe_dp_rank for s in states] == [rank // 4 for rank in range(8)]
    assert [s.moe_ep_rank for s in states] == [rank % 4 // 2 for rank in range(8)]


def test_torchrun_places_a_rank_in_its_pipeline_stage() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    state = ParallelState.from_torchrun(environ, pp_size=2, attn_dp_size=2)
    assert (state.pp_rank, state.tp_rank, state.tp_size, state.gpu_id) == (1, 1, 4, 1)
    assert (state.attn_dp_rank, state.attn_tp_rank) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "arguments", "named"),
    [
        ({"RANK": None}, {}, "RANK"),
        ({"WORLD_SIZE": "eight"}, {}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "-1"}, {}, "LOCAL_RANK"),
        ({"LOCAL_RANK": "\u0665"}, {}, "LOCAL_RANK"),
        ({"RANK": "8"}, {}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, {}, "RANK"),
        ({}, {"pp_size": 3}, "pp_size"),
        ({}, {"pp_size": 0}, "pp_size"),
        ({}, {"pp_size": "2"}, "pp_size"),
        ({}, {"attn_dp_size": 3}, "tp_size"),
        ({}, {"attn_cp_size": 0}, "attn_cp_size"),
    ],
)
def test_a_bad_torchrun_environment_is_named(
    changes: dict[str, str | None], arguments: dict[str, Any], named: str
) -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"} | changes
    with pytest.raises(ConfigError) as refused:
        ParallelState.from_torchrun({k: v for k, v in environ.items() if v is not None}, **arguments)
    assert refused.value.field == named


def test_a_state_does_not_change_and_can_be_compared() -> None:
    state = ParallelState.from_tp_rank(1, tp_size=2)
    assert state == ParallelState.from_tp_rank(1, tp_size=2)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        state.tp_rank = 0  # type: ignore[misc]
    assert str(state) == "dp0/pp0/tp1(attn_cp0, attn_tp1)"
    assert state.metric_labels == (("dp_rank", "0"), ("pp_rank", "0"), ("tp_rank", "1"))
