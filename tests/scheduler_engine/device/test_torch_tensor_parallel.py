"""Ranks with a part of the model each give the tokens of the whole model and load their part of an update.

The ranks are threads here and communicate over gloo like processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.model_ranks import NUM_PAGES, PAGE_SIZE, ModelRank, model_ranks, prompts_of_families
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models import gemma, gpt2, olmo2, phi3

from scheduler_components import ConfigError, StartError
from scheduler_components.errors import SyncTimeoutError
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_components.torch_weight_updater import TorchWeightStore
from scheduler_engine.device.model_spec import KvShape
from scheduler_engine.device.torch_model import inspect_model, load_model
from scheduler_engine.device.torch_model_parallel import (
    ModelParallelGroup,
    NullModelParallelGroup,
    open_model_parallel_group,
)
from scheduler_engine.device.torch_tensor_parallel import (
    ShapeOnlyModelParallelGroup,
    max_tp_size,
    shard_model,
)
from scheduler_engine.engine.scheduler.request import EngineRequest

pytestmark = [pytest.mark.model, pytest.mark.ranks]


@pytest.fixture
def each_rank(tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """``each_rank(size, work)`` calls ``work(shards)`` on a thread per rank; returns what each came to."""
    with model_ranks(tmp_path) as run:
        yield lambda size, work: run(size, 1, lambda shards, _: work(shards))


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(2, 4, 2), (4, 8, 4)])
def test_ranks_of_a_model_give_the_tokens_of_the_whole_model(
    make_model_folder: Callable[..., Path], each_rank: Callable[..., list[Any]], size: int, heads: int, kv_heads: int
) -> None:
    folder = make_model_folder(num_attention_heads=heads, num_key_value_heads=kv_heads)
    judge = GreedyTextVerifier.over(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    spec = inspect_model(folder)
    served = each_rank(size, lambda ranks: ModelRank(spec, ranks).serve(prompts_of_families(size)))
    for request in served[0]:
        judge.expect(request.input_ids, request.output_ids, num_tokens=8)
    for others in served[1:]:
        assert [each.output_ids for each in others] == [each.output_ids for each in served[0]]


def test_each_rank_has_its_part_of_weights_and_pages(model_folder: Path, each_rank: Callable[..., list[Any]]) -> None:
    spec = inspect_model(model_folder)
    assert spec.max_tp_size == 2
    whole = load_model(spec)
    made = each_rank(2, lambda ranks: ModelRank(spec, ranks))
    for rank in made:
        assert rank.pool.keys[0].shape == (NUM_PAGES, PAGE_SIZE, 1, 16)
        for name, tensor in whole.state_dict().items():
            assert rank.parts.whole_shape(name, rank.model.state_dict()[name]) == tuple(tensor.shape)
    layer = "model.layers.1.self_attn.{}.weight"
    for name, dimension in ((layer.format("q_proj"), 0), (layer.format("o_proj"), 1)):
        joined = torch.cat([rank.model.state_dict()[name] for rank in made], dimension)
        assert torch.equal(joined, whole.state_dict()[name])


def test_biases_are_added_once(each_rank: Callable[..., list[Any]]) -> None:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        num_hidden_layers=2, vocab_size=64, attention_bias=True, mlp_bias=True, initializer_range=0.3, **sizes
    )
    whole = AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in whole.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor)
    tokens = torch.arange(20)[None]

    def logits(ranks: ModelParallelGroup) -> torch.Tensor:
        model = AutoModelForCausalLM.from_config(config).eval()
        model.load_state_dict(whole.state_dict())
        shard_model(model, ranks)
        with torch.inference_mode():
            return model(input_ids=tokens, use_cache=False).logits

    expected = logits(NullModelParallelGroup())
    found = each_rank(2, logits)
    assert torch.equal(found[0], found[1]), "all ranks have the same logits, bit by bit"
    assert torch.allclose(found[0], expected, atol=1e-4)


def test_each_rank_takes_its_part_of_new_weights(
    make_model_folder: Callable[..., Path], model_folder: Path, each_rank: Callable[..., list[Any]]
) -> None:
    other_folder = make_model_folder(seed=5)
    other, spec = load_model(inspect_model(other_folder)), inspect_model(model_folder)
    judge = GreedyTextVerifier.over(AutoModelForCausalLM.from_pretrained(other_folder, dtype=torch.float32))

    def updated(ranks: ModelParallelGroup) -> tuple[int, list[EngineRequest]]:
        rank = ModelRank(spec, ranks)
        weights = TorchWeightStore(model=rank.model, parts=rank.parts)
        weights.begin("v2")
        for name, tensor in other.state_dict().items():
            weights.load(name, tensor.numpy().tobytes())
        with pytest.raises(ConfigError, match=r"is not 16384 bytes, torch.float32 of \(64, 64\)"):
            weights.load("model.layers.0.self_attn.q_proj.weight", b"1234")
        checksum = weights.checksum()
        weights.commit()
        return checksum, rank.serve(prompts_of_families(1))

    (checksum, served), (other_checksum, _) = each_rank(2, updated)
    assert checksum == other_checksum
    for request in served:
        judge.expect(request.input_ids, request.output_ids, num_tokens=8)


SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64, "pad_token_id": 0}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("config", "units"),
    [
        (LlamaConfig(**SIZES, **HEADS), 4),
        (LlamaConfig(**SIZES | {"intermediate_size": 90}, **HEADS), 2),
        (LlamaConfig(**SIZES, **HEADS | {"num_key_value_heads": 1}), 1),
        (Qwen2Config(**SIZES, **HEADS), 4),
        (Qwen3Config(**SIZES, **HEADS), 4),
        (gemma.GemmaConfig(**SIZES, **HEADS), 4),
        (olmo2.Olmo2Config(**SIZES, **HEADS, eos_token_id=1), 1),  # norms over all heads
        (phi3.Phi3Config(**SIZES, **HEADS, eos_token_id=1), 1),  # queries, keys and values in one
        (gpt2.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0), 1),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_the_valid_numbers_of_ranks_follow_from_the_heads(config: Any, units: int) -> None:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    kv_heads = getattr(config, "num_key_value_heads", 4)
    assert max_tp_size(model, KvShape(num_layers=2, kv_heads=kv_heads, head_dim=8)) == units


def test_a_missing_rank_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="rank 0 of 2 of the model"):
        open_model_parallel_group(tmp_path / "meeting", rank=0, names=(0, 1), timeout_s=1)


def test_a_size_that_divides_no_heads_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="attn_tp_size"):
        shard_model(load_model(inspect_model(model_folder)), ShapeOnlyModelParallelGroup(size=3))


def test_a_model_whose_modules_count_heads_is_served_whole(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan says that it can be cut; what reaches attention says otherwise."""
    project = torch.nn.Linear.forward

    def whole_heads(self: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        outputs = project(self, inputs)
        return (
            outputs.repeat(1, 1, 2) if outputs.shape[-1] == 16 else outputs
        )  # a key of one head, where there were two

    assert inspect_model(model_folder).max_tp_size == 2
    monkeypatch.setattr(torch.nn.Linear, "forward", whole_heads)
    assert inspect_model(model_folder).max_tp_size == 1


def test_a_rank_without_its_peer_fails_without_waiting(each_rank: Callable[..., list[Any]]) -> None:
    met = threading.Barrier(2)

    def work(ranks: ModelParallelGroup) -> str:
        met.wait()
        if ranks.rank == 1:
            ranks.close()
            with pytest.raises(RuntimeError, match="is closed"):
                ranks.all_reduce(torch.ones(2))
            return ""
        with pytest.raises(SyncTimeoutError) as gone:
            ranks.all_reduce(torch.ones(2))
        return gone.value.cause

    message, _ = each_rank(2, work)
    assert message and "timed out" not in message.lower()
