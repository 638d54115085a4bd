"""The report of a run passes for the facts of a correct run and names each fault of a faulty one."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.kv_stream import StreamState, StreamStats
from scheduler_engine.cli.run_report import ObservedStream, PortProbe, RunFacts, RunReport, TextComparison, verify
from scheduler_engine.cli.workload_driver import WorkloadCounters
from scheduler_engine.engine.messages import CacheDump, pack_hashes

HELD = {0: frozenset({1, -2, 3}), 1: frozenset({4})}


def dump(rank: int, **changes: Any) -> CacheDump:
    sound = CacheDump(
        dump_id=1,
        rank=rank,
        step=9,
        digest=rank // 2,
        last_sequence=5 if rank % 2 == 0 else -1,
        block_hashes=pack_hashes(HELD[rank // 2]),
    )
    return msgspec.structs.replace(sound, **changes)


def stream(rank: int, *, blocks: frozenset[int] | None = None, **changes: Any) -> ObservedStream:
    stats = StreamStats(rank=rank, endpoint="tcp://h:1", state=StreamState.LIVE, last_seq=5, batches=6, events=7)
    return ObservedStream(
        stats=msgspec.structs.replace(stats, **changes),
        published_sequence=5,
        blocks=HELD[rank] if blocks is None else blocks,
    )


def sound_tally() -> WorkloadCounters:
    counters = WorkloadCounters(sent=2)
    for _ in range(2):
        counters.finish(prompt_tokens=10, cached_tokens=5, output_tokens=3)
    return counters


def evidence(**changes: Any) -> RunFacts:
    sound = RunFacts(
        dp_size=2,
        pp_size=1,
        ranks_per_stage=2,
        owners=frozenset({0, 2}),
        probe=PortProbe(probed=(10, 11, 12, 13), speaking=frozenset({10, 11}), advertised=frozenset({10, 11})),
        streams=[stream(0), stream(1)],
        dumps={tp_rank: dump(tp_rank) for tp_rank in range(4)},
        counters=sound_tally(),
    )
    return attrs.evolve(sound, **changes)


def failures(report: RunReport) -> dict[str, str]:
    return {check.name: check.facts for check in report.checks if not check.passed}


def test_a_sound_run_passes_every_check() -> None:
    report = verify(evidence())
    assert report.passed
    assert [check.name for check in report.checks] == [
        "requests",
        "replicas agree",
        "streams",
        "no gap",
        "view equals cache",
    ]
    assert "exactly 2 streams for 4 ranks" in report.checks[2].facts


def test_the_answers_of_a_real_model_are_verified() -> None:
    right = TextComparison(num_answers=3, num_tokens=20, num_near_ties=1, widest_gap=2e-6, noise=1e-5)
    report = verify(evidence(texts=right))
    assert report.passed
    assert report.checks[-1].name == "text"
    assert "1 near ties (logits at most 2e-06 apart; noise 1e-05)" in report.checks[-1].facts
    wrong = attrs.evolve(right, problems=("8 instead of 9", "1 instead of 2"))
    assert failures(verify(evidence(texts=wrong)))["text"].endswith("; 8 instead of 9")
    nothing = attrs.evolve(right, num_answers=0, num_tokens=0)
    assert list(failures(verify(evidence(texts=nothing)))) == ["text"]


@given(st.frozensets(st.integers(-5, 5)), st.frozensets(st.integers(-5, 5)))
def test_a_view_passes_only_if_it_equals_the_cache(held: frozenset[int], seen: frozenset[int]) -> None:
    dumps = {tp_rank: dump(tp_rank, block_hashes=pack_hashes(held)) for tp_rank in range(4)}
    found = failures(verify(evidence(dumps=dumps, streams=[stream(0, blocks=seen), stream(1, blocks=held)])))
    assert ("view equals cache" in found) == (held != seen)
    if held != seen:
        assert f"{len(held - seen)} missing and {len(seen - held)} extra" in found["view equals cache"]


@pytest.mark.parametrize(
    "changes",
    [
        {"gaps": 1},
        {"losses": 1},
        {"restarts": 1},
        {"decode_errors": 1},
        {"bad_frames": 1},
        {"rank_mismatches": 1},
        {"last_seq": 4},
        {"state": StreamState.PARTIAL},
        {"state": StreamState.RECOVERING},
    ],
)
def test_a_stream_that_was_read_partly_fails(changes: dict[str, Any]) -> None:
    assert list(failures(verify(evidence(streams=[stream(0), stream(1, **changes)])))) == ["no gap"]


def test_a_pipeline_rank_is_compared_with_the_first_rank_of_its_own_replica() -> None:
    """Stage 0 has ranks 0 and 1, one per replica; stage 1 has ranks 2 and 3."""
    dumps = {rank: msgspec.structs.replace(dump(rank % 2 * 2), rank=rank) for rank in range(4)}
    stages = {"pp_size": 2, "ranks_per_stage": 1, "owners": frozenset({0, 1})}
    assert "replicas agree" not in failures(verify(evidence(**stages, dumps=dumps)))
    dumps[3] = dumps[2]
    found = failures(verify(evidence(**stages, dumps=dumps)))
    assert found["replicas agree"] == "ranks [3] differ from the leaders of their replicas"


@pytest.mark.parametrize("owners", [{0}, {0, 1, 2}, {0, 1, 2, 3}, {1, 3}, set()])
def test_any_other_set_of_stream_owners_fails(owners: set[int]) -> None:
    assert list(failures(verify(evidence(owners=frozenset(owners))))) == ["streams"]


@pytest.mark.parametrize("speaking", [{10}, {10, 11, 12}, {10, 12}, set()])
def test_any_other_set_of_answering_ports_fails(speaking: set[int]) -> None:
    probe = PortProbe(probed=(10, 11, 12, 13), speaking=frozenset(speaking), advertised=frozenset({10, 11}))
    assert list(failures(verify(evidence(probe=probe)))) == ["streams"]


def test_too_few_followed_streams_fail() -> None:
    assert "streams" in failures(verify(evidence(streams=[stream(0)])))


@pytest.mark.parametrize("changes", [{"digest": 77}, {"step": 8}, {"block_hashes": pack_hashes([99])}])
@pytest.mark.parametrize("follower", [1, 3])
def test_a_follower_that_differs_from_its_leader_fails(follower: int, changes: dict[str, Any]) -> None:
    dumps = {tp_rank: dump(tp_rank) for tp_rank in range(4)} | {follower: dump(follower, **changes)}
    assert str(follower) in failures(verify(evidence(dumps=dumps)))["replicas agree"]


def test_failed_lost_and_unfinished_requests_fail_the_run() -> None:
    failed = sound_tally()
    failed.sent += 1
    failed.failed.add("the server hung up")
    assert "the server hung up" in failures(verify(evidence(counters=failed)))["requests"]
    vanished = sound_tally()
    vanished.sent += 1
    assert "requests" in failures(verify(evidence(counters=vanished)))
    assert "requests" in failures(verify(evidence(counters=WorkloadCounters())))


def test_a_refused_request_is_counted_and_passes() -> None:
    counters = sound_tally()
    counters.sent += 1
    counters.refused.add("too long")
    assert verify(evidence(counters=counters)).passed


def test_without_streams_the_other_checks_still_run() -> None:
    report = verify(evidence(streams=[], probe=None, owners=frozenset(), no_streams_reason="publisher is null"))
    assert report.passed
    assert "publisher is null" in report.checks[-1].facts
