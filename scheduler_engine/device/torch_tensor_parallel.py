"""Tensor parallelism of attention and MLP: every rank holds a shard of each layer, and the ranks add their sums.

The model's own plan in transformers says which tensors are sharded. A ``colwise`` layer keeps some of its outputs
(heads, or inner elements of an MLP). The ``rowwise`` layer behind it reads these outputs and returns partial sums, so
each layer of the model needs two all-reduces. Embedding, norms and the vocabulary head are replicated, and therefore
every rank has the same logits.

Every rank reads the whole model and keeps its shard. A model whose plan asks for anything else is not sharded
(``max_tp_size`` is 1).

The sums differ from those of a single rank in the order of additions, so two tokens of nearly equal probability may
swap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from scheduler_components import ConfigError
from scheduler_components.torch_weight_updater import TensorShards
from scheduler_engine.device.model_spec import KvShape
from scheduler_engine.device.torch_model_parallel import ModelParallelGroup

_COLUMNS, _ROWS = "colwise", "rowwise"
_CUT_DIMENSION = {_COLUMNS: 0, _ROWS: 1}
"""Sharded dimension of a layer's weight, ``[outputs, inputs]``."""

_WHOLE = frozenset({"replicated_with_grad_allreduce"})
_WHOLE_OUTSIDE_LAYERS = frozenset({"embedding_rowwise", "colwise_gather_output"})
"""Styles whose output is whole on each rank, so that a replicated layer computes the same."""


@dataclass(slots=True, kw_only=True)
class ShapeOnlyModelParallelGroup:
    """Rank 0 of a group without other ranks, to shard a model without weights."""

    size: int
    rank: int = 0

    def all_reduce(self, partial: torch.Tensor) -> None:
        """Leave ``partial`` as it is."""

    def close(self) -> None: ...


class RowParallelLinear(torch.nn.Module):
    """A linear layer over a shard of its inputs, which adds its partial sums to those of the other ranks.

    Args:
        weight: ``[outputs, own inputs]``.
        bias: bias of the whole layer, added once; None for none.
        ranks: the ranks that hold the other inputs.
    """

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None, ranks: ModelParallelGroup) -> None:
        super().__init__()
        self.weight, self.bias, self._ranks = weight, bias, ranks

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[..., own inputs]`` to ``[..., outputs]``."""
        sums = linear(inputs, self.weight)
        self._ranks.all_reduce(sums)
        return sums if self.bias is None else sums + self.bias


def max_tp_size(model: PreTrainedModel, kv: KvShape) -> int:
    """Return the most ranks over which the model can be sharded. Every divisor of it works; 1 means not at all.

    Args:
        model: the whole model; its weights are not read.
        kv: KV shape of the whole model.
    """
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    units = gcd(kv.kv_heads, heads) if isinstance(heads, int) else 1
    cuts = set[str]()
    for _, module, style, is_in_layer in _planned(model):
        if style in _CUT_DIMENSION:
            if type(module) is not torch.nn.Linear:
                return 1
            units = gcd(units, module.weight.shape[_CUT_DIMENSION[style]])
            cuts.add(style)
        elif style not in _WHOLE and (is_in_layer or style not in _WHOLE_OUTSIDE_LAYERS):
            return 1
    return units if len(cuts) == len(_CUT_DIMENSION) else 1


def shard_model(model: PreTrainedModel, ranks: ModelParallelGroup) -> TensorShards:
    """Keep this rank's shard of each layer, and return the description of the shards for weight updates.

    Args:
        model: the whole model; changed in place.
        ranks: the ranks; their number divides ``max_tp_size``.

    Raises:
        ConfigError: the number of ranks does not divide it.
    """
    if ranks.size == 1:
        return TensorShards()
    planned = [each for each in _planned(model) if each[2] in _CUT_DIMENSION]
    cuts: dict[str, int] = {}
    for name, module, style, _ in planned:
        dimension = _CUT_DIMENSION[style]
        if type(module) is not torch.nn.Linear or module.weight.shape[dimension] % ranks.size:
            raise ConfigError("attn_tp_size", ranks.size, f"does not divide {name}", "give a divisor of its heads")
        cuts[f"{name}.weight"] = dimension
        if module.bias is not None and style == _COLUMNS:
            cuts[f"{name}.bias"] = 0
    parts = TensorShards(cuts=cuts, rank=ranks.rank, size=ranks.size)
    for name, module, style, _ in planned:
        model.set_submodule(name, _part(name, module, style, parts, ranks))
    return parts


def _part(
    name: str, whole: torch.nn.Module, style: str, parts: TensorShards, ranks: ModelParallelGroup
) -> torch.nn.Linear | RowParallelLinear:
    assert type(whole) is torch.nn.Linear
    weight = _parameter(parts.shard_of(f"{name}.weight", whole.weight))
    bias = None if whole.bias is None else _parameter(parts.shard_of(f"{name}.bias", whole.bias))
    if style == _ROWS:
        return RowParallelLinear(weight, bias, ranks)
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = weight
    if bias is not None:
        made.bias = bias
    return made


def _parameter(part: torch.Tensor) -> torch.nn.Parameter:
    """Copy a shard, so that the whole tensor can be freed."""
    return torch.nn.Parameter(part.detach().clone(), requires_grad=False)


def _planned(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module, str, bool]]:
    """Yield each module of the model's plan: its name, the module, its style, and whether it is in a layer."""
    plan: dict[str, str] = model.tp_plan or {}
    for name, module in model.named_modules():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        style = plan.get(pattern)
        if style is not None:
            yield name, module, style, "*" in pattern
