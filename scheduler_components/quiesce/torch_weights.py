"""The weights of a torch module, of any model that is one: transformers' or your own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from scheduler_components.errors import ConfigError
from scheduler_components.quiesce.weights import LoadedParts

__all__ = ["TorchWeights"]


@dataclass(slots=True, kw_only=True)
class TorchWeights:
    """A ``WeightStore`` over the parameters and buffers of ``model``; each is one part, named as in its state dict.

    The content of a part is the tensor's bytes: its own type and shape, row by row, as this machine has numbers in
    memory. An update may bring some tensors; the others stay. What was loaded lies beside the model until ``commit``
    copies it in place, so that compiled graphs and views of the parameters go on. Each rank gets whole tensors: one
    that keeps slices of them needs a store of its own.

    Attributes:
        model: computes with its old weights until then.
    """

    model: torch.nn.Module
    _staged: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _parts: LoadedParts = field(default_factory=LoadedParts, init=False, repr=False)

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
        if len(content) != own.numel() * own.element_size():
            shape = f"is not {own.numel() * own.element_size()} bytes, {own.dtype} of {tuple(own.shape)}, in {name!r}"
            raise ConfigError("content", len(content), shape, "give the tensor's bytes, row by row")
        self._parts.add(name, content)
        self._staged[name] = torch.frombuffer(bytearray(content), dtype=own.dtype).reshape(own.shape).to(own.device)

    def checksum(self) -> int:
        return self._parts.checksum()

    def commit(self) -> None:
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in self._staged.items():
                own[name].copy_(tensor)
        self.roll_back()

    def roll_back(self) -> None:
        self._staged = {}
        self._parts.clear()
