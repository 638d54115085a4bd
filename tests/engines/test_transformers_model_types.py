"""Each type of model that is served without consent gives the tokens of ``generate``, over pages and in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install scheduler-components[model]")

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from scheduler_components import ParallelState
from scheduler_components.hicache import TorchDeviceMemory
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.device.torch_model import TESTED_MODEL_TYPES, inspect_model, load_model
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

pytestmark = [pytest.mark.model, pytest.mark.engines_only]

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES_OF_SOME: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "ffn_dim": 128,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "layer_types": None,
    "moe_intermediate_size": 64,
    "moe_k": 2,
    "moe_num_experts": 4,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "shared_expert_intermediate_size": 64,
    "sliding_window": None,
    "topk_group": 1,
    "word_embed_proj_dim": 64,
}
"""Sizes of experts, and what turns windows off, for the types that have the field."""
PREFIX = list(range(6, 26))
PROMPTS = (PREFIX[:5], PREFIX, PREFIX[:13], [*PREFIX, 7, 9])  # the last one finds the pages of the second


def small_config(model_type: str) -> PretrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    config: PretrainedConfig = kind(
        **SIZES | {name: size for name, size in SIZES_OF_SOME.items() if hasattr(default, name)}
    )
    return config


@pytest.mark.parametrize("model_type", sorted(TESTED_MODEL_TYPES))
def test_a_tested_type_gives_the_tokens_of_generate(model_type: str, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(small_config(model_type)).save_pretrained(tmp_path)
    spec = inspect_model(tmp_path)
    pool = TorchDeviceMemory.allocate(
        num_layers=spec.kv.num_layers, num_pages=64, page_size=4, kv_heads=spec.kv.kv_heads, head_dim=spec.kv.head_dim
    )
    scheduler = Scheduler.compose(
        SchedulerConfig(page_size=4, kv_tokens=256, chunk_tokens=7, tokens=spec.tokens),
        ParallelState(),
        TorchDevice(model=load_model(spec), pool=pool),
    )
    judge = GreedyTextVerifier.over(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    requests = []
    for number, prompt in enumerate(PROMPTS):
        requests.append(EngineRequest(f"r{number}", prompt, SamplingLimits(6, ignore_eos=True)))
        scheduler.submit(requests[-1])
        scheduler.step()
    for _ in scheduler.drain():
        pass
    assert requests[-1].cached_prompt.device
    for request in requests:
        judge.expect(request.input_ids, request.output_ids, num_tokens=6)
