"""The tensors of a module are row-major bytes, and a tensor with two names is sent once."""

from __future__ import annotations

import pytest
import torch

from scheduler_components.reference.device.torch_weight_source import ModelTensors

pytestmark = pytest.mark.model


def test_a_tensor_is_listed_once_in_row_major_order() -> None:

    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors = ModelTensors({"embed": matrix, "head": matrix, "transposed": matrix.clone().T}, "id")
    assert list(tensors) == ["embed", "transposed"]
    assert tensors["embed"] == matrix.numpy().tobytes()
    assert tensors["transposed"] == torch.tensor([[1.0, 3.0], [2.0, 4.0]]).numpy().tobytes()
