"""The tensors of a module are row-major bytes, and a tensor with two names is sent once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scheduler_components import ConfigError
from scheduler_engine.device.torch_model import inspect_model
from scheduler_engine.device.torch_weight_source import ModelTensors, read_weights

pytestmark = pytest.mark.model


def test_a_tensor_is_listed_once_in_row_major_order() -> None:

    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors = ModelTensors({"embed": matrix, "head": matrix, "transposed": matrix.clone().T}, "id")
    assert list(tensors) == ["embed", "transposed"]
    assert tensors["embed"] == matrix.numpy().tobytes()
    assert tensors["transposed"] == torch.tensor([[1.0, 3.0], [2.0, 4.0]]).numpy().tobytes()


def test_weights_of_another_configuration_are_refused(make_model_folder: Callable[..., Path]) -> None:
    """Their shapes are equal, but the served model would compute something else with them."""
    served = inspect_model(make_model_folder())
    assert len(read_weights(make_model_folder(seed=1), served))
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    for other in (make_model_folder(rope_parameters=rope), make_model_folder(hidden_act="gelu")):
        with pytest.raises(ConfigError, match=r"is another model than .*; give weights of the same configuration"):
            read_weights(other, served)
