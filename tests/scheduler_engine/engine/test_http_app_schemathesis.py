"""Requests that Schemathesis makes from ``/openapi.json``, against a whole engine: none gets a 5xx or another shape."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

pytestmark = [pytest.mark.sockets, pytest.mark.processes, pytest.mark.soak_only]

COMMAND = [sys.executable, "-m", "scheduler_engine.cli.main", "serve"]
SIZES = ["--dp-size", "1", "--attn-cp-size", "1", "--attn-tp-size", "1", "--kv-tokens", "1024", "--speed", "50"]
STOPPING = {"/pause_generation", "/release_memory_occupation"}
"""Control requests after which generation waits for another one."""


@pytest.fixture
def url() -> Iterator[str]:
    process = subprocess.Popen([*COMMAND, *SIZES, "--port", "0", "--kv-pool"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = (re.search(r"http://[0-9.]+:[0-9]+", line) for line in process.stdout)
        yield next(match.group() for match in found if match)
    finally:
        process.terminate()  # a job in the background of a shell ignores SIGINT, and so do its children
        process.communicate(timeout=60)


@pytest.mark.timeout(1800)
def test_requests_of_the_description_get_answers_of_the_description(request: Any) -> None:
    schemathesis = pytest.importorskip(
        "schemathesis", reason="needs schemathesis: pip install scheduler-components[dev]"
    )
    schema = schemathesis.openapi.from_url(f"{request.getfixturevalue('url')}/openapi.json")
    operations = [each.ok() for each in schema.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        if operation.path not in STOPPING:
            for mode in schemathesis.GenerationMode:
                exercise(operation, mode)


def exercise(operation: Any, mode: Any) -> None:
    """Send requests that fit the description, or do not, and check that each answer is one that it describes."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]

    @settings(max_examples=settings().max_examples // 20, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        case.call_and_validate(checks=wanted)

    with (
        suppress(Unsatisfiable) if mode.is_negative else nullcontext()
    ):  # not every operation can be given a wrong value
        send()
