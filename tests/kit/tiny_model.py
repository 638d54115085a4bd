"""A tiny random Llama as a model folder with a tokenizer, and the verifier over transformers' ``generate``.

Nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

with suppress(ImportError):
    import tqdm  # type: ignore[import-untyped]

    tqdm.tqdm.monitor_interval = 0  # a bar that a model draws starts a thread that never ends

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]  # ids 0 to 5
VOCABULARY = 320  # the special tokens, all 256 bytes, and merges of them: every text can be written
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LESSON = """
A page that another request still reads is not free. The cache of a prefix holds what the model has computed, and a
chunk of a prompt begins where the pages before it end. Evicted pages go to the host, and from the host to a file.
What comes back must be what went away, token by token and page by page, or the answer is another one.
"""


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Run torch on one thread, so that sums have one order and test processes leave each other a core."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install scheduler-components[model]")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model_folder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Callable[..., Path]:
    """``make_model_folder(seed=0, **sizes)``: a Llama of 2 layers, 4 heads, 2 KV heads, 512 positions, with tokenizer.

    Its weights have a large variance, so each token depends on all tokens before it and a wrong one changes the text.
    """

    torch = pytest.importorskip("torch", reason="needs torch: pip install scheduler-components[model]")
    pytest.importorskip("transformers", reason="needs transformers: pip install scheduler-components[model]")
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(*, seed: int = 0, **sizes: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        config: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = LlamaForCausalLM(LlamaConfig(**config | sizes))
        model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        return folder

    return make


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the tiny model: bytes and merges of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [LESSON],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=False))
    chat = {"chat_template": CHAT_TEMPLATE, "additional_special_tokens": SPECIAL_TOKENS[4:]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names, **chat)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="session")
def model_folder(make_model_folder: Callable[..., Path]) -> Path:
    """The tiny model of the default sizes, in a read-only folder."""
    return make_model_folder()


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of ``model_folder``, as transformers loads it."""
    from transformers import PreTrainedTokenizerFast

    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(model_folder)
    return loaded


@pytest.fixture(scope="session")
def judge(model_folder: Path) -> GreedyTextVerifier:
    """The verifier over transformers' ``generate`` of ``model_folder``, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier

    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    return GreedyTextVerifier.over(model)


@pytest.fixture(scope="session")
def paged_model(model_folder: Path) -> PreTrainedModel:
    """The model of ``model_folder`` with attention over pages, in float32."""
    from scheduler_engine.device.torch_model import inspect_model, load_model

    return load_model(inspect_model(model_folder))
