"""Ranks that divide the rows of prefills give the tokens of the whole model and write the same bits to their pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.model_ranks import ModelRank, RunRanks, model_ranks, prompts_of_families
from transformers import AutoModelForCausalLM

from scheduler_components.testing import ConformanceError
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_components.values import FinishReason
from scheduler_engine.device import torch_context_parallel, torch_device
from scheduler_engine.device.torch_context_parallel import (
    ContextParallelAttention,
    computed_positions,
    gather_plan,
)
from scheduler_engine.device.torch_model import inspect_model
from scheduler_engine.device.torch_model_parallel import ModelParallelGroup, NullModelParallelGroup

pytestmark = [pytest.mark.model, pytest.mark.ranks]


@pytest.fixture
def run_ranks(tmp_path: Path) -> Iterator[RunRanks]:
    with model_ranks(tmp_path) as run:
        yield run


@dataclass
class Place:
    """A rank of a group that is not asked to reduce."""

    rank: int
    size: int

    def all_reduce(self, partial: torch.Tensor) -> None:
        raise AssertionError("a plan needs no other rank")

    def close(self) -> None: ...


spans = st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda each: range(each[0], sum(each)))


@given(spans, st.integers(1, 5))
def test_the_ranks_compute_each_position_once_and_the_last_one_on_every_rank(span: range, size: int) -> None:
    computed = [computed_positions(span.start, span.stop, Place(rank, size)) for rank in range(size)]
    assert all(each == sorted(each) and each[-1] == span[-1] for each in computed)
    assert sorted(position for each in computed for position in each[:-1]) == list(span[:-1])
    lengths = [len(each) for each in computed]
    assert max(lengths) - min(lengths) <= 1


@given(st.lists(spans, max_size=5), st.integers(1, 4))
def test_each_row_of_a_batch_is_given_by_one_rank(chunks: list[range], size: int) -> None:
    positions = [position for span in chunks for position in span]
    received: dict[int, int] = {}
    for rank in range(size):
        group = Place(rank, size)
        computed = [computed_positions(span.start, span.stop, group) for span in chunks]
        rows = [position for each in computed for position in each]
        given_rows, targets = gather_plan(chunks, computed, group)
        for row, target in zip(given_rows, targets, strict=True):
            assert target not in received
            received[target] = rows[row]
    assert [received[target] for target in range(len(positions))] == positions


def judge_of(folder: Path) -> GreedyTextVerifier:
    return GreedyTextVerifier.over(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def expect_one_engine(ranks: Sequence[tuple[ModelRank, list[Any]]], judge: GreedyTextVerifier, tp_size: int) -> None:
    """Check that the tokens are those of ``generate``, and that CP ranks hold the same bits."""
    for request in ranks[0][1]:
        judge.expect(request.input_ids, request.output_ids, num_tokens=request.limits.max_new_tokens)
    for number, (rank, requests) in enumerate(ranks):
        assert [each.output_ids for each in requests] == [each.output_ids for each in ranks[0][1]]
        assert rank.scheduler.state_digest == ranks[0][0].scheduler.state_digest
        first = ranks[number % tp_size][0]
        for own, other in zip(
            (*rank.pool.keys, *rank.pool.values), (*first.pool.keys, *first.pool.values), strict=True
        ):
            assert torch.equal(own, other), f"rank {number} has other keys or values than CP rank 0"


@pytest.mark.parametrize(("tp_size", "cp_size", "chunk_tokens"), [(1, 2, 7), (1, 3, 16), (2, 2, 2)])
def test_ranks_that_divide_prefills_give_the_tokens_of_the_whole_model(
    model_folder: Path, judge: GreedyTextVerifier, run_ranks: RunRanks, tp_size: int, cp_size: int, chunk_tokens: int
) -> None:
    """Prompts share prefixes, chunks are behind cached pages, and decodes are in the batches of prefills."""
    spec = inspect_model(model_folder)

    def serve(shards: ModelParallelGroup, context: ModelParallelGroup) -> tuple[ModelRank, list[Any]]:
        rank = ModelRank(spec, shards, context, chunk_tokens=chunk_tokens)
        return rank, rank.serve(prompts_of_families(cp_size))

    expect_one_engine(run_ranks(tp_size, cp_size, serve), judge, tp_size)


def test_a_request_with_nan_logits_fails_alone_on_all_ranks(
    model_folder: Path, judge: GreedyTextVerifier, run_ranks: RunRanks
) -> None:
    spec = inspect_model(model_folder)
    prompts = prompts_of_families(1)[:2]
    broken = [*range(10, 20), 319, *range(20, 41)]

    def serve(shards: ModelParallelGroup, context: ModelParallelGroup) -> tuple[ModelRank, list[Any]]:
        rank = ModelRank(spec, shards, context)
        rank.model.get_input_embeddings().weight.data[319] = torch.nan
        return rank, rank.serve([prompts[0], broken, prompts[1]])

    ranks = run_ranks(1, 2, serve)
    for rank, requests in ranks:
        whole, failed, other = requests
        assert failed.finish_reason is FinishReason.ERROR
        assert all(layer.isfinite().all() for layer in (*rank.pool.keys, *rank.pool.values))
        for request in (whole, other):
            judge.expect(request.input_ids, request.output_ids, num_tokens=8)


def keep_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank writes zeros for the rows that others have computed."""

    def attend(self: ContextParallelAttention, layer: int, query: Any, key: Any, value: Any, scaling: Any) -> Any:
        alone = ContextParallelAttention(
            paged=self.paged, group=NullModelParallelGroup(), given=self.given, targets=self.targets
        )
        return sum_and_attend(alone, layer, query, key, value, scaling)

    sum_and_attend = ContextParallelAttention.attend
    monkeypatch.setattr(ContextParallelAttention, "attend", attend)


def give_decodes_from_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank adds the rows that all of them compute, so that the sum has them twice."""
    monkeypatch.setattr(
        torch_context_parallel,
        "gather_plan",
        lambda spans, computed, group: gather_plan(spans, computed, Place(0, group.size)),
    )


def choose_tokens_from_own_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank chooses from its own logits, of which one rank's are rounded otherwise."""

    def own(logits: torch.Tensor, group: ModelParallelGroup) -> None:
        if group.rank:
            logits.copy_(logits.roll(1, dims=-1))

    monkeypatch.setattr(torch_device, "use_logits_of_first_rank", own)


def skip_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank leaves out the first row of its part, where it has two."""

    def shorter(start: int, end: int, group: ModelParallelGroup) -> list[int]:
        positions = computed_positions(start, end, group)
        return positions[1:] if group.rank and len(positions) > 2 else positions

    monkeypatch.setattr(torch_device, "computed_positions", shorter)


def see_the_next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row also reads the position behind its own, which another rank has computed."""
    pack = torch_device.pack_batch

    def later(pool: Any, decodes: Any, prefills: Any, computed: Any) -> Any:
        return pack(pool, decodes, prefills, [[position + 1 for position in each] for each in computed])

    monkeypatch.setattr(torch_device, "pack_batch", later)


@pytest.mark.broken_variants
@pytest.mark.parametrize(
    "broken",
    [keep_own_keys, give_decodes_from_every_rank, choose_tokens_from_own_logits, skip_a_row, see_the_next_row],
)
def test_a_broken_division_of_rows_is_found(
    model_folder: Path,
    judge: GreedyTextVerifier,
    run_ranks: RunRanks,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[pytest.MonkeyPatch], None],
) -> None:
    spec = inspect_model(model_folder)
    broken(monkeypatch)

    def serve(shards: ModelParallelGroup, context: ModelParallelGroup) -> tuple[ModelRank, list[Any]]:
        rank = ModelRank(spec, shards, context)
        return rank, rank.serve(prompts_of_families(2)[:3], num_new=3)

    with pytest.raises((AssertionError, ConformanceError)):
        expect_one_engine(run_ranks(1, 2, serve), judge, 1)
