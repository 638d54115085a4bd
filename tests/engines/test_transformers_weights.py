"""A weight update of a real model: the generated tokens change when the update ends, and not before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip(
    "transformers", "5.23", reason="`make engines` makes an environment with transformers 5.23"
)

import torch

from scheduler_components.quiesce import QuiesceController
from scheduler_components.testing.in_process_groups import InProcessGroups
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

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # the engine's own


class Idle:
    """The requests and the cache of an idle scheduler. Records the version for which the cache was cleared."""

    num_running = num_waiting = num_operations = 0

    def __init__(self) -> None:
        self.cleared_for = ""

    def abort_all(self) -> int:
        return 0

    def retract_all(self) -> int:
        return 0

    def clear(self, weight_version: str) -> None:
        self.cleared_for = weight_version

    def clear_storage_index(self) -> None:
        pass


class QuiescableRank:
    """The only rank of an engine, over a real model."""

    def __init__(self, model: Any) -> None:
        self.idle, self.num_steps = Idle(), 0
        self.quiesce = QuiesceController(work=self.idle, cache=self.idle, weights=TorchWeightStore(model=model))
        self.sync = InProcessGroups({0: []})

    def execute(self, request: ControlRequest) -> ControlReply:
        self.quiesce.enqueue(1, request, now_s=0.0)
        reply = None
        while reply is None:
            self.num_steps += 1
            proposal = self.quiesce.propose(self.num_steps, rank=0, now_s=0.0)
            reply = self.quiesce.apply(self.num_steps, self.sync.reduce({0: proposal})[0])
        return reply


def generated(model: Any) -> list[int]:
    prompt = torch.tensor([[0, *range(10, 60)]])
    with torch.no_grad():
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    return ids[0].tolist()  # type: ignore[no-any-return]


def test_a_model_uses_its_old_weights_until_the_update_ends(tiny_llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    torch.manual_seed(8)
    new = transformers.LlamaForCausalLM(model.config).to(torch.bfloat16)
    old_tokens, new_tokens = generated(model), generated(new)
    assert old_tokens != new_tokens
    parts = [
        LoadWeights(name, tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in new.state_dict().items()
    ]
    rank = QuiescableRank(model)
    for last in (RollBackWeights(), CheckWeights()):
        for request in (BeginWeightUpdate("trained"), *parts):
            assert not rank.execute(request).problem
        reply = rank.execute(last)
        assert (reply.problem, generated(model)) == ("", old_tokens)
    assert not rank.execute(EndWeightUpdate(reply.checksum)).problem
    assert generated(model) == new_tokens
    assert rank.idle.cleared_for == rank.quiesce.state.weight_version == "trained"
