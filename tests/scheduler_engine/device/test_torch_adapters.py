"""A request with an adapter has the text of a model into which the adapter is merged, whatever shares its batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.immediate_loader import ImmediateLoader
from kit.lora_folders import merge_adapter, write_adapter
from kit.model_bench import PROMPTS, ModelBench
from kit.reference_scheduler import drain
from safetensors.torch import load_file, save_file

from scheduler_components import ConfigError
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_components.values import RequestHints
from scheduler_components.waiting.lora_queue import Adapter, LoraQueue
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.device.torch_adapters import AdaptedRows, TorchAdapters
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.device.torch_model import inspect_model, load_model
from scheduler_engine.engine.scheduler.request import EngineRequest

pytestmark = pytest.mark.model


def load_judge(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def adapted_model(model_folder: Path) -> Any:
    """A model of its own, because its layers get hooks."""
    return load_model(inspect_model(model_folder))


@pytest.fixture(scope="module")
def folders(adapted_model: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(root / "a", adapted_model, seed=1),
        write_adapter(root / "b", adapted_model, seed=2, use_rslora=True),
    ]


@pytest.fixture(scope="module")
def judges(model_folder: Path, folders: list[Path], judge: GreedyTextVerifier) -> list[GreedyTextVerifier]:
    """The base model, then the model with each adapter merged."""
    merged = (GreedyTextVerifier.over(merge_adapter(load_judge(model_folder), folder)) for folder in folders)
    return [judge, *merged]


def loaded(model: Any, folders: list[Path]) -> TorchAdapters:
    adapters = TorchAdapters(model)
    for number, folder in enumerate(folders, start=1):
        adapters.load(Adapter(folder.name, str(folder), number))
    return adapters


def submit(bench: ModelBench, rid: str, prompt: tuple[int, ...], lora: str | None) -> EngineRequest:
    request = EngineRequest(rid, prompt, SamplingLimits(max_new_tokens=6), hints=RequestHints(lora=lora))
    bench.scheduler.submit(request)
    return request


def test_a_batch_of_two_adapters_and_the_base_model_has_the_texts_of_merged_weights(
    adapted_model: Any, folders: list[Path], judges: list[GreedyTextVerifier]
) -> None:
    """Prompts are equal across adapters, come in chunks, and find their own cached pages at the second time."""
    adapters = TorchAdapters(adapted_model)
    lora = LoraQueue[EngineRequest](loader=ImmediateLoader(adapters))
    for folder in folders:
        lora.register(folder.name, str(folder))
    bench = ModelBench(adapted_model, judges[0], lora=lora, kv_tokens=512, max_running_requests=9)
    device = bench.scheduler.device
    assert isinstance(device, TorchDevice)
    device.adapters = adapters
    texts = set()
    for turn in range(2):
        served = [
            (submit(bench, f"{turn}/{place}/{name}", prompt, name), judge)
            for place, prompt in enumerate(PROMPTS[:3])
            for name, judge in zip((None, "a", "b"), judges, strict=True)
        ]
        drain(bench.scheduler)
        for request, judge in served:
            assert request.num_output_tokens
            judge.expect_prefix(request.input_ids, request.output_ids)
            assert not turn or request.num_cached_prompt_tokens
        texts |= {request.output_ids for request, _ in served}
    assert len(texts) == 9, "adapters that change nothing prove nothing"


def test_an_unloaded_adapter_is_not_applied_and_an_unknown_one_is_an_error(
    adapted_model: Any, folders: list[Path]
) -> None:
    adapters = loaded(adapted_model, folders[:1])
    rows = [AdaptedRows(1, 0, 2)]
    adapters.start_batch(rows)
    adapters.unload(Adapter("a", str(folders[0]), 1))
    adapters.unload(Adapter("a", str(folders[0]), 1))
    with pytest.raises(KeyError):
        adapters.start_batch(rows)
    adapters.start_batch([AdaptedRows(None, 0, 2)])


def with_config(**changes: Any) -> Callable[[Path], None]:
    def break_it(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return break_it


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def break_it(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return break_it


def first(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(tensors) if "lora_A" in name)


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "is no object"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), "cannot be read"),
        (with_config(use_dora=True), "use_dora"),
        (with_config(peft_type="IA3"), "peft_type"),
        (with_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (with_config(r=0), "r=0"),
        (with_config(lora_alpha=None), "lora_alpha"),
        (with_tensors(lambda tensors: tensors.clear()), "no weights"),
        (with_tensors(lambda tensors: tensors.pop(first(tensors))), "does not fit"),
        (with_tensors(lambda tensors: tensors.update({first(tensors): torch.zeros(4, 7)})), "does not fit"),
        (with_tensors(lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)})),
         "no linear layer"),
    ],
)  # fmt: skip
def test_an_adapter_that_cannot_be_computed_is_refused_with_its_reason(
    adapted_model: Any, tmp_path: Path, break_it: Callable[[Path], object], problem: str
) -> None:
    folder = write_adapter(tmp_path / "broken", adapted_model, seed=3)
    break_it(folder)
    with pytest.raises(ConfigError, match=problem) as caught:
        TorchAdapters(adapted_model).load(Adapter("broken", str(folder), 1))
    assert caught.value.field == "lora_path"
