"""One seed, one history: equal bytes, and no broken promise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from observability.kv_stream import BlockView
from observability.kv_stream.digest_cursor import DigestCursor
from scheduler_components.kv_events import EventStream
from worlds import WORLD_KINDS, DeliveryWorld, WorldKind, encode_delivery_report, run_world
from worlds.stream_part import StreamPart

NUM_SEEDS: dict[WorldKind, int] = {"stream": 4, "relay": 2, "jetstream": 4, "plain": 4}
"""In ``make test``; ``make soak`` runs many more. A world with a relay takes five times as long as another one."""


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_every_promise_is_kept(kind: WorldKind, soaking: bool) -> None:
    for seed in range(500 if soaking else NUM_SEEDS[kind]):
        report = run_world(seed, kind=kind)
        assert report.violation is None, report
        assert report.counts["batches published"] > 0


def test_the_seed_chooses_the_kind_and_another_kind_changes_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {DeliveryWorld(seed).kind for seed in range(40)} == set(WORLD_KINDS)
    history = run_world(3, kind="plain").history
    monkeypatch.setitem(WORLD_KINDS, "another", WORLD_KINDS["plain"])  # type: ignore[arg-type]
    assert run_world(3, kind="plain").history == history


SEED_OF_BOTH = 4

REPORTS = f"""
import logging
from worlds import WORLD_KINDS, encode_delivery_report, run_world
logging.disable(logging.CRITICAL)
for kind in WORLD_KINDS:
    print(encode_delivery_report(run_world({SEED_OF_BOTH}, kind=kind)).decode())
"""


@pytest.mark.processes
def test_equal_seeds_give_equal_bytes_in_processes_that_hash_differently() -> None:
    """The order of a set of text differs between two such processes."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-c", REPORTS]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    other = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    here = [encode_delivery_report(run_world(SEED_OF_BOTH, kind=kind)) for kind in WORLD_KINDS]
    assert other.communicate(timeout=120)[0].splitlines() == here
    assert run_world(SEED_OF_BOTH, kind="stream").history != run_world(SEED_OF_BOTH + 1, kind="stream").history


def test_a_broken_promise_names_the_time_and_the_last_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DigestCursor, "_recover_gap", lambda _: ())
    monkeypatch.setattr(DigestCursor, "on_probe_due", lambda _: ())
    violation = next(found for seed in range(20) if (found := run_world(seed, kind="stream").violation) is not None)
    assert violation.promise in ("every reader is LIVE in time", "batches arrive in time", "every view converges")
    assert violation.time_s > 0.0 and violation.phase in ("storm", "calm", "quiet")
    assert len(violation.last_events) == 24


def test_a_part_that_fails_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: StreamPart) -> None:
        raise LookupError("a defect")

    monkeypatch.setattr(StreamPart, "begin_quiet", fail)
    violation = run_world(0, kind="stream").violation
    assert violation is not None
    assert (violation.promise, violation.detail) == ("no part fails", "LookupError: a defect")


def test_a_view_that_forgets_removals_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = BlockView.apply
    monkeypatch.setattr(
        BlockView, "apply", lambda self, rank, events: apply(self, rank, [e for e in events if "Removed" not in str(e)])
    )
    assert run_world(0, kind="stream").violation is not None


def test_a_stream_that_keeps_everything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventStream, "_trim_trail", lambda _: None)
    violation = next(found for seed in range(20) if (found := run_world(seed, kind="stream").violation) is not None)
    assert violation.promise == "memory is bounded"
