"""All ranks of all replicas get the same values in one collective per step, and no replica waits beyond the limit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import ConfigError, ParallelState
from scheduler_components.agreement.thread_sync import ThreadSyncHub
from scheduler_components.errors import SettingsDivergenceError, SyncDivergenceError
from scheduler_components.scheduling.dp_attn import (
    BatchShape,
    DpBatchSync,
    DpStep,
    PrefillDelayer,
    PrefillIntent,
    dp_rank_groups,
)

tokens = st.integers(0, 2**40)
shapes = st.builds(BatchShape, tokens, tokens, tokens, st.booleans())
intents = st.builds(
    PrefillIntent, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.25, 0.5, 1.0])
)
Brought = tuple[BatchShape, PrefillIntent]
RUNS, WAITS = PrefillIntent(has_work=True, is_running=True), PrefillIntent(True, True, False, True, 0.5)


def world(dp: int, cp: int, tp: int) -> list[ParallelState]:
    size = dp * cp * tp
    return [ParallelState.from_tp_rank(rank, tp_size=size, attn_dp_size=dp, attn_cp_size=cp) for rank in range(size)]


def run(
    parallels: Sequence[ParallelState], syncs: Sequence[DpBatchSync], steps: list[list[Brought]]
) -> list[list[DpStep]]:
    """Let every rank bring what its replica brings, step by step; returns what each rank heard."""

    def rank(parallel: ParallelState, sync: DpBatchSync) -> list[DpStep]:
        return [sync.exchange(*step[parallel.attn_dp_rank]) for step in steps]

    with ThreadPoolExecutor(len(parallels)) as threads:
        running = [threads.submit(rank, *each) for each in zip(parallels, syncs, strict=True)]
    return [each.result() for each in running]


def make_syncs(parallels: Sequence[ParallelState], **rule: float) -> list[DpBatchSync]:
    hub = ThreadSyncHub({each.tp_rank: dp_rank_groups(each).reduce_groups for each in parallels}, timeout_s=20)
    return [
        DpBatchSync(
            groups=hub.parallel_groups(each.tp_rank),
            replica=each.attn_dp_rank,
            num_replicas=each.attn_dp_size,
            delayer=PrefillDelayer(**rule),  # type: ignore[arg-type]
        )
        for each in parallels
    ]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[ParallelState], list[list[Brought]], dict[str, float]]:
    dp = draw(st.integers(1, 4))
    parallels = world(dp, draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    steps = draw(st.lists(st.lists(st.tuples(shapes, intents), min_size=dp, max_size=dp), min_size=1, max_size=8))
    return (
        parallels,
        steps,
        {"max_delay_steps": draw(st.integers(0, 3)), "low_usage": draw(st.sampled_from([0.0, 0.3]))},
    )


@settings(deadline=None, max_examples=40)
@given(histories())
def test_every_rank_of_every_topology_gets_all_shapes_in_one_collective_per_step(
    history: tuple[list[ParallelState], list[list[Brought]], dict[str, float]],
) -> None:
    parallels, steps, rule = history
    syncs = make_syncs(parallels, **rule)
    heard = run(parallels, syncs, steps)
    assert all(each == heard[0] for each in heard), "ranks part"
    for step, brought in zip(heard[0], steps, strict=True):
        assert list(step.shapes) == [shape for shape, _ in brought]
        assert step.any_work == any(intent.has_work for _, intent in brought)
        assert step.global_num_tokens == [shape.num_tokens for shape, _ in brought]
        assert step.can_run_graph == all(shape.can_run_graph for shape, _ in brought)
    num_hops = 1 if parallels[0].attn_dp_size > 1 else 0
    for sync in syncs:
        assert sync.groups.num_collectives == num_hops * (1 + len(steps))  # the settings once, then one per step
    for sync, parallel in zip(syncs, parallels, strict=True):
        own = [step[parallel.attn_dp_rank][0].num_tokens for step in steps]
        longest = [max(shape.num_tokens for shape, _ in step) for step in steps]
        assert sync.stats.steps == sum(each > 0 for each in longest)
        assert sync.stats.padded_tokens == sum(longest) - sum(own)
        assert sync.stats.idle_batches == sum(not mine and all_ > 0 for mine, all_ in zip(own, longest, strict=True))


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(4))
@given(st.lists(st.lists(intents, min_size=3, max_size=3), max_size=40), st.integers(1, 6))
@example([[RUNS, RUNS, WAITS]] * 6, 2)
def test_no_replica_waits_longer_than_the_limit_and_the_rule_is_pure(
    rounds: list[list[PrefillIntent]], limit: int
) -> None:
    one, other = PrefillDelayer(max_delay_steps=limit), PrefillDelayer(max_delay_steps=limit)
    in_a_row = 0
    for said in rounds:
        vote = one.vote(said, any_low=False)
        assert other.vote(list(reversed(said)), any_low=False) == vote  # the order of the replicas decides nothing
        in_a_row = in_a_row + 1 if vote == "delayed" else 0
        assert in_a_row <= limit
        if vote in ("delayed", "timed_out", "all", "low_usage"):
            assert any(intent.is_prefillable for intent in said)


@pytest.mark.parametrize(
    ("said", "low_usage", "vote"),
    [
        ([RUNS, RUNS], 0.0, "no_request"),
        ([RUNS, WAITS], 0.0, "delayed"),
        ([WAITS, WAITS], 0.0, "all"),
        ([RUNS, WAITS], 0.6, "low_usage"),
        ([PrefillIntent(is_running=True, is_prefilling=True), WAITS], 0.0, "prefilling"),
        ([PrefillIntent(), PrefillIntent(is_prefillable=True)], 0.0, "no_decode"),
        ([PrefillIntent(), PrefillIntent()], 0.0, "no_decode"),
    ],
)
def test_the_vote(said: list[PrefillIntent], low_usage: float, vote: str) -> None:
    delayer = PrefillDelayer(max_delay_steps=2, low_usage=low_usage)
    any_low = any(delayer.is_low(each) for each in said)
    assert delayer.vote(said, any_low=any_low) == vote
    if vote == "delayed":
        assert [delayer.vote(said, any_low=False) for _ in range(3)] == ["delayed", "timed_out", "delayed"]
    assert PrefillDelayer().vote(said, any_low=False) == "free"


def test_different_rules_and_different_steps_are_found() -> None:
    parallels = world(2, 1, 1)
    syncs = make_syncs(parallels, max_delay_steps=3)
    syncs[1].delayer = PrefillDelayer(max_delay_steps=4)
    with pytest.raises(SettingsDivergenceError, match="max_delay_steps"):
        run(parallels, syncs, [[(BatchShape(), PrefillIntent())] * 2])
    syncs = make_syncs(parallels)
    run(parallels, syncs, [[(BatchShape(), PrefillIntent())] * 2])
    syncs[0].groups.groups, groups = (), syncs[0].groups.groups
    run(parallels[:1], syncs[:1], [[(BatchShape(), PrefillIntent())] * 2])  # a step without the others
    syncs[0].groups.groups = groups
    with pytest.raises(SyncDivergenceError, match="step 3"):
        run(parallels, syncs, [[(BatchShape(), PrefillIntent())] * 2])


def test_a_replica_without_the_values_of_others_diverges() -> None:
    parallels = world(2, 1, 1)
    syncs = make_syncs(parallels)
    alone = DpBatchSync(replica=0, num_replicas=2)  # the exchange taken away
    mine, theirs = (BatchShape(8, 0, 8), RUNS), (BatchShape(0, 4, 100), RUNS)
    heard = run(parallels, syncs, [[mine, theirs]])
    assert alone.exchange(*mine).shapes != heard[0][0].shapes


def test_ranks_exchange_with_their_counterparts_in_other_replicas() -> None:
    parallels = world(3, 2, 2)
    for parallel in parallels:
        met = dp_rank_groups(parallel).reduce_groups[0]
        assert len(met) == 3 and parallel.tp_rank in met
        for rank in met:
            other = parallels[rank]
            assert (other.attn_cp_rank, other.attn_tp_rank) == (parallel.attn_cp_rank, parallel.attn_tp_rank)
    second_stage = ParallelState(pp_rank=1, pp_size=2, tp_rank=1, tp_size=2, attn_dp_size=2, attn_dp_rank=1, dp_size=2)
    assert dp_rank_groups(second_stage).reduce_groups == ((2, 3),)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("replica", lambda: DpBatchSync(replica=2, num_replicas=2)),
        ("num_replicas", lambda: DpBatchSync(num_replicas=0)),
        ("max_delay_steps", lambda: PrefillDelayer(max_delay_steps=-1)),
        ("low_usage", lambda: PrefillDelayer(low_usage=1.5)),
    ],
)
def test_an_invalid_setting_is_refused_by_name(field: str, make: type[DpBatchSync]) -> None:
    with pytest.raises(ConfigError) as refusal:
        make()
    assert refusal.value.field == field
