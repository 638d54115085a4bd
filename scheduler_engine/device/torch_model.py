"""Check and load a transformers model.

``inspect_model`` reads configuration and file headers and builds the model without weights. It finds out whether the
attention of every layer goes through transformers' interface, and with which shapes; no list of model types could say
that. A model that cannot be served is therefore refused in one sentence before any process loads it.
"""

from __future__ import annotations

import json
import logging
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
from scheduler_engine.device.file_model_digest import DigestMemory, digest_files
from scheduler_engine.device.model_spec import KvShape, ModelDtype, ModelSpec, TokenSpec
from scheduler_engine.device.torch_attention import (
    PAGED_ATTENTION,
    PROBED_ATTENTION,
    pack_batch,
    register_paged_attention,
)
from scheduler_engine.device.torch_tensor_parallel import (
    ShapeOnlyModelParallelGroup,
    max_tp_size,
    shard_model,
)

TESTED_MODEL_TYPES = frozenset({
    "apertus", "arcee", "aria_text", "biogpt", "bitnet", "cohere", "ctrl", "dots1", "ernie4_5", "ernie4_5_moe",
    "flex_olmo", "fuyu", "gemma", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "granite",
    "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax",
    "internlm3", "iquestcoder", "jais2", "llama", "mellum", "minimax_m2", "minimax_m3_vl_text",
    "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3",
    "phimoe", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2",
})  # fmt: skip
"""transformers' names of the model types whose answers over pages the tests compare with ``generate``."""

logger = logging.getLogger(__name__)

_DTYPES: Mapping[ModelDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WHAT_LOADS = "name a folder with config.json and *.safetensors, or a .gguf file"
_INDEX = "model.safetensors.index.json"
_SERVABLE = "serve a model with full causal attention in each layer"
_PROBED_ROWS = 3
_CHECKED_PAGE_SIZE = 4
_CHECKED_FORWARDS = (((0, 5), (0, 3)), ((5, 8), (3, 4)), ((8, 9), (4, 6)))
"""Positions of two texts in three forwards: chunks of two requests, a chunk and a decode behind cached pages."""
_MAX_DIFFERENCE = 0.1  # relative norm of the difference; rounding in bfloat16 causes 0.01, a wrong mask about 1
_DIGEST_BYTES = 16
_MAX_LAYERS, _MAX_POSITIONS = 1_000, 1 << 27
_ROPE_OF_THE_BATCH = frozenset({"dynamic", "longrope"})
"""Kinds of rotary embedding whose factors depend on the longest position of a forward, which requests share."""
_NO_COMPUTATION = frozenset({"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"})
"""Fields that say how a configuration was written, or in which type weights were stored."""
_WINDOWS = frozenset({"sliding_window", "attention_window", "window_size", "local_window_size", "attention_chunk_size"})
"""Fields of a configuration that limit how far back a position attends."""


def inspect_model(
    path: str | Path,
    *,
    dtype: ModelDtype = "float32",
    device: str = "cpu",
    digests: DigestMemory | None = None,
    allow_untested: bool = False,
) -> ModelSpec:
    """Describe a model that can be served, without loading its weights. All of their bytes are hashed.

    Args:
        path: a folder with ``config.json`` and ``*.safetensors``, or a ``.gguf`` file.
        dtype: type of weights, keys and values.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        digests: remembers the digests of weight files that stay; None hashes them each time.
        allow_untested: also describe a model whose type is not in ``TESTED_MODEL_TYPES``.

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
        _check_config(place, config, allow_untested=allow_untested)
        model = _without_weights(place, config)
        kv = _probe(place, model, config)
        weight_bytes = sum(each.numel() for each in model.parameters()) * _DTYPES[dtype].itemsize
        units = _max_shards(place, model, config, kv)
        eos_token_ids = _eos_token_ids(place, config)
    text = config.get_text_config()
    return ModelSpec(
        path=str(place),
        dtype=dtype,
        device=device,
        kv=kv,
        tokens=TokenSpec(
            vocab_size=text.vocab_size, context_tokens=text.max_position_embeddings, eos_token_ids=eos_token_ids
        ),
        weight_bytes=weight_bytes,
        max_tp_size=units,
        config_digest=_config_digest(config).hex(),
        identity=_identity(config, digest_files(files, digests)),
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
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:
            logger.info("transformers cannot load %s", place, exc_info=error)
            raise _refusal(place, "has weights that transformers cannot load", "copy it again") from error
    model, report = loaded  # the annotation of from_pretrained omits the report
    lacking = sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"])))
    if lacking:
        problem = f"lacks {len(lacking)} of its weights, or has them in other shapes ({lacking[0]} first)"
        raise _refusal(place, problem, "give the whole model")
    if unused := sorted(map(str, report["unexpected_keys"])):
        problem = f"has {len(unused)} weights that its configuration does not use ({unused[0]} first)"
        raise _refusal(place, problem, "give the configuration of these weights")
    try:
        served: PreTrainedModel = model.to(spec.device).eval().requires_grad_(False)
    except RuntimeError as error:
        problem = f"has no room for the {spec.weight_bytes / 1e9:.1f} GB of this model"
        raise ConfigError("device", spec.device, problem, "give a smaller model") from error
    _compare_with_own_attention(place, served, spec)
    return served


@torch.inference_mode()
def _compare_with_own_attention(place: Path, model: PreTrainedModel, spec: ModelSpec) -> None:
    """Compare the logits of two short texts with those of the model's own attention.

    Their positions are computed in chunks and decodes behind cached pages, so a model that attends otherwise than over
    the pool is found.

    Raises:
        ConfigError: the logits differ or are not finite.
    """
    lengths = [max(end for _, end in spans) for spans in zip(*_CHECKED_FORWARDS, strict=True)]
    texts = [[(7 * at + 3) % spec.tokens.vocab_size for at in range(length)] for length in lengths]
    num_pages = -(-max(lengths) // _CHECKED_PAGE_SIZE)
    shape = (len(texts) * num_pages, _CHECKED_PAGE_SIZE, spec.kv.kv_heads, spec.kv.head_dim)
    layers = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2 * spec.kv.num_layers)]
    pool = _Layers(keys=layers[: spec.kv.num_layers], values=layers[spec.kv.num_layers :])
    paged: list[list[torch.Tensor]] = [[] for _ in texts]
    for forward in _CHECKED_FORWARDS:
        spans = [
            _Text(start=start, end=end, pages=range(text * num_pages, (text + 1) * num_pages))
            for text, (start, end) in enumerate(forward)
        ]
        for text, logits in _paged_logits(model, pool, spans, texts):
            paged[text].append(logits)
    model.set_attn_implementation("eager")
    own = [model(input_ids=torch.tensor([each], device=model.device), use_cache=False).logits[0] for each in texts]
    model.set_attn_implementation(PAGED_ATTENTION)
    expected, found = torch.cat(own).float(), torch.cat([rows for each in paged for rows in each]).float()
    difference = float((found - expected).norm() / expected.norm())
    if math.isnan(difference):
        raise _refusal(place, "returns logits that are not finite", "check its weights and the dtype")
    if difference > _MAX_DIFFERENCE:
        problem = f"cannot be paged: its logits differ by {difference:.0%} from those of its own attention"
        raise _refusal(place, problem, _SERVABLE)


def _paged_logits(
    model: PreTrainedModel, pool: _Layers, spans: Sequence[_Text], texts: Sequence[Sequence[int]]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Compute one span of each text in one forward, decodes first. Yield each text's number and its rows of logits."""
    decodes = [text for text, span in enumerate(spans) if span.end - span.start == 1]
    prefills = [text for text in range(len(spans)) if text not in decodes]
    batch, order = pack_batch(pool, [spans[text] for text in decodes], [spans[text] for text in prefills])
    laid_out = [decodes[place] for place in order] + prefills
    rows = [(texts[text][at], at) for text in laid_out for at in range(spans[text].start, spans[text].end)]
    tokens, positions = zip(*rows, strict=True)
    logits = model(
        input_ids=torch.tensor([tokens], device=model.device),
        position_ids=torch.tensor([positions], device=model.device),
        use_cache=False,
        paged=batch,
    ).logits[0]
    lengths = [spans[text].end - spans[text].start for text in laid_out]
    yield from zip(laid_out, logits.split(lengths), strict=True)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Layers:
    """A small temporary ``KvLayers``."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]


@dataclass(slots=True, kw_only=True, frozen=True)
class _Text:
    """A ``RowSpan`` of a text."""

    start: int
    end: int
    pages: Sequence[int]


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
        config: PretrainedConfig = AutoConfig.from_pretrained(
            **_source(place), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        logger.info("transformers does not know %s", place, exc_info=error)
        problem = "is no model that transformers knows, or has a configuration that it refuses"
        raise _refusal(place, problem, _WHAT_LOADS) from error
    return config


def _check_config(place: Path, config: PretrainedConfig, *, allow_untested: bool) -> None:
    """Check what a configuration says about sizes, positions and windows, before a model is built from it."""
    text = config.get_text_config()
    if not allow_untested and config.model_type not in TESTED_MODEL_TYPES:
        problem = f"is of type {config.model_type!r}, which was never compared with its own attention here"
        raise _refusal(place, problem, "compare its answers with transformers', then add --allow-untested-model")
    for name, most in (("num_hidden_layers", _MAX_LAYERS), ("max_position_embeddings", _MAX_POSITIONS)):
        size = getattr(text, name, None)
        if not isinstance(size, int) or not 1 <= size <= most:
            raise _refusal(place, f"has {name}={size!r} in its configuration", f"give it 1 to {most}")
    for name, value in _fields_of(text.to_dict()):
        if name in ("rope_type", "type") and value in _ROPE_OF_THE_BATCH:
            problem = f"has {name}={value!r}: its positions depend on the longest request of a batch"
            raise _refusal(place, problem, "serve a model whose positions depend on their own request")
        if name in _WINDOWS and isinstance(value, int) and 0 < value < text.max_position_embeddings:
            raise _refusal(place, f"has {name}={value} below its {text.max_position_embeddings} positions", _SERVABLE)


def _fields_of(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each field of a configuration, also of the mappings in it."""
    for name, value in facts.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _fields_of({str(key): each for key, each in value.items()})


def _without_weights(place: Path, config: PretrainedConfig) -> PreTrainedModel:
    """Build the model on the meta device, in bfloat16, which all its operators support."""
    register_paged_attention()
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.bfloat16, attn_implementation=PROBED_ATTENTION, trust_remote_code=False
            )
    except KeyError as error:  # of a class that has a table of its own attentions
        raise _refusal(place, "computes attention without transformers' interface for it", _SERVABLE) from error
    except Exception as error:
        logger.info("transformers cannot build %s", place, exc_info=error)
        problem = "has a configuration from which transformers builds no decoder"
        raise _refusal(place, problem, "serve a causal language model, and compare its config.json") from error
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
        scaling: float | None,
    ) -> torch.Tensor:
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            raise ConfigError("model", "keys and values", "differ in width", "serve a model with equal head sizes")
        if layer in self.shapes:
            raise ConfigError(
                "model", f"layer {layer}", "calls attention twice", "serve a model with one call per layer"
            )
        self.shapes[layer] = (key.shape[1], key.shape[2])
        return torch.empty_like(query)


def _probe(place: Path, model: PreTrainedModel, config: PretrainedConfig) -> KvShape:
    """Run the model without weights and return the KV shape that reaches attention."""
    probe = _ShapeProbe()
    rows = torch.zeros((1, _PROBED_ROWS), dtype=torch.int64, device="meta")
    try:
        # With a mask of ones transformers does not search the positions, which have no values here, for texts.
        model(input_ids=rows, position_ids=rows, attention_mask=rows + 1, use_cache=False, paged=probe)
    except ConfigError as error:
        raise _refusal(place, f"cannot be paged: {error.value} {error.problem}", _SERVABLE) from error
    except Exception as error:
        logger.info("%s cannot be computed over pages", place, exc_info=error)
        raise _refusal(place, "cannot be paged: its forward fails without a cache of its own", _SERVABLE) from error
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
            found = GenerationConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False).eos_token_id
        except (OSError, ValueError) as error:
            problem = f"has a generation_config.json that cannot be read ({first_line(error)})"
            raise _refusal(place, problem, "repair it or delete it") from error
    if found is None:
        return ()
    tokens = tuple(found) if isinstance(found, list | tuple) else (found,)
    vocab_size = config.get_text_config().vocab_size
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise _refusal(place, f"has eos_token_id={token!r}", f"give token ids from 0 to {vocab_size - 1}")
    return tokens


def _config_digest(config: PretrainedConfig) -> bytes:
    """Return a digest of all that the configuration says about the computation."""
    facts = {name: value for name, value in config.to_diff_dict().items() if name not in _NO_COMPUTATION}
    return blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=_DIGEST_BYTES).digest()


def _identity(config: PretrainedConfig, files: Sequence[bytes]) -> str:
    """Return a digest of the configuration and of the digests of the weight files, in their order."""
    digest = blake2b(_config_digest(config), digest_size=_DIGEST_BYTES)
    for each in files:
        digest.update(each)
    return digest.hexdigest()
