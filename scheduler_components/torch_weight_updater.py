"""TorchWeightStore: update the weights of a torch module, whole or one rank's shard of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from scheduler_components._internal.extras import naming_extras
from scheduler_components.errors import ConfigError
from scheduler_components.weight_updater import LoadedTensors

with naming_extras:
    import torch

__all__ = ["TensorShards", "TorchWeightStore"]


@dataclass(slots=True, kw_only=True, frozen=True)
class TensorShards:
    """Which shard of each tensor a rank keeps; by default the whole tensors.

    Attributes:
        cuts: name of a sharded tensor -> the dimension along which it is split. All other tensors are whole.
        rank, size: index and number of the equal shards.
    """

    cuts: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0
    size: int = 1

    def shard_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's shard of a tensor."""
        dimension = self.cuts.get(name)
        return whole if dimension is None else whole.chunk(self.size, dimension)[self.rank]

    def whole_shape(self, name: str, shard: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor that `shard` is a part of."""
        dimension = self.cuts.get(name)
        return tuple(length * self.size if at == dimension else length for at, length in enumerate(shard.shape))


@dataclass(slots=True, kw_only=True)
class TorchWeightStore:
    """A `WeightStore` over the parameters and buffers of `model`, by their names in its state dict.

    The content of a tensor is its bytes in row-major order, in its own type and this machine's byte order. An update
    may load some of the tensors; the others stay. Loaded tensors are staged next to the model until `commit` copies
    them in place, so compiled graphs and views of the parameters stay valid. Each rank receives whole tensors, so that
    all ranks compute the same checksum, and keeps its shard of each.

    Attributes:
        model: computes with the old weights until `commit`.
        parts: the shards that this rank keeps.
    """

    model: torch.nn.Module
    parts: TensorShards = field(default_factory=TensorShards)
    _staged: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _loaded: LoadedTensors = field(default_factory=LoadedTensors, init=False, repr=False)

    def begin(self, weight_version: str) -> None:
        self.roll_back()

    def load(self, name: str, content: bytes) -> None:
        """Stage one tensor on the model's device.

        Raises:
            ConfigError: the model has no such tensor, the size differs, or the tensor was loaded before.
        """
        own = self.model.state_dict().get(name)
        if own is None:
            raise ConfigError("name", name, "is no tensor of this model", "give names of its state dict")
        shape = self.parts.whole_shape(name, own)
        num_bytes = prod(shape) * own.element_size()
        if len(content) != num_bytes:
            problem = f"is not {num_bytes} bytes, {own.dtype} of {shape}, in {name!r}"
            raise ConfigError("content", len(content), problem, "give the tensor's bytes in row-major order")
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
