"""What is known of a model before any process loads it: made by ``torch_model.inspect_model``, sent to every rank."""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

__all__ = ["KvShape", "ModelDtype", "ModelSpec", "TokenSpec"]

ModelDtype: TypeAlias = Literal["float32", "bfloat16"]
_ITEM_BYTES: dict[ModelDtype, int] = {"float32": 4, "bfloat16": 2}


@attrs.frozen(kw_only=True)
class KvShape:
    """Keys and values of one position.

    Attributes:
        num_layers: of the model.
        kv_heads: heads of keys and values in each layer, of the whole model.
        head_dim: numbers per head.
    """

    num_layers: int
    kv_heads: int
    head_dim: int

    @property
    def num_elements(self) -> int:
        """Keys and values, of all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim


@attrs.frozen(kw_only=True)
class TokenSpec:
    """Which tokens, and how many, the model takes.

    Attributes:
        vocab_size: ids are below it; by default all that are u32.
        context_tokens: positions that it was made for; None for any number.
        eos_token_ids: any of them ends an answer, unless its request ignores them.
    """

    vocab_size: int = 2**32
    context_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class ModelSpec:
    """A model that transformers loads and that can be paged.

    Attributes:
        path: a folder with ``config.json`` and ``*.safetensors``, or a ``.gguf`` file; absolute.
        dtype: of weights, keys and values.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        kv: keys and values of one position.
        tokens: what goes in and comes out.
        weight_bytes: of the loaded model, in ``dtype``.
        max_tp_size: each divisor of it is a size of attention-TP: among so many ranks the layers can be cut.
        identity: a digest of configuration and weights: pages of one identity, layout and dtype mean the same.
    """

    path: str
    dtype: ModelDtype = "float32"
    device: str = "cpu"
    kv: KvShape
    tokens: TokenSpec
    weight_bytes: int
    max_tp_size: int = 1
    identity: str

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one position, in all layers."""
        return self.kv.num_elements * _ITEM_BYTES[self.dtype]
