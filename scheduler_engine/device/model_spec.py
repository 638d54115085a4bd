"""Describe a model before any process loads it. ``torch_model.inspect_model`` makes the spec for every rank."""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

ModelDtype: TypeAlias = Literal["float32", "bfloat16"]
_ITEM_BYTES: dict[ModelDtype, int] = {"float32": 4, "bfloat16": 2}


@attrs.frozen(kw_only=True)
class KvShape:
    """The keys and values of one position.

    Attributes:
        num_layers: layers of the model.
        kv_heads: KV heads per layer of the whole model.
        head_dim: elements per head.
    """

    num_layers: int
    kv_heads: int
    head_dim: int

    @property
    def num_elements(self) -> int:
        """Elements of keys and values in all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim


@attrs.frozen(kw_only=True)
class TokenSpec:
    """The tokens that the model accepts.

    Attributes:
        vocab_size: token ids are smaller; by default every u32.
        context_tokens: the model's maximum positions; None for no limit.
        eos_token_ids: each of them ends an answer unless its request ignores them.
    """

    vocab_size: int = 2**32
    context_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class ModelSpec:
    """A model that transformers loads and that can be paged.

    Attributes:
        path: absolute path of a folder with ``config.json`` and ``*.safetensors``, or of a ``.gguf`` file.
        dtype: type of weights, keys and values.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        kv: keys and values of one position.
        tokens: the accepted tokens.
        weight_bytes: size of the loaded model in ``dtype``.
        max_tp_size: the layers can be sharded over any number of attention-TP ranks that divides this number.
        config_digest: a digest of the configuration. Weights of a model with another one compute something else.
        identity: a digest of the configuration and of all bytes of the weights. Pages of equal identity, layout and
            dtype are interchangeable.
    """

    path: str
    dtype: ModelDtype = "float32"
    device: str = "cpu"
    kv: KvShape
    tokens: TokenSpec
    weight_bytes: int
    max_tp_size: int = 1
    config_digest: str = ""
    identity: str

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one position in all layers."""
        return self.kv.num_elements * _ITEM_BYTES[self.dtype]
