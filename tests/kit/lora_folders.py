"""LoRA adapters of random weights in peft's layout, and models into which they are merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK, ALPHA = 4, 8
LAYERS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")


def write_adapter(folder: Path, model: Any, *, seed: int, scale: float = 0.3, **config: Any) -> Path:
    """Write an adapter of some linear layers of each decoder layer of ``model``."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(LAYERS):
            prefix = f"base_model.model.{name}.lora"
            tensors[f"{prefix}_A.weight"] = scale * torch.randn(RANK, module.in_features, generator=draw)
            tensors[f"{prefix}_B.weight"] = scale * torch.randn(module.out_features, RANK, generator=draw)
    save_file(tensors, folder / "adapter_model.safetensors")
    defaults = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [layer.rpartition(".")[2] for layer in LAYERS],
        "bias": "none",
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps(defaults | config))
    return folder


@torch.inference_mode()
def merge_adapter(model: Any, folder: Path) -> Any:
    """Add an adapter to the weights of a model, as peft's ``merge_and_unload`` does."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for name, down in tensors.items():
        if "lora_A" in name:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            modules[layer].weight += scaling * tensors[name.replace("lora_A", "lora_B")] @ down
    return model
