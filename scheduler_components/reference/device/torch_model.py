"""Check and load a transformers model.

``inspect_model`` reads configuration and file headers and builds the model without weights. It finds out whether the
attention of every layer goes through transformers' interface, and with which shapes; no list of model types could say
that. A model that cannot be served is therefore refused in one sentence before any process loads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm.std import tqdm  # type: ignore[import-untyped]
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from scheduler_components import ConfigError
from scheduler_components.errors import first_line
from scheduler_components.reference.device.model_spec import KvShape, ModelDtype, ModelSpec, TokenSpec
from scheduler_components.reference.device.torch_attention import PAGED_ATTENTION, pack_batch, register_paged_attention
from scheduler_components.reference.device.torch_tensor_parallel import (
    ShapeOnlyModelParallelGroup,
    max_tp_size,
    shard_model,
)

__all__ = ["inspect_model", "load_model"]

_DTYPES: Mapping[ModelDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WHAT_LOADS = "name a folder with config.json and *.safetensors, or a .gguf file"
_INDEX = "model.safetensors.index.json"
_SERVABLE = "serve a model with full causal attention in each layer"
_PROBED_ROWS = 3
_CHECKED_TOKENS = (5, 3)  # two requests in one batch
_MAX_DIFFERENCE = 0.1  # relative norm of the difference; rounding in bfloat16 causes 0.01, a wrong mask about 1
_SAMPLES, _SAMPLE_BYTES = 16, 65_536  # per file, for the identity: training changes all of a file
_DIGEST_BYTES = 16


def inspect_model(path: str | Path, *, dtype: ModelDtype = "float32", device: str = "cpu") -> ModelSpec:
    """Describe a model that can be served, without loading its weights.

    Args:
        path: a folder with ``config.json`` and ``*.safetensors``, or a ``.gguf`` file.
        dtype: type of weights, keys and values.
        device: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: the model cannot be served; the error gives the reason.
    """
    if dtype not in _DTYPES:
        raise ConfigError("dtype", dtype, "is not a type to compute in", f"give one of {', '.join(_DTYPES)}")
    _check_device(device)
    place = Path(path).absolute()
    files = _weight_files(place)
    with _quiet():
        config = _config(place)
        model = _without_weights(place, config)
        kv = _probe(place, model, config)
        weight_bytes = sum(each.numel() for each in model.parameters()) * _DTYPES[dtype].itemsize
        units = _max_shards(place, model, config, kv)
        eos_token_ids = _eos_token_ids(place, config)
    text = config.get_text_config()
    context_tokens = getattr(text, "max_position_embeddings", None)
    if not isinstance(context_tokens, int):
        raise _refusal(place, "does not state its maximum positions", "give its config max_position_embeddings")
    return ModelSpec(
        path=str(place),
        dtype=dtype,
        device=device,
        kv=kv,
        tokens=TokenSpec(vocab_size=text.vocab_size, context_tokens=context_tokens, eos_token_ids=eos_token_ids),
        weight_bytes=weight_bytes,
        max_tp_size=units,
        identity=_identity(config, files),
    )


def load_model(spec: ModelSpec) -> PreTrainedModel:
    """Load an inspected model with paged attention, in evaluation mode, on its device.

    Raises:
        ConfigError: weights are missing, have other shapes, or cannot be read.
    """
    place = Path(spec.path)
    register_paged_attention()
    with _quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **_source(place),
                dtype=_DTYPES[spec.dtype],
                attn_implementation=PAGED_ATTENTION,
                use_safetensors=place.is_dir(),
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:
            raise _refusal(place, f"cannot be loaded ({first_line(error)})", _WHAT_LOADS) from error
    model, report = loaded  # the annotation of from_pretrained omits the report
    lacking = sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"])))
    if lacking:
        problem = f"lacks {len(lacking)} of its weights, or has them in other shapes ({lacking[0]} first)"
        raise _refusal(place, problem, "give the whole model")
    try:
        served: PreTrainedModel = model.to(spec.device).eval().requires_grad_(False)
    except RuntimeError as error:
        raise ConfigError(
            "device", spec.device, f"has no room ({first_line(error)})", "give a smaller model"
        ) from error
    _compare_with_own_attention(place, served, spec)
    return served


@torch.inference_mode()
def _compare_with_own_attention(place: Path, model: PreTrainedModel, spec: ModelSpec) -> None:
    """Compare the logits of two short texts with those of the model's own attention, to detect masks it adds.

    Raises:
        ConfigError: the logits differ or are not finite.
    """
    tokens = [[(7 * at + 3) % spec.tokens.vocab_size for at in range(length)] for length in _CHECKED_TOKENS]
    shape = (len(tokens), max(_CHECKED_TOKENS), spec.kv.kv_heads, spec.kv.head_dim)
    layers = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2 * spec.kv.num_layers)]
    pool = _Layers(keys=layers[: spec.kv.num_layers], values=layers[spec.kv.num_layers :])
    batch, _ = pack_batch(pool, [], [_Text(end=len(each), pages=(page,)) for page, each in enumerate(tokens)])
    paged = model(
        input_ids=torch.tensor([[token for each in tokens for token in each]], device=model.device),
        position_ids=torch.tensor([[at for each in tokens for at in range(len(each))]], device=model.device),
        use_cache=False,
        paged=batch,
    ).logits[0]
    model.set_attn_implementation("eager")
    rows = [model(input_ids=torch.tensor([each], device=model.device), use_cache=False).logits[0] for each in tokens]
    model.set_attn_implementation(PAGED_ATTENTION)
    own = torch.cat(rows).float()
    difference = float((paged.float() - own).norm() / own.norm())
    if math.isnan(difference):
        raise _refusal(place, "returns logits that are not finite", "check its weights and the dtype")
    if difference > _MAX_DIFFERENCE:
        problem = f"cannot be paged: its logits differ by {difference:.0%} from those of its own attention"
        raise _refusal(place, problem, _SERVABLE)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Layers:
    """A small temporary ``KvLayers``."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]


@dataclass(slots=True, kw_only=True, frozen=True)
class _Text:
    """A ``RowSpan`` of a whole text."""

    end: int
    pages: Sequence[int]
    start: int = 0


def _refusal(place: Path, problem: str, hint: str) -> ConfigError:
    return ConfigError("model", str(place), problem, hint)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and the warnings about what this module checks itself.

    transformers still draws a bar for GGUF files. Without a monitor interval, tqdm starts no thread for that bar.
    """
    verbosity, had_bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    watched_s, tqdm.monitor_interval = tqdm.monitor_interval, 0
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        tqdm.monitor_interval = watched_s
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cpu", "cuda"):
        raise ConfigError("device", device, "is not a device to compute on", "give cpu, cuda or cuda:N")
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        problem = f"is not there (torch sees {torch.cuda.device_count()} CUDA devices)"
        raise ConfigError("device", device, problem, "give cpu, or another")


def _weight_files(place: Path) -> list[Path]:
    """Return the weight files in order, after checking their headers."""
    if not place.exists():
        raise _refusal(place, "is not there", _WHAT_LOADS)
    if place.is_file():
        if place.suffix != ".gguf":
            raise _refusal(place, "is neither a folder nor a .gguf file", _WHAT_LOADS)
        return [place]
    if not (place / "config.json").is_file():
        raise _refusal(place, "has no config.json", _WHAT_LOADS)
    names = _indexed(place) if (place / _INDEX).is_file() else sorted(each.name for each in place.glob("*.safetensors"))
    if not names:
        raise _refusal(place, "has no *.safetensors (other files are not read)", "save it by save_pretrained")
    for name in names:
        _check_safetensors(place, name)
    return [place / name for name in names]


def _indexed(place: Path) -> list[str]:
    try:
        return sorted(set(json.loads((place / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _refusal(place, f"has an index that cannot be read ({first_line(error)})", "copy it again") from error


def _check_safetensors(place: Path, name: str) -> None:
    """Check that the header is complete and that the file has the length that it states."""
    if not (place / name).is_file():
        raise _refusal(place, f"lacks {name}, which its index names", "copy it again")
    try:
        with safe_open(place / name, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise _refusal(place, f"has a broken {name} ({first_line(error)})", "copy it again") from error


def _source(place: Path) -> dict[str, str]:
    """Return the arguments by which transformers finds the model."""
    if place.is_dir():
        return {"pretrained_model_name_or_path": str(place)}
    return {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}


def _config(place: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(**_source(place), local_files_only=True)
    except Exception as error:
        raise _refusal(place, f"is no model that transformers knows ({first_line(error)})", _WHAT_LOADS) from error
    return config


def _without_weights(place: Path, config: PretrainedConfig) -> PreTrainedModel:
    """Build the model on the meta device, in bfloat16, which all its operators support."""
    register_paged_attention()
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.bfloat16, attn_implementation=PAGED_ATTENTION
            )
    except KeyError as error:  # of a class that has a table of its own attentions
        raise _refusal(place, "computes attention without transformers' interface for it", _SERVABLE) from error
    except Exception as error:
        problem = f"is no decoder that transformers makes ({first_line(error)})"
        raise _refusal(place, problem, "serve a causal language model") from error
    decoder: PreTrainedModel = model.eval()
    return decoder


@dataclass(slots=True)
class _ShapeProbe:
    """An ``AttentionBackend`` that records the layers that call it and the shapes of their keys."""

    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,  # noqa: ARG002 - the port's
    ) -> torch.Tensor:
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            raise ConfigError("model", "keys and values", "differ in width", "serve a model with equal head sizes")
        self.shapes[layer] = (key.shape[1], key.shape[2])
        return torch.empty_like(query)


def _probe(place: Path, model: PreTrainedModel, config: PretrainedConfig) -> KvShape:
    """Run the model without weights and return the KV shape that reaches attention."""
    probe = _ShapeProbe()
    rows = torch.zeros((1, _PROBED_ROWS), dtype=torch.int64, device="meta")
    try:
        model(input_ids=rows, position_ids=rows, use_cache=False, paged=probe)
    except ConfigError as error:
        raise _refusal(place, f"cannot be paged: {error.value} {error.problem}", _SERVABLE) from error
    except Exception as error:
        raise _refusal(place, f"cannot be paged ({first_line(error)})", _SERVABLE) from error
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise _refusal(place, f"cannot be paged: it has layers of {', '.join(sorted(kinds))}", _SERVABLE)
    if sorted(probe.shapes) != list(range(text.num_hidden_layers)):
        problem = f"cannot be paged: {len(probe.shapes)} of its {text.num_hidden_layers} layers call attention"
        raise _refusal(place, problem, _SERVABLE)
    if len(set(probe.shapes.values())) != 1:
        raise _refusal(place, "cannot be paged: its layers have keys of different shapes", _SERVABLE)
    kv_heads, head_dim = probe.shapes[0]
    return KvShape(num_layers=text.num_hidden_layers, kv_heads=kv_heads, head_dim=head_dim)


def _max_shards(place: Path, model: PreTrainedModel, config: PretrainedConfig, kv: KvShape) -> int:
    """Return the most ranks over which the model can be sharded, after trying it without weights."""
    units = max_tp_size(model, kv)
    if units == 1:
        return 1
    shard_model(model, ShapeOnlyModelParallelGroup(size=units))
    try:
        part = _probe(place, model, config)
    except ConfigError:  # the modules have a fixed number of heads, so the model cannot be sharded
        return 1
    return units if part.kv_heads * units == kv.kv_heads else 1


def _eos_token_ids(place: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Return the end-of-sequence tokens as ``generate`` finds them: generation config first, then model config."""
    found: Any = config.get_text_config().eos_token_id
    if (place / "generation_config.json").is_file():
        try:
            found = GenerationConfig.from_pretrained(place, local_files_only=True).eos_token_id
        except (OSError, ValueError) as error:
            problem = f"has a generation_config.json that cannot be read ({first_line(error)})"
            raise _refusal(place, problem, "repair it or delete it") from error
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def _identity(config: PretrainedConfig, files: list[Path]) -> str:
    """Return a digest of the configuration and of each file's size and evenly spaced samples."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    facts = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for path in files:
        size_bytes = path.stat().st_size
        digest.update(f"{path.name}/{size_bytes}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size_bytes - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
