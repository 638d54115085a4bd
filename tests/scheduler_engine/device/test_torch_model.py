"""A model is inspected before a process loads it, and an unsupported one is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.reference_scheduler import drain
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scheduler_components import ConfigError, ParallelState
from scheduler_components.hicache import TorchDeviceMemory
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_engine.device import torch_model
from scheduler_engine.device.model_spec import KvShape
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.device.torch_model import inspect_model, load_model
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.model

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


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """``make_folder("Qwen2", **sizes)``: a random model of a family, saved."""

    def make(family: str, **sizes: Any) -> Path:
        config = getattr(transformers, f"{family}Config")(**SIZES | sizes)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.fixture
def copied(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the small Llama, to edit."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def edit_json(place: Path, **changes: object) -> None:
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal_of(path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        inspect_model(path, **{"allow_untested": True} | options)
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Qwen2", {}),
        ("Gemma", {"head_dim": 32}),
        ("GPTNeoX", {}),
        ("OPT", {"word_embed_proj_dim": 64, "ffn_dim": 128}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Mistral", {"sliding_window": None}),
    ],
)
def test_models_of_many_types_give_the_tokens_of_generate(
    make_folder: Callable[..., Path], family: str, sizes: dict[str, Any]
) -> None:
    """Rotary and learned positions, heads of their own and shared ones, experts: all that use the interface."""
    folder = make_folder(family, **sizes)
    spec = inspect_model(folder)
    pool = TorchDeviceMemory.allocate(
        num_layers=2, num_pages=64, page_size=4, kv_heads=spec.kv.kv_heads, head_dim=spec.kv.head_dim
    )
    device = TorchDevice(model=load_model(spec), pool=pool)
    scheduler = Scheduler.compose(
        SchedulerConfig(page_size=4, kv_tokens=256, chunk_tokens=7, tokens=spec.tokens), ParallelState(), device
    )
    prompts = [range(6, 6 + length) for length in (5, 20, 13)]
    requests = [
        EngineRequest(f"r{number}", prompt, SamplingLimits(6, ignore_eos=True)) for number, prompt in enumerate(prompts)
    ]
    drain(scheduler, *requests)
    judge = GreedyTextVerifier.over(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    for request in requests:
        judge.expect(request.input_ids, request.output_ids, num_tokens=6)


@pytest.mark.parametrize(
    ("family", "sizes", "why"),
    [
        ("Mistral", {"sliding_window": 8}, "has sliding_window=8 below its 256 positions"),
        ("Bert", {}, "a mask that is not plain causal"),
        ("DiffLlama", {}, "layer 0 calls attention twice"),
        ("Phimoe", {"num_local_experts": 4, "sliding_window": 8}, "has sliding_window=8"),
        ("Llama", {"rope_parameters": DYNAMIC}, "rope_type='dynamic'"),
        ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}, "rope_type='longrope'"),
        ("Mamba", {}, "linear_attention"),
        ("Bloom", {"n_head": 4}, "0 of its 2 layers"),
        ("Falcon", {}, "without transformers' interface"),
        ("StableLm", {}, "does not receive"),
        ("DeepseekV2", {"n_routed_experts": 2, "num_experts_per_tok": 1}, "differ in width"),
    ],
)
def test_a_model_that_cannot_be_paged_is_refused(
    make_folder: Callable[..., Path], family: str, sizes: dict[str, Any], why: str
) -> None:
    assert why in refusal_of(make_folder(family, **sizes))


def test_the_facts_of_a_model_are_read_from_its_folder(model_folder: Path) -> None:
    spec = inspect_model(model_folder)
    assert spec.kv == KvShape(num_layers=2, kv_heads=2, head_dim=16)
    assert (spec.tokens.vocab_size, spec.tokens.context_tokens, spec.tokens.eos_token_ids) == (320, 512, (2,))
    assert spec.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    half = inspect_model(model_folder, dtype="bfloat16")
    assert (half.kv_bytes_per_token, half.weight_bytes) == (spec.kv_bytes_per_token // 2, spec.weight_bytes // 2)


def test_several_tokens_may_end_an_answer(copied: Path) -> None:
    """As generation_config.json has them, which ``generate`` obeys."""
    place = copied / "generation_config.json"
    edit_json(place, eos_token_id=[2, 5])
    assert inspect_model(copied).tokens.eos_token_ids == (2, 5)
    edit_json(place, eos_token_id=["x"])
    assert "eos_token_id='x'" in refusal_of(copied)
    place.write_text("{")
    assert "generation_config.json" in refusal_of(copied)


def test_the_identity_is_of_weights_and_configuration(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model_folder()
    shutil.copytree(folder, tmp_path / "copy")
    assert inspect_model(tmp_path / "copy").identity == inspect_model(folder).identity
    others = (make_model_folder(seed=1), make_model_folder(rms_norm_eps=1e-3))
    assert len({inspect_model(each).identity for each in (folder, *others)}) == 3


def test_an_untested_type_needs_the_consent_of_the_operator(make_folder: Callable[..., Path]) -> None:
    folder = make_folder("Llama")
    edit_json(folder / "config.json", model_type="stablelm")
    assert "is of type 'stablelm', which was never compared" in refusal_of(folder, allow_untested=False)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
def test_the_identity_depends_on_every_tensor(model_folder: Path, copied: Path, place: float) -> None:
    """Samples of a file missed a partial merge, and pages of one model were read for another."""
    weights = copied / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[int(len(content) * place)] ^= 1
    weights.write_bytes(content)
    assert inspect_model(copied).identity != inspect_model(model_folder).identity


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"max_position_embeddings": -5}, "max_position_embeddings=-5"),
        ({"max_position_embeddings": "many"}, "has a configuration that it refuses"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings=1000000000000"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"eos_token_id": "x"}, "has a configuration that it refuses"),
        ({"eos_token_id": [2, 320]}, "eos_token_id=320"),
    ],
)
def test_a_configuration_beyond_its_bounds_is_refused(copied: Path, change: dict[str, Any], why: str) -> None:
    edit_json(copied / "config.json", **change)
    (copied / "generation_config.json").unlink(missing_ok=True)
    assert why in refusal_of(copied)


def test_code_in_a_models_folder_does_not_run_and_nothing_is_asked(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on stdin whether to run it, and ran it after a `y`."""
    (copied / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: ...\n")
    auto_map = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    edit_json(copied / "config.json", auto_map=auto_map, model_type="own")

    def ask(*_: object) -> str:
        raise AssertionError("stdin was read")

    monkeypatch.setattr("builtins.input", ask)
    assert "is no model that transformers knows" in refusal_of(copied)
    assert not (tmp_path / "ran").exists()


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def _cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _no_gguf(folder: Path) -> Path:
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    return folder / "model.gguf"


SHARDS = json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}})


@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        (lambda folder: folder / "elsewhere", "is not there"),
        (lambda folder: folder / "config.json", "neither a folder nor a .gguf file"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no *.safetensors"),
        (_cut_weights, "has a broken model.safetensors"),
        (write("model.safetensors.index.json", SHARDS), "lacks model-00002-of-00002.safetensors"),
        (write("model.safetensors.index.json", "[]"), "has an index that cannot be read"),
        (write("config.json", "{"), "is no model that transformers knows"),
        (write("config.json", '{"model_type": "abacus"}'), "is no model that transformers knows"),
        (_no_gguf, "is no model that transformers knows"),
    ],
)
def test_an_invalid_model_is_refused_before_it_is_loaded(
    copied: Path, breaks: Callable[[Path], object], why: str
) -> None:
    broken = breaks(copied)
    refusal = refusal_of(broken if isinstance(broken, Path) else copied)
    assert refusal.startswith("model=")
    assert why in refusal


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "float8"}, "dtype='float8': is not a type to compute in"),
        ({"device": "abacus"}, "device='abacus': is not a device"),
        ({"device": "meta"}, "device='meta': is not a device"),
        ({"device": "cuda:77"}, "device='cuda:77': is not there"),
    ],
)
def test_a_device_that_cannot_compute_is_refused(model_folder: Path, options: dict[str, str], why: str) -> None:
    assert why in refusal_of(model_folder, **options)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
UNUSED = r"has 1 weights that its configuration does not use \(model.layers.2.mlp"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda tensors: tensors.pop(K_PROJ), "model="),  # transformers would draw it at random
        (lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ][:16].clone()}), "model="),
        (lambda tensors: tensors["model.norm.weight"].fill_(torch.nan), "logits that are not finite"),
        # a model of three layers, of which the configuration names two
        (lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": tensors[K_PROJ].clone()}), UNUSED),
    ],
    ids=["missing", "mismatched", "nan", "unused"],
)
def test_wrong_weights_are_refused(copied: Path, edit: Callable[[dict[str, torch.Tensor]], object], why: str) -> None:
    edit_tensors(copied, edit)
    with pytest.raises(ConfigError, match=why) as refused:
        load_model(inspect_model(copied))
    assert "\n" not in str(refused.value)


def test_a_model_with_other_masks_or_positions_is_found_by_its_logits(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Otherwise:
        """Each row attends to itself alone."""

        def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: object) -> Any:
            return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    monkeypatch.setattr(torch_model, "pack_batch", lambda _, decodes, __: (Otherwise(), [*range(len(decodes))]))
    with pytest.raises(ConfigError, match=r"differ by \d+% from those of its own attention"):
        load_model(inspect_model(model_folder))


def test_bfloat16_logits_are_close_to_float32(model_folder: Path, judge: GreedyTextVerifier) -> None:
    spec = inspect_model(model_folder, dtype="bfloat16")
    pool = TorchDeviceMemory.allocate(
        num_layers=2, num_pages=16, page_size=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16
    )
    device = TorchDevice(model=load_model(spec), pool=pool)
    scheduler = Scheduler.compose(SchedulerConfig(page_size=4, kv_tokens=64), ParallelState(), device)
    request = EngineRequest("r", range(6, 40), SamplingLimits(8, ignore_eos=True))
    drain(scheduler, request)
    logits = judge.logits(request.token_ids)[33:-1]
    behind = logits.max(dim=1).values - logits[range(8), torch.tensor(request.output_ids)]
    assert behind.max() < 0.05 * (logits.max() - logits.min())  # each choice was among the best, if not the best
