"""What the tests inside real engines share. `make engines` makes an environment per engine and runs them there.

A test file begins with ``pytest.importorskip("vllm", reason=...)``, so that it is skipped where its engine is not
installed, and has the name of its engine in its own: by this, `make engines` knows which environment runs it.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("sglang") and not find_spec("torchvision"):
    # Before any test imports SGLang, and for the processes that it starts.
    STAND_INS = str(Path(__file__).parent / "stand_ins")
    sys.path.insert(0, STAND_INS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STAND_INS, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama as engines load it: config, weights and a tokenizer of one word per token.

    2 layers, hidden size 64, 4 heads, 2 KV heads, 1,000 tokens (``w0`` to ``w999``; 0 begins, 1 ends, 2 pads), context
    2,048, float32. The weights are the same in every run.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny_llama")
    config = LlamaConfig(
        vocab_size=1_000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2_048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(1_000)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w3"
    )
    tokenizer.save_pretrained(folder)
    return folder
