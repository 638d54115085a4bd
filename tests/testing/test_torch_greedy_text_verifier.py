"""The judge itself: it takes what ``generate`` gives, and nothing else but ties that it has measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from scheduler_components.testing import ConformanceError
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier, NearTie

pytestmark = pytest.mark.model

PROMPT = (7, 90, 211, 34, 9)


def test_what_generate_gives_is_taken(judge: GreedyTextVerifier) -> None:
    text = judge.text(PROMPT, 12)
    assert judge.expect(PROMPT, text.token_ids, num_tokens=12) == []
    assert judge.expect_prefix(PROMPT, text.token_ids[:5]) == []
    assert len(text.gaps) == 12
    assert min(text.gaps) > judge.noise > 0


def test_each_token_is_the_one_with_the_highest_logit(judge: GreedyTextVerifier) -> None:
    """``generate`` and one pass over the whole text agree, so the judge reads the right positions."""
    tokens = judge.text(PROMPT, 12).token_ids
    logits = judge.logits((*PROMPT, *tokens))
    assert logits.argmax(1).tolist()[len(PROMPT) - 1 : -1] == list(tokens)


@pytest.mark.parametrize("at", [0, 3, 11])
def test_one_other_token_is_refused(judge: GreedyTextVerifier, at: int) -> None:
    tokens = list(judge.text(PROMPT, 12).token_ids)
    tokens[at] = (tokens[at] + 1) % 320
    with pytest.raises(ConformanceError, match=f"at {at}"):
        judge.expect_prefix(PROMPT, tokens)


def test_a_token_outside_the_vocabulary_is_an_error(judge: GreedyTextVerifier) -> None:
    with pytest.raises(ConformanceError, match="not in the vocabulary"):
        judge.expect_prefix(PROMPT, [320])


def test_an_answer_ends_at_its_length_or_its_first_stop_token(judge: GreedyTextVerifier) -> None:
    tokens = judge.text(PROMPT, 12).token_ids
    with pytest.raises(ConformanceError, match="11 tokens"):
        judge.expect(PROMPT, tokens[:11], num_tokens=12)
    stop = tokens[4]
    end = tokens.index(stop) + 1
    assert judge.expect(PROMPT, tokens[:end], num_tokens=12, stop_token_ids=[stop]) == []
    with pytest.raises(ConformanceError, match=f"{end} tokens"):
        judge.expect(PROMPT, tokens, num_tokens=12, stop_token_ids=[stop])


def test_an_eos_token_of_the_model_ends_nothing_here(make_model_folder: Callable[..., Path]) -> None:
    """Whether an end-of-sequence token ends an answer is what the caller says."""
    plain = GreedyTextVerifier.over(AutoModelForCausalLM.from_pretrained(make_model_folder()))
    eos = plain.text(PROMPT, 6).token_ids[2]
    ending = GreedyTextVerifier.over(AutoModelForCausalLM.from_pretrained(make_model_folder(eos_token_id=eos)))
    assert ending.text(PROMPT, 6).token_ids == plain.text(PROMPT, 6).token_ids


def test_a_near_tie_has_its_gap_and_the_comparison_continues_from_it(model_folder: Path) -> None:
    """Two tokens whose rows of the output matrix differ by less than the noise: either of them is right."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    judge = GreedyTextVerifier.over(model)
    token = judge.text(PROMPT, 6).token_ids[3]
    twin = next(each for each in range(6, 320) if each not in judge.text(PROMPT, 6).token_ids)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[token] * (1 - 1e-7)
    judge = GreedyTextVerifier(model=model, noise=judge.noise)
    tokens = list(judge.text(PROMPT, 6).token_ids)
    at = next(place for place, each in enumerate(tokens) if each in (token, twin))
    other = twin if tokens[at] == token else token
    turned = [*tokens[:at], other]
    turned += judge.text((*PROMPT, *turned), 4).token_ids
    ties = judge.expect_prefix(PROMPT, turned)
    assert ties[0] == NearTie(at, tokens[at], other, ties[0].gap)
    assert 0 <= ties[0].gap <= judge.noise
    turned[-1] = next(each for each in range(6, 320) if each not in (token, twin, turned[-1]))
    with pytest.raises(ConformanceError):
        judge.expect_prefix(PROMPT, turned)


def test_the_tokenizer_writes_every_text_and_the_model_has_all_its_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 320
    for text in ("The capital of France is", "Größe: 3 µm, 日本語, 🦙"):
        ids = tokenizer(text)["input_ids"]
        assert max(ids) < 320
        assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_is_judged_in_one_pass(judge: GreedyTextVerifier) -> None:
    first = judge.text(PROMPT, 6).token_ids
    second = judge.text((*PROMPT, *first, 40, 41), 5).token_ids
    chat = [*PROMPT, *first, 40, 41, *second]
    answers = [range(5, 11), range(13, 18)]
    assert judge.expect_answers(chat, answers) == []
    for wrong in (7, 15):
        other = [*chat[:wrong], (chat[wrong] + 1) % 320, *chat[wrong + 1 :]]
        with pytest.raises(ConformanceError, match=f"at {wrong}"):
            judge.expect_answers(other, answers)
