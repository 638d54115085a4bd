"""A collector is alone under its prefix, and close removes it from its registry."""

from __future__ import annotations

import pytest
from kit.scheduler_stats import make_stats
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from observability import PrometheusSink
from scheduler_components import ConfigError


def test_two_sinks_of_one_prefix_on_one_registry_are_refused() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry)
    with pytest.raises(ConfigError, match="prefix"):
        PrometheusSink(registry)
    PrometheusSink(registry, prefix="other_")


@pytest.mark.parametrize("prefix", ["9lives", "a-b", "a b", "é"])
def test_a_prefix_that_no_name_can_begin_with_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        PrometheusSink(CollectorRegistry(), prefix=prefix)


def test_close_leaves_the_registry_and_may_be_called_twice() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    sink.close()
    sink.close()
    assert generate_latest(registry) == b""
    PrometheusSink(registry)


def test_the_global_registry_is_left_alone() -> None:
    PrometheusSink(CollectorRegistry()).record(make_stats())
    assert "sglang" not in generate_latest(REGISTRY).decode()
