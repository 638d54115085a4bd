"""Compute the attention of a packed batch over a paged KV pool, as transformers' models call it.

transformers' models call a registered function for their attention and pass it the extra arguments of ``forward``.
Any of its models therefore runs over this pool without a change: ``model(input_ids, position_ids=..., paged=batch)``.

A batch is packed: one row per computed position, request after request, decodes first. Only attention pads. Each layer

1. writes the keys and values of the rows to their slots in the pool, then
2. lets each decode read its pages (decodes of similar length share a call) and each prefill chunk read the pages
   before it and itself, causally.

Because of this order a prefix hit costs no computation: a request reads the pages before ``start``.

Invariant: the pool holds finite numbers only, also in slots that were never written. The mask weighs positions behind
the end of a request with 0, and 0 times NaN is NaN. The pool therefore starts as zeros, and ``PagedBatch.zero_rows``
overwrites the rows of a failed request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from scheduler_components import ConfigError

PAGED_ATTENTION = "scheduler_components_paged"
"""The name of ``paged_attention`` in transformers' registry."""

PROBED_ATTENTION = "scheduler_components_probed"
"""The name of ``paged_attention`` with a mask function that refuses masks other than the causal one."""

_ALIKE_PAGES = 16
"""Decodes of up to this many pages share one call. Longer ones share it with decodes of up to twice their pages."""

_CHANGES_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias", "sinks")
"""Arguments by which a model asks for attention other than full causal attention."""


class AttentionBackend(Protocol):
    """Compute the attention of one forward pass, layer by layer."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attend in one layer.

        Args:
            layer: number of the layer.
            query: ``[rows, heads, head_dim]``.
            key, value: ``[rows, kv_heads, head_dim]``.
            scaling: factor of the scores; None for ``head_dim ** -0.5``.

        Returns:
            ``[rows, heads, head_dim]``.
        """
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: AttentionBackend | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Map ``[1, heads, rows, head_dim]`` to ``[1, rows, heads, head_dim]``. transformers' attention modules call it.

    Raises:
        ConfigError: the model asks for attention other than full causal attention.
    """
    hint = "serve a model with full causal attention"
    for name in _CHANGES_ATTENTION:
        if kwargs.get(name) is not None:
            raise ConfigError("model", name, "is an attention argument that paged attention does not support", hint)
    if attention_mask is not None:  # transformers makes none for a name without a mask function
        raise ConfigError("model", "a mask of its own", "is not applied by paged attention", hint)
    if not module.is_causal:
        raise ConfigError("model", "attention to later tokens", "cannot be paged", hint)
    if paged is None:
        raise ConfigError("model", "its attention", "does not receive the arguments of its forward", hint)
    rows = paged.attend(
        module.layer_idx,  # type: ignore[arg-type]  # an int on every attention module of transformers
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
    )
    return rows[None], None


def _refuse_other_masks(*, mask_function: Callable[..., object], **_: object) -> None:
    """Stand in for a mask. transformers passes the function that says which position a position attends to.

    Raises:
        ConfigError: it is not the causal one: a window, chunks, both directions, or more.
    """
    if mask_function is not causal_mask_function:
        hint = "serve a model with full causal attention"
        raise ConfigError("model", "a mask that is not plain causal", "is not applied by paged attention", hint)


def register_paged_attention() -> None:
    """Let transformers load models with ``PAGED_ATTENTION`` and ``PROBED_ATTENTION``. Idempotent."""
    AttentionInterface.register(PAGED_ATTENTION, paged_attention)
    AttentionInterface.register(PROBED_ATTENTION, paged_attention)
    AttentionMaskInterface.register(PROBED_ATTENTION, _refuse_other_masks)


class KvLayers(Protocol):
    """A KV pool: a tensor of keys and one of values per layer, ``[num_pages, page_size, kv_heads, head_dim]``."""

    @property
    def keys(self) -> Sequence[torch.Tensor]: ...

    @property
    def values(self) -> Sequence[torch.Tensor]: ...


class RowSpan(Protocol):
    """Positions ``start`` to ``end`` of one request with the request's pages."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def pages(self) -> Sequence[int]: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class DecodeGroup:
    """Decodes of similar length, which share one call.

    Attributes:
        first_row, end_row: range of their rows in the batch, one row per decode.
        block_table: their pages, flattened: ``[decodes * pages]``. Page 0 pads the shorter ones.
        mask: added to the scores: ``[decodes, 1, 1, positions]``, minus infinity behind the end of each decode.
    """

    first_row: int
    end_row: int
    block_table: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True, kw_only=True, frozen=True)
class PrefillChunk:
    """The new positions of one request.

    Attributes:
        first_row, end_row: range of their rows in the batch.
        pages: pages of all positions up to the end of the chunk.
        mask: added to the scores, ``[rows, positions]``; None for a whole chunk at the start of its request.
    """

    first_row: int
    end_row: int
    pages: torch.Tensor
    mask: torch.Tensor | None


@dataclass(slots=True, kw_only=True, frozen=True)
class PagedBatch:
    """The ``AttentionBackend`` of one forward pass over a pool. ``pack_batch`` makes it.

    Attributes:
        pool: the KV layers.
        slots: slot of the key and value of each row: page times page size plus offset. If several ranks divide the
            rows, it has all of them.
        decodes, prefills: the rows that this rank computes and the pages that they read.
    """

    pool: KvLayers
    slots: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        self.write(layer, key, value)
        return self.read(layer, query, key, value, scaling)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the key and value of each row of ``slots`` to the pool."""
        self.pool.keys[layer].flatten(0, 1).index_copy_(0, self.slots, key)
        self.pool.values[layer].flatten(0, 1).index_copy_(0, self.slots, value)

    def read(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attend like ``attend``, after the keys and values were written."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self.decodes:
            rows = slice(group.first_row, group.end_row)
            out[rows] = _decode(group, query[rows], keys, values, scaling)
        for chunk in self.prefills:
            rows = slice(chunk.first_row, chunk.end_row)
            out[rows] = _prefill(chunk, query[rows], key[rows], value[rows], (keys, values), scaling)
        return out

    def zero_rows(self, first_row: int, end_row: int) -> None:
        """Overwrite the slots of these rows with zeros in every layer."""
        slots = self.slots[first_row:end_row]
        for layer in (*self.pool.keys, *self.pool.values):
            layer.flatten(0, 1).index_fill_(0, slots, 0.0)


def _decode(
    group: DecodeGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Return ``[decodes, heads, head_dim]``. Query heads that share a KV head become rows, so no key is repeated."""
    num_decodes, num_heads, head_dim = query.shape
    kv_heads = keys.shape[2]

    def read(pool: torch.Tensor) -> torch.Tensor:
        pages = pool.index_select(0, group.block_table)
        return pages.view(num_decodes, -1, kv_heads, head_dim).transpose(1, 2)

    folded = query.reshape(num_decodes, kv_heads, num_heads // kv_heads, head_dim)
    out = scaled_dot_product_attention(folded, read(keys), read(values), attn_mask=group.mask, scale=scaling)
    return out.reshape(num_decodes, num_heads, head_dim)


def _prefill(
    chunk: PrefillChunk,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Return ``[rows, heads, head_dim]``. Without a prefix, the keys of the chunk are not read back from the pool."""
    if chunk.mask is not None:
        num_positions = chunk.mask.shape[1]
        key, value = (each.index_select(0, chunk.pages).flatten(0, 1)[:num_positions] for each in pool)
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def pack_batch(
    pool: KvLayers,
    decodes: Sequence[RowSpan],
    prefills: Sequence[RowSpan],
    computed: Sequence[Sequence[int]] | None = None,
) -> tuple[PagedBatch, list[int]]:
    """Pack a batch: decodes, sorted by length, then prefills in the given order.

    Args:
        pool: the KV layers.
        decodes: spans of one position.
        prefills: spans of any length.
        computed: positions of each prefill that this rank computes; None for all.

    Returns:
        The batch, and the order of the decodes: row ``i`` is ``decodes[order[i]]``.
    """
    page_size, device = pool.keys[0].shape[1], pool.keys[0].device
    order = sorted(range(len(decodes)), key=lambda place: decodes[place].end)
    slots = [_slot(decodes[place].pages, decodes[place].end - 1, page_size) for place in order]
    chunks = []
    first_row = len(slots)
    for place, span in enumerate(prefills):
        chunks.append(_chunk(span, first_row, pool, computed[place] if computed else None))
        first_row = chunks[-1].end_row
        slots += [_slot(span.pages, position, page_size) for position in range(span.start, span.end)]
    return (
        PagedBatch(
            pool=pool,
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            decodes=tuple(_groups([decodes[place] for place in order], pool)),
            prefills=tuple(chunks),
        ),
        order,
    )


def _slot(pages: Sequence[int], position: int, page_size: int) -> int:
    return pages[position // page_size] * page_size + position % page_size


def _num_pages(span: RowSpan, page_size: int) -> int:
    return -(-span.end // page_size)


def _groups(decodes: Sequence[RowSpan], pool: KvLayers) -> list[DecodeGroup]:
    """Group decodes, shortest first. A decode with over twice the pages of its group's first starts a new group."""
    page_size = pool.keys[0].shape[1]
    groups: list[DecodeGroup] = []
    first = 0
    while first < len(decodes):
        most_pages = max(_ALIKE_PAGES, 2 * _num_pages(decodes[first], page_size))
        end = first
        while end < len(decodes) and _num_pages(decodes[end], page_size) <= most_pages:
            end += 1
        groups.append(_group(decodes[first:end], first, pool))
        first = end
    return groups


def _group(decodes: Sequence[RowSpan], first_row: int, pool: KvLayers) -> DecodeGroup:
    keys = pool.keys[0]
    page_size = keys.shape[1]
    num_pages = _num_pages(decodes[-1], page_size)
    table = [0] * (len(decodes) * num_pages)
    for place, span in enumerate(decodes):
        needed = _num_pages(span, page_size)
        table[place * num_pages : place * num_pages + needed] = span.pages[:needed]
    ends = torch.tensor([span.end for span in decodes], device=keys.device)
    hidden = torch.arange(num_pages * page_size, device=keys.device) >= ends[:, None]
    mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
    return DecodeGroup(
        first_row=first_row,
        end_row=first_row + len(decodes),
        block_table=torch.tensor(table, dtype=torch.int64, device=keys.device),
        mask=mask[:, None, None],
    )


def _chunk(span: RowSpan, first_row: int, pool: KvLayers, computed: Sequence[int] | None) -> PrefillChunk:
    keys = pool.keys[0]
    pages = torch.tensor(span.pages[: _num_pages(span, keys.shape[1])], dtype=torch.int64, device=keys.device)
    mask = None
    if computed is not None:
        rows = torch.tensor(computed, device=keys.device)
        hidden = torch.arange(span.end, device=keys.device) > rows[:, None]
        mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
    elif span.start:
        shape = (span.end - span.start, span.end)
        mask = torch.full(shape, -torch.inf, dtype=keys.dtype, device=keys.device).triu_(span.start + 1)
    num_rows = span.end - span.start if computed is None else len(computed)
    return PrefillChunk(first_row=first_row, end_row=first_row + num_rows, pages=pages, mask=mask)
