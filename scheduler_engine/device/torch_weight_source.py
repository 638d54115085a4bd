"""Read the weights of a model folder or GGUF file, in the serving process, to update the running ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import torch

from scheduler_components import ConfigError
from scheduler_engine.device.model_spec import ModelSpec
from scheduler_engine.device.torch_model import inspect_model, load_model


class ModelTensors(Mapping[str, bytes]):
    """The tensors of a module as row-major bytes. A lookup copies one tensor.

    Args:
        tensors: tensors by state-dict name. Of several names for one tensor, the first is kept.
        identity: identity of the model.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], identity: str) -> None:
        self.identity = identity
        self._tensors: dict[str, torch.Tensor] = {}
        places = set[int]()
        for name, tensor in tensors.items():
            if tensor.data_ptr() not in places:
                places.add(tensor.data_ptr())
                self._tensors[name] = tensor

    def __getitem__(self, name: str) -> bytes:
        return self._tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def read_weights(path: str | Path, served: ModelSpec) -> ModelTensors:
    """Load all weights of a model in the dtype of the served model.

    Args:
        path: a folder or file that ``inspect_model`` accepts.
        served: the model that will compute with the weights.

    Raises:
        ConfigError: the model cannot be loaded, or its weights do not fit the served model.
    """
    found = inspect_model(path, dtype=served.dtype, allow_untested=True)  # of the served type, or refused below
    if attrs.evolve(found, path=served.path, device=served.device, identity=served.identity) != served:
        hint = "give weights of the same configuration"
        raise ConfigError("model_path", str(path), f"is another model than {served.path}", hint)
    return ModelTensors(load_model(found).state_dict(), found.identity)
