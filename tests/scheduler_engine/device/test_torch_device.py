"""A broken row fails alone; draws and log probabilities are those of the text alone; decodes are grouped by length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kit.reference_scheduler import drain
from transformers import PreTrainedModel

from scheduler_components import ParallelState
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_components.values import FinishReason
from scheduler_engine.device.sampling import SamplingLimits, SamplingParams
from scheduler_engine.device.torch_attention import pack_batch
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.device.torch_model import inspect_model, load_model
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.model

PAGE_SIZE, NUM_PAGES = 4, 96


@dataclass
class Pool:
    """Two layers of 2 heads of 16 numbers."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_pool() -> Pool:
    layers = [torch.zeros(NUM_PAGES, PAGE_SIZE, 2, 16) for _ in range(4)]
    return Pool(layers[:2], layers[2:])


@pytest.fixture(scope="module")
def model(model_folder: Path) -> PreTrainedModel:
    return load_model(inspect_model(model_folder))


def make_scheduler(model: PreTrainedModel, **sizes: float) -> Scheduler:
    config = SchedulerConfig(page_size=PAGE_SIZE, kv_tokens=NUM_PAGES * PAGE_SIZE, **sizes)  # type: ignore[arg-type]
    return Scheduler.compose(config, ParallelState(), TorchDevice(model=model, pool=make_pool()))


def serve(scheduler: Scheduler, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[EngineRequest]:
    limits = SamplingLimits(max_new_tokens)
    requests = [EngineRequest(f"r{number}", prompt, limits) for number, prompt in enumerate(prompts)]
    drain(scheduler, *requests)
    return requests


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(6, 319), k=num_tokens)


def expect_generate(judge: GreedyTextVerifier, request: EngineRequest) -> None:
    judge.expect(request.input_ids, request.output_ids, num_tokens=request.limits.max_new_tokens)


def test_nan_logits_fail_only_their_request(model_folder: Path, judge: GreedyTextVerifier) -> None:
    """Also if the bad token is in an early chunk, and for later requests on its pages."""
    broken = load_model(inspect_model(model_folder))
    broken.get_input_embeddings().weight.data[319] = torch.nan
    scheduler = make_scheduler(broken, chunk_tokens=8)
    prompts = [random_prompt(1, 30), [*random_prompt(2, 5), 319, *random_prompt(3, 30)], random_prompt(4, 9)]
    whole, failed, short = serve(scheduler, prompts, 6)
    assert (failed.finish_reason, failed.num_output_tokens) == (FinishReason.ERROR, 0)
    later = EngineRequest("later", random_prompt(5, 300), SamplingLimits(6))
    drain(scheduler, later)
    for request in (whole, short, later):
        expect_generate(judge, request)


def test_nan_values_do_not_stay_in_the_pool(model_folder: Path) -> None:
    """A mask weighs it with 0, and 0 times NaN is NaN: the next request on the page would fail too."""
    broken = load_model(inspect_model(model_folder))
    broken.get_input_embeddings().weight.data[319] = torch.nan
    scheduler = make_scheduler(broken, chunk_tokens=8)
    (failed,) = serve(scheduler, [[*random_prompt(2, 13), 319]], 6)
    assert failed.finish_reason is FinishReason.ERROR
    pool = scheduler.device.pool
    assert all(layer.isfinite().all() for layer in (*pool.keys, *pool.values))
    assert any(layer.count_nonzero() for layer in pool.keys)  # the chunk before it was computed, and is there


def test_logprobs_are_those_of_the_whole_text(model: PreTrainedModel, judge: GreedyTextVerifier) -> None:
    scheduler = make_scheduler(model, chunk_tokens=8)
    asks = EngineRequest("asks", random_prompt(1, 20), SamplingLimits(5), sampling=SamplingParams(logprobs=3))
    drain(scheduler, asks)
    output = asks.output_since(0)
    expected = judge.logits(asks.token_ids).log_softmax(dim=-1)[19:-1]
    assert output.logprobs == pytest.approx(
        [row[token].item() for row, token in zip(expected, output.token_ids, strict=True)], abs=1e-3
    )
    assert [[token for token, _ in top] for top in output.top_logprobs] == expected.topk(3).indices.tolist()
    assert [top[0] for top in output.top_logprobs] == list(
        zip(output.token_ids, output.logprobs, strict=True)
    )  # greedy


def test_a_seed_gives_the_same_tokens_in_any_batch(model: PreTrainedModel) -> None:
    def sample(seed: int, others: int, **sizes: int) -> tuple[int, ...]:
        scheduler = make_scheduler(model, **sizes)
        sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=seed)
        wanted = EngineRequest("wanted", random_prompt(1, 21), SamplingLimits(8), sampling=sampling)
        neighbours = [
            EngineRequest(f"b{each}", random_prompt(each + 5, 30), SamplingLimits(9)) for each in range(others)
        ]
        drain(scheduler, *neighbours, wanted)
        return wanted.output_ids

    assert sample(7, others=0) == sample(7, others=3, chunk_tokens=5)
    assert sample(7, others=0) != sample(8, others=0)


def test_decodes_of_different_length_are_computed_in_separate_calls() -> None:
    """A short request must not read as many pages as a long one in the same batch."""

    @dataclass
    class Span:
        end: int
        start: int = 0

        @property
        def pages(self) -> range:
            return range(-(-self.end // PAGE_SIZE))

    ends = [200, 3, 70, 60, 380]
    batch, order = pack_batch(make_pool(), [Span(end) for end in ends], [])
    assert [ends[place] for place in order] == [3, 60, 70, 200, 380]
    assert [(group.first_row, group.end_row) for group in batch.decodes] == [(0, 2), (2, 3), (3, 5)]
    assert [group.mask.shape[-1] for group in batch.decodes] == [60, 72, 380]
    assert [group.mask[:, 0, 0].isfinite().sum(dim=1).tolist() for group in batch.decodes] == [
        [3, 60],
        [70],
        [200, 380],
    ]
