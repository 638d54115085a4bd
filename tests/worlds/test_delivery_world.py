"""One seed, one history: equal bytes, and no broken promise."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import cast, get_args

import msgspec
import pytest

from observability.kv_stream import BlockView
from observability.kv_stream.digest_cursor import DigestCursor
from scheduler_components.kv_events import EventStream
from worlds import (
    WORLD_KINDS,
    DeliveryReport,
    DeliveryWorld,
    Violation,
    WorldKind,
    encode_delivery_report,
    run_world,
    summarize_deliveries,
)
from worlds.jetstream_world import JETSTREAM_FAULTS
from worlds.relay_world import RelayFault
from worlds.stream_world import StreamPart

NUM_SEEDS: dict[WorldKind, int] = {"stream": 4, "relay": 2, "jetstream": 4, "plain": 4}
"""In ``make test``; ``make soak`` runs many more. A world with a relay takes five times as long as another one."""

OWN_FAULTS: dict[WorldKind, tuple[str, ...]] = {"relay": get_args(RelayFault), "jetstream": JETSTREAM_FAULTS}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", WORLD_KINDS)
def test_every_promise_is_kept(kind: WorldKind, soaking: bool) -> None:
    faults = set[str]()
    for seed in range(500 if soaking else NUM_SEEDS[kind]):
        report = run_world(seed, kind=kind)
        assert report.violation is None, report
        assert report.counts["batches published"] > 0
        faults |= report.faults.keys()
    assert faults.issuperset(OWN_FAULTS.get(kind, ())) or not soaking, f"some never happened: {faults}"


def test_the_seed_chooses_the_kind_and_another_kind_changes_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {DeliveryWorld(seed).kind for seed in range(40)} == set(WORLD_KINDS)
    history = run_world(3, kind="plain").history
    monkeypatch.setitem(WORLD_KINDS, cast("WorldKind", "another"), WORLD_KINDS["plain"])
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


KEPT = DeliveryReport(
    seed=1, kind="stream", duration_s=10.0, num_events=5, history="ab", faults={"pauses": 2}, counts={"requests": 3},
    measured={"age_s": 0.1, "pending": 4}, violation=None,
)  # fmt: skip
BROKEN = msgspec.structs.replace(
    KEPT, seed=7, faults={"pauses": 1, "stalls": 1}, measured={"age_s": 0.2, "until_live_s": 1.0},
    violation=Violation(time_s=1.0, phase="calm", promise="p", detail="d", last_events=("e",)),
)  # fmt: skip


def test_worlds_add_up() -> None:
    summary = summarize_deliveries([KEPT, BROKEN])
    assert (summary.num_worlds, summary.duration_s) == (2, 20.0)
    assert (summary.faults, summary.counts) == ({"pauses": 3, "stalls": 1}, {"requests": 6})
    assert summary.measured == {"stream": {"age_s": 0.2, "pending": 4, "until_live_s": 1.0}}
    assert summary.violations == {7: BROKEN.violation}


def test_no_world_is_an_empty_summary() -> None:
    assert summarize_deliveries([]).num_worlds == 0


def test_a_report_is_one_line_of_json() -> None:
    line = encode_delivery_report(BROKEN)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=DeliveryReport) == BROKEN
