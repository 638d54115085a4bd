"""The device masks the logits of requests with a grammar, whatever the batch, the pool and the sampling."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from kit.reference_scheduler import drain
from kit.tiny_model import VOCABULARY
from transformers import PreTrainedTokenizerFast

from scheduler_components import ParallelState
from scheduler_components.hicache import TorchDeviceMemory
from scheduler_components.ports import CompiledGrammar
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_components.values import FinishReason, GrammarKey
from scheduler_components.waiting.held_request import RequestGrammar
from scheduler_components.waiting.llguidance_backend import open_llguidance_backend
from scheduler_engine.device.model_spec import TokenSpec
from scheduler_engine.device.sampling import SamplingLimits, SamplingParams
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.model

EXPRESSION = r"(page|host|token)( [0-9]{1,3}){12,20}"
PROMPT = list(range(20, 60))
SAMPLED = SamplingParams(temperature=1.5, top_k=40, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def compiled(tokenizer: PreTrainedTokenizerFast) -> CompiledGrammar:
    backend = open_llguidance_backend(tokenizer.backend_tokenizer.to_str(), vocab_size=VOCABULARY, eos_token_ids=(2,))
    return backend.compile(GrammarKey("regex", EXPRESSION))


def make_scheduler(model: object, num_pages: int = 96) -> Scheduler:
    pool = TorchDeviceMemory.allocate(num_layers=2, num_pages=num_pages, page_size=4, kv_heads=2, head_dim=16)
    config = SchedulerConfig(
        page_size=4,
        kv_tokens=4 * num_pages,
        chunk_tokens=16,
        new_token_ratio=0.0,
        min_new_token_ratio=0.0,
        tokens=TokenSpec(vocab_size=VOCABULARY, eos_token_ids=(2,)),
    )
    return Scheduler.compose(config, ParallelState(), TorchDevice(model=model, pool=pool))


def serve(scheduler: Scheduler, compiled: CompiledGrammar, sampling: Sequence[SamplingParams]) -> list[EngineRequest]:
    """Serve a request with the grammar per sampling, each with the same prompt but its last token."""
    requests = []
    for number, each in enumerate(sampling):
        request = EngineRequest(f"r{number}", [*PROMPT, 70 + number], SamplingLimits(90), sampling=each)
        request.grammar = RequestGrammar(compiled, num_prompt_tokens=request.num_prompt_tokens)
        scheduler.submit(request)
        requests.append(request)
    drain(scheduler)
    return requests


def expect_match(tokenizer: PreTrainedTokenizerFast, request: EngineRequest) -> None:
    assert request.finish_reason is FinishReason.STOP, request
    text = tokenizer.decode(request.output_ids, skip_special_tokens=True)
    assert re.fullmatch(EXPRESSION, text), text


def test_greedy_and_sampled_outputs_match_and_end(
    paged_model: object, tokenizer: PreTrainedTokenizerFast, compiled: CompiledGrammar
) -> None:
    requests = serve(make_scheduler(paged_model), compiled, [SamplingParams(), SAMPLED, SamplingParams(), SAMPLED])
    for request in requests:
        expect_match(tokenizer, request)
    assert len({request.output_ids for request in requests}) > 1


def test_a_retraction_does_not_change_an_output(
    paged_model: object, tokenizer: PreTrainedTokenizerFast, compiled: CompiledGrammar
) -> None:
    """In a pool that is too small for four requests."""
    sampling = [SamplingParams(), SAMPLED] * 2
    undisturbed = serve(make_scheduler(paged_model), compiled, sampling)
    requests = serve(make_scheduler(paged_model, num_pages=34), compiled, sampling)
    assert sum(request.num_retractions for request in requests)
    assert [request.output_ids for request in requests] == [request.output_ids for request in undisturbed]


def test_requests_without_a_grammar_get_the_tokens_of_the_model(
    paged_model: object, judge: GreedyTextVerifier, compiled: CompiledGrammar
) -> None:
    """Before, next to and after a request with one, over the same cached prefix."""
    scheduler = make_scheduler(paged_model)
    for rid in ("before", "next to it", "after"):
        free = EngineRequest(rid, PROMPT, SamplingLimits(12, ignore_eos=True))
        scheduler.submit(free)
        serve(scheduler, compiled, [SamplingParams()] if rid == "next to it" else [])
        drain(scheduler)
        judge.expect(free.input_ids, free.output_ids, num_tokens=12)


def test_log_probabilities_are_those_of_the_model(paged_model: object, compiled: CompiledGrammar) -> None:
    """A grammar changes the choice, not what the model finds probable."""
    (request,) = serve(make_scheduler(paged_model), compiled, [SamplingParams(logprobs=3)])
    assert request.logprobs is not None
    assert len(request.logprobs) == request.num_output_tokens
    assert any(logprobs.logprob < min(value for _, value in logprobs.top) for logprobs in request.logprobs)


def test_a_grammar_that_does_not_allow_the_output_ends_its_request_alone(
    paged_model: object, tokenizer: PreTrainedTokenizerFast, compiled: CompiledGrammar
) -> None:
    class WrongGrammar(RequestGrammar):
        def next_bitmask(self, token_ids: Sequence[int]) -> bytes:
            return super().next_bitmask([*token_ids, 300])

    scheduler = make_scheduler(paged_model)
    wrong = EngineRequest("wrong", PROMPT, SamplingLimits(4))
    wrong.grammar = WrongGrammar(compiled, num_prompt_tokens=len(PROMPT))
    scheduler.submit(wrong)
    (right,) = serve(scheduler, compiled, [SamplingParams()])
    assert wrong.finish_reason is FinishReason.ERROR
    expect_match(tokenizer, right)
