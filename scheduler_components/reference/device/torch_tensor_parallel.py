"""Attention-TP: ranks that each hold a part of every layer, and add up what their parts give.

Which tensors are cut, and how, is each model's own plan in transformers: ``colwise`` layers keep some of their outputs
(heads, or numbers between the two halves of an MLP), and the ``rowwise`` layer behind them takes just these and gives
sums that lack the other ranks' share. So there are two sums per layer of the model, and nothing else is exchanged:
embedding, norms and the head over the vocabulary are whole on each rank, which therefore has the same logits.

Every rank reads the whole model and keeps its part. A plan that asks for more than these two cuts is not followed:
such a model is served whole (``max_tp_size`` is 1).

The sums of all ranks are bitwise the same, since gloo and NCCL add up each number once and give it to all. They differ
from those of one rank in the order of additions: so tokens do where two are as good as equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import gcd
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import linear
from transformers import PreTrainedModel

from scheduler_components import ConfigError, StartError
from scheduler_components.reference.device.model_spec import KvShape
from scheduler_components.torch_weight_updater import TensorShards

__all__ = [
    "NullTensorParallelGroup",
    "TensorParallelGroup",
    "TorchTensorParallelGroup",
    "ShapeOnlyTensorParallelGroup",
    "shard_model",
    "max_tp_size",
    "open_tensor_parallel_group",
]

_COLUMNS, _ROWS = "colwise", "rowwise"
_CUT_DIMENSION = {_COLUMNS: 0, _ROWS: 1}
"""Of a layer's weight, ``[outputs, inputs]``."""

_WHOLE = frozenset({"replicated_with_grad_allreduce"})
_WHOLE_OUTSIDE_LAYERS = frozenset({"embedding_rowwise", "colwise_gather_output"})
"""Plans that end in the whole output on each rank: to compute it there gives the same."""

_TIMEOUT_S = 120.0  # for a rank that computes its part of a long chunk on a core that others use


class TensorParallelGroup(Protocol):
    """The ranks among which layers are cut, of one thread."""

    @property
    def rank(self) -> int:
        """This one, from 0."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: torch.Tensor) -> None:
        """Replace ``partial`` by its sum over all ranks, which come with the same shapes in the same order.

        Raises:
            RuntimeError: a rank did not come, or has gone.
        """
        ...

    def close(self) -> None:
        """Let go of the other ranks; safe to call twice."""
        ...


class _Wait(Protocol):
    def wait(self) -> object: ...


class _ProcessGroup(Protocol):
    """What is used of torch's groups, whose stubs have no members."""

    def allreduce(self, tensors: list[torch.Tensor]) -> _Wait: ...


class NullTensorParallelGroup:
    """A rank that holds the whole model."""

    rank, size = 0, 1

    def all_reduce(self, partial: torch.Tensor) -> None:
        """The part is the whole."""

    def close(self) -> None:
        """There is nobody to let go of."""


@dataclass(slots=True, kw_only=True)
class ShapeOnlyTensorParallelGroup:
    """The first of ranks that do not exist: to see what becomes of a model that is cut, without computing."""

    size: int
    rank: int = 0

    def all_reduce(self, partial: torch.Tensor) -> None:
        """The sum has the same shape."""

    def close(self) -> None:
        """There is nobody to let go of."""


@dataclass(slots=True, kw_only=True)
class TorchTensorParallelGroup:
    """``TensorParallelGroup`` over gloo or NCCL, without the process's default group, which belongs to whoever made it.

    Attributes:
        rank, size: this rank among those of its group.
        group: of these ranks alone, made by ``open_tensor_parallel_group``; None once it is closed.
    """

    rank: int
    size: int
    group: _ProcessGroup | None

    def all_reduce(self, partial: torch.Tensor) -> None:
        if self.group is None:
            raise RuntimeError("the ranks of the model are let go of")
        self.group.allreduce([partial]).wait()

    def close(self) -> None:
        self.group = None


def open_tensor_parallel_group(
    meeting: Path, *, rank: int, size: int, on_cuda: bool = False, timeout_s: float = _TIMEOUT_S
) -> TorchTensorParallelGroup:
    """Meet the other ranks, all of which are on this machine: gloo's connections are on loopback.

    Args:
        meeting: a file that all ranks can write to, and that nobody has used before.
        rank, size: this rank among those that meet.
        on_cuda: sums are on CUDA devices, one per rank, and go over NCCL. That was not run: there was no such device.
        timeout_s: longest wait for them, here and in each sum.

    Raises:
        StartError: not all ranks came.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store: Any = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        group = _nccl(store, rank, size, timeout) if on_cuda else _gloo(store, rank, size, timeout)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise StartError(f"rank {rank} of {size} of the model", first_line, "see why the others ended") from error
    return TorchTensorParallelGroup(rank=rank, size=size, group=group)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> _ProcessGroup:
    # torch's stubs leave these out, and only the options name the interface to listen on.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    group: _ProcessGroup = gloo(store, rank, size, options)
    return group


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> _ProcessGroup:
    nccl: Any = dist.ProcessGroupNCCL  # builds of torch for CPUs have none
    group: _ProcessGroup = nccl(store, rank, size, timeout)
    return group


class RowParallelLinear(torch.nn.Module):
    """A linear layer that has some of its inputs, and adds its sums up with the ranks that have the others.

    Args:
        weight: ``[outputs, own inputs]``.
        bias: of the whole layer, added once; None for none.
        ranks: that have the other inputs.
    """

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None, ranks: TensorParallelGroup) -> None:
        super().__init__()
        self.weight, self.bias, self._ranks = weight, bias, ranks

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., own inputs]`` in, ``[..., outputs]`` out."""
        sums = linear(inputs, self.weight)
        self._ranks.all_reduce(sums)
        return sums if self.bias is None else sums + self.bias


def max_tp_size(model: PreTrainedModel, kv: KvShape) -> int:
    """Return the most ranks that the model can be cut among: each divisor of it can be had, 1 is no cut.

    Args:
        model: whole; its weights are not looked at.
        kv: of the whole model.
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


def shard_model(model: PreTrainedModel, ranks: TensorParallelGroup) -> TensorShards:
    """Keep of each layer this rank's part; return which part that is, for updates of the weights.

    Args:
        model: whole; changed in place.
        ranks: of which ``size`` divides ``max_tp_size``.

    Raises:
        ConfigError: it does not.
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
    name: str, whole: torch.nn.Module, style: str, parts: TensorShards, ranks: TensorParallelGroup
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
    """A copy of its own, so that the whole tensor can go."""
    return torch.nn.Parameter(part.detach().clone(), requires_grad=False)


def _planned(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module, str, bool]]:
    """Each module that the model's plan names: its name, itself, its style, and whether it is in a layer."""
    plan: dict[str, str] = model.tp_plan or {}
    for name, module in model.named_modules():
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        style = plan.get(pattern)
        if style is not None:
            yield name, module, style, "*" in pattern
