"""vLLM's wheel has no snapshot request yet. When this fails, speak it: side-by-side.md has the mapping."""

from __future__ import annotations

import inspect

import pytest

kv_events = pytest.importorskip("vllm.distributed.kv_events", reason="make engines ENGINES=vllm")

pytestmark = pytest.mark.engine


def test_the_publisher_and_its_settings_have_no_snapshot() -> None:
    config = pytest.importorskip("vllm.config.kv_events")
    assert "snapshot" not in inspect.getsource(kv_events).lower()
    assert "snapshot" not in inspect.getsource(config).lower()
