"""A weight update of a torch module takes effect in the same step on all ranks, or on none."""

from __future__ import annotations

import pytest
from kit.quiescable_replica import QuiescableReplica

from scheduler_components import ConfigError
from scheduler_components.torch_weight_updater import TorchWeightStore
from scheduler_components.values import (
    BeginWeightUpdate,
    CheckWeights,
    ControlReply,
    ControlRequest,
    EndWeightUpdate,
    LoadWeights,
    RollBackWeights,
)

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)).eval()


def parts_of(model: torch.nn.Module) -> list[LoadWeights]:
    return [LoadWeights(name, tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()]


def outputs_of(model: torch.nn.Module) -> list[list[float]]:
    with torch.no_grad():
        return model(torch.arange(8.0).reshape(2, 4)).tolist()


class TorchReplica(QuiescableReplica):
    """Four ranks, each with a copy of one model."""

    def __init__(self) -> None:
        super().__init__()
        self.models = {rank: model_of(1) for rank in self.ranks}
        for rank, quiesce in self.ranks.items():
            quiesce.weights = TorchWeightStore(model=self.models[rank])

    def order(self, *orders: ControlRequest) -> ControlReply:
        for order in orders:
            answer = self.carry_out_alike(order)
        return answer

    def carry_out_alike(self, order: ControlRequest) -> ControlReply:
        for quiesce in self.ranks.values():
            quiesce.enqueue(1, order, now_s=0.0)
        answers = self.step()
        while answers[0] is None:
            answers = self.step()
        assert not self.have_parted(answers)
        return answers[0]

    def computes_as(self, seed: int) -> bool:
        wanted = outputs_of(model_of(seed))
        return all(outputs_of(model) == wanted for model in self.models.values())


def test_an_update_takes_effect_when_it_ends() -> None:
    replica = TorchReplica()
    *_, last = (replica.order(order) for order in (BeginWeightUpdate("v2"), *parts_of(model_of(2)), CheckWeights()))
    assert not last.problem
    assert replica.computes_as(1)
    assert not replica.order(EndWeightUpdate(last.checksum)).problem
    assert replica.computes_as(2)


def test_a_rolled_back_or_mismatched_update_changes_nothing() -> None:
    replica = TorchReplica()
    replica.order(BeginWeightUpdate("v2"), *parts_of(model_of(2)), RollBackWeights())
    assert replica.computes_as(1)
    answer = replica.order(BeginWeightUpdate("v2"), *parts_of(model_of(2)), EndWeightUpdate(5))
    assert "the weights have checksum" in answer.problem
    assert replica.computes_as(1)


def test_a_rank_with_different_bytes_ends_the_update_on_all() -> None:
    replica = TorchReplica()
    replica.order(BeginWeightUpdate("v2"))
    first, *others = parts_of(model_of(2))
    for rank, quiesce in replica.ranks.items():
        quiesce.enqueue(1, LoadWeights(first.name, first.content if rank else bytes(len(first.content))), now_s=0.0)
    replica.step()
    replica.order(*others)
    checked = replica.order(CheckWeights())
    assert checked.problem == "ranks have loaded different weights"
    assert replica.computes_as(1)


def test_an_update_may_contain_some_tensors_only() -> None:
    replica = TorchReplica()
    new = parts_of(model_of(2))
    checksum = replica.order(BeginWeightUpdate("v2"), new[0], CheckWeights()).checksum
    replica.order(EndWeightUpdate(checksum))
    mixed = model_of(1)
    mixed.load_state_dict(mixed.state_dict() | {new[0].name: model_of(2).state_dict()[new[0].name]})
    assert all(outputs_of(model) == outputs_of(mixed) for model in replica.models.values())


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("head.weight", bytes(16), "name='head.weight': is no tensor of this model; give names of its state dict"),
        ("0.bias", bytes(31), "content=31: is not 32 bytes, torch.float32 of (8,), in '0.bias'"),
        ("0.bias", b"", "content=0: is not 32 bytes"),
    ],
)
def test_a_tensor_that_does_not_fit_is_rejected_by_name(name: str, content: bytes, problem: str) -> None:
    weights = TorchWeightStore(model=model_of(1))
    weights.begin("v2")
    with pytest.raises(ConfigError) as refused:
        weights.load(name, content)
    assert problem in str(refused.value)
    weights.load("0.bias", bytes(32))
    with pytest.raises(ConfigError, match="loaded before"):
        weights.load("0.bias", bytes(32))


def test_every_dtype_is_loaded_from_its_bytes() -> None:
    for kind in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn):
        model = torch.nn.Module()
        model.register_buffer("held", torch.zeros(2, 3).to(kind))
        wanted = torch.arange(6.0).reshape(2, 3).to(kind)
        weights = TorchWeightStore(model=model)
        weights.begin("v2")
        weights.load("held", wanted.view(torch.uint8).numpy().tobytes())
        weights.commit()
        assert torch.equal(model.held.view(torch.uint8), wanted.view(torch.uint8))
