"""RoutingCostModel: each term by its weight, and mistakes in one sentence."""

from __future__ import annotations

import math

import pytest

from observability.routing import RoutingCostModel
from scheduler_components import ConfigError

OVERLAP = (3, 2, 4)


def test_the_terms_add_up() -> None:
    model = RoutingCostModel(prefill_weight=2, queue_weight=3, decode_weight=0.5, host_weight=0.5, storage_weight=0.25)
    assert model.uncached_blocks(10.5, OVERLAP) == 10.5 - 3 - 0.5 * 2 - 0.25 * 4
    assert model.prefill_cost(10.5, OVERLAP) == 2 * 5.5
    assert model.load_cost(5.0, 7.0) == 3 * 5 + 0.5 * 7


def test_the_defaults_are_those_of_dynamo() -> None:
    """cost = prefill blocks + decode blocks; a block on the host saves 0.75 of its prefill, one on disk 0.25."""
    model = RoutingCostModel()
    assert model.prefill_cost(10.5, OVERLAP) + model.load_cost(5, 7) == (10.5 - 3 - 1.5 - 1) + 5 + 7


def test_more_cached_blocks_than_the_prompt_has_cost_nothing() -> None:
    assert RoutingCostModel().uncached_blocks(2.0, (3, 0, 0)) == 0


@pytest.mark.parametrize("field", ["prefill_weight", "queue_weight", "decode_weight", "lora_weight", "host_weight"])
@pytest.mark.parametrize("value", [-1, math.nan])
def test_a_wrong_weight_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        RoutingCostModel(**{field: value})


def test_a_hit_saves_at_most_its_prefill() -> None:
    with pytest.raises(ConfigError, match="storage_weight"):
        RoutingCostModel(storage_weight=1.5)
