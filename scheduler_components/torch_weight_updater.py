"""The weights of a torch module, of any model that is one: transformers' or your own; whole, or a rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from scheduler_components.errors import ConfigError
from scheduler_components.weight_updater import LoadedTensors

__all__ = ["TensorShards", "TorchWeightStore"]


@dataclass(slots=True, kw_only=True, frozen=True)
class TensorShards:
    """Which part of each tensor a rank keeps; by default all of them whole.

    Attributes:
        cuts: by name of a tensor that is cut, the dimension along which it is; all others are whole.
        rank, size: which of so many equal parts, from 0.
    """

    cuts: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0
    size: int = 1

    def shard_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor: a view of it."""
        dimension = self.cuts.get(name)
        return whole if dimension is None else whole.chunk(self.size, dimension)[self.rank]

    def whole_shape(self, name: str, part: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the tensor that ``part`` is cut of."""
        dimension = self.cuts.get(name)
        return tuple(length * self.size if at == dimension else length for at, length in enumerate(part.shape))


@dataclass(slots=True, kw_only=True)
class TorchWeightStore:
    """A ``WeightStore`` over the parameters and buffers of ``model``; each is one part, named as in its state dict.

    The content of a part is the tensor's bytes: its own type and shape, row by row, as this machine has numbers in
    memory. An update may bring some tensors; the others stay. What was loaded lies beside the model until ``commit``
    copies it in place, so that compiled graphs and views of the parameters go on. Each rank gets whole tensors, so that
    all have the same checksum, and keeps its part of each.

    Attributes:
        model: computes with its old weights until then.
        parts: of which tensors the model has a part.
    """

    model: torch.nn.Module
    parts: TensorShards = field(default_factory=TensorShards)
    _staged: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _loaded: LoadedTensors = field(default_factory=LoadedTensors, init=False, repr=False)

    def begin(self, weight_version: str) -> None:  # noqa: ARG002 - the port's
        self.roll_back()

    def load(self, name: str, content: bytes) -> None:
        """Keep one tensor beside the model, on its device.

        Raises:
            ConfigError: the model has no such tensor, it has another size, or it came before.
        """
        own = self.model.state_dict().get(name)
        if own is None:
            raise ConfigError("name", name, "is no tensor of this model", "give names of its state dict")
        shape = self.parts.whole_shape(name, own)
        num_bytes = prod(shape) * own.element_size()
        if len(content) != num_bytes:
            problem = f"is not {num_bytes} bytes, {own.dtype} of {shape}, in {name!r}"
            raise ConfigError("content", len(content), problem, "give the tensor's bytes, row by row")
        self._loaded.add(name, content)
        whole = torch.frombuffer(bytearray(content), dtype=own.dtype).reshape(shape)
        self._staged[name] = self.parts.shard_of(name, whole).to(own.device)

    def checksum(self) -> int:
        return self._loaded.checksum()

    def commit(self) -> None:
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in self._staged.items():
                own[name].copy_(tensor)
        self.roll_back()

    def roll_back(self) -> None:
        self._staged = {}
        self._loaded.clear()
