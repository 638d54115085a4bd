"""TorchAdapters: LoRA adapters of a transformers model, from folders in peft's layout.

An adapter adds ``scaling * (x A^T) B^T`` to the output of some linear layers. The rows of a batch may belong to
different adapters, and rows of the base model to none, so a hook of each linear layer adds to the rows of each adapter.
The base weights never change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from scheduler_components import ConfigError
from scheduler_components.errors import first_line
from scheduler_components.waiting.lora_queue import Adapter

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "modules_to_save": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "megatron_config": ({},),
    "trainable_token_indices": ([],),
}
"""Fields of ``adapter_config.json`` that change the computation, and the values that are supported besides null."""


class AdaptedRows(NamedTuple):
    """Rows ``start`` to ``end`` of a batch, and the adapter that they belong to; None for the base model."""

    lora_id: int | None
    start: int
    end: int


class RowAdapters(Protocol):
    """Applies adapters to the rows of the next forward pass."""

    def start_batch(self, rows: Sequence[AdaptedRows]) -> None:
        """Use these adapters until the next call. Raises KeyError for one that is not loaded."""
        ...


class NullRowAdapters:
    """A device without adapters."""

    def start_batch(self, rows: Sequence[AdaptedRows]) -> None:
        pass


class _Pair(NamedTuple):
    """The factors of one layer: ``down`` is A ``[rank, inputs]``, ``up`` is B times the scaling ``[outputs, rank]``."""

    down: torch.Tensor
    up: torch.Tensor


_Weights = Mapping[str, _Pair]


class TorchAdapters:
    """The adapters on one device: an ``AdapterStore`` and the device's ``RowAdapters``.

    ``load`` and ``unload`` may be called in another thread, for adapters that no row uses. Each linear layer gets its
    hook when this object is made, because a layer must not get one during a forward pass.

    Args:
        model: not sharded, in evaluation mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._loaded: dict[int, _Weights] = {}
        self._batch: list[tuple[_Weights, torch.Tensor]] = []
        # The output layer computes the last row of each chunk only, so its rows are not those of the batch.
        output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if type(module) is torch.nn.Linear and module is not output
        }
        for name, module in self._layers.items():
            module.register_forward_hook(self._hook(name))

    def load(self, adapter: Adapter) -> None:
        """Read an adapter and copy it to the device, in the dtype of the model.

        Raises:
            ConfigError: the folder is no adapter of this model that this device can compute.
        """
        shapes = {name: (layer.in_features, layer.out_features) for name, layer in self._layers.items()}
        pairs = read_adapter(Path(adapter.path), shapes)
        dtype, device = self._model.dtype, self._model.device
        self._loaded[adapter.lora_id] = {
            name: _Pair(pair.down.to(device, dtype), pair.up.to(device, dtype)) for name, pair in pairs.items()
        }

    def unload(self, adapter: Adapter) -> None:
        self._loaded.pop(adapter.lora_id, None)

    def start_batch(self, rows: Sequence[AdaptedRows]) -> None:
        by_adapter: dict[int, list[int]] = {}
        for each in rows:
            if each.lora_id is not None:
                by_adapter.setdefault(each.lora_id, []).extend(range(each.start, each.end))
        self._batch = [
            (self._loaded[lora_id], torch.tensor(indices, device=self._model.device))
            for lora_id, indices in by_adapter.items()
        ]

    def _hook(self, name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            for weights, rows in self._batch:
                pair = weights.get(name)
                if pair is not None:
                    change = inputs[0].index_select(-2, rows) @ pair.down.T @ pair.up.T
                    output.index_add_(output.dim() - 2, rows, change)

        return add


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]]) -> _Weights:
    """Read an adapter as peft's ``save_pretrained`` writes it: ``adapter_config.json``, ``adapter_model.safetensors``.

    Args:
        folder: has both files.
        shapes: inputs and outputs of each linear layer that may be adapted.

    Raises:
        ConfigError: a file is missing or broken, or the adapter changes what this device cannot compute.
    """
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        with safe_open(folder / _WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, ValueError, SafetensorError) as error:
        raise _refusal(folder, f"cannot be read ({first_line(error)})", f"give {_CONFIG} and {_WEIGHTS}") from error
    rank, scaling = _rank_and_scaling(folder, config)
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, factor = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if factor not in ("lora_A", "lora_B") or layer not in shapes:
            raise _refusal(folder, f"has weights {name!r} of no linear layer", "adapt linear layers of this model only")
        factors.setdefault(layer, {})[factor] = tensor
    if not factors:
        raise _refusal(folder, "has no weights", "save the trained adapter again")
    pairs = {}
    for layer, found in factors.items():
        down, up, (inputs, outputs) = found.get("lora_A"), found.get("lora_B"), shapes[layer]
        if down is None or up is None or (down.shape, up.shape) != ((rank, inputs), (outputs, rank)):
            raise _refusal(folder, f"does not fit layer {layer!r}", "give an adapter of the served model")
        pairs[layer] = _Pair(down, up * scaling)
    return pairs


def _rank_and_scaling(folder: Path, config: object) -> tuple[int, float]:
    if not isinstance(config, dict):
        raise _refusal(folder, f"has a {_CONFIG} that is no object", "copy it again")
    for name, supported in _NEUTRAL.items():
        given = config.get(name)
        if given is not None and given not in supported:
            raise _refusal(folder, f"has {name}={given!r}", "give a plain LoRA adapter")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    is_valid = isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)
    if not is_valid:
        raise _refusal(folder, f"has r={rank!r} and lora_alpha={alpha!r}", "give numbers above 0")
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    return rank, float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _refusal(folder: Path, problem: str, hint: str) -> ConfigError:
    return ConfigError("lora_path", str(folder), problem, hint)
