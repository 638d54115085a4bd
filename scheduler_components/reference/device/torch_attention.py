"""Attention of a packed batch over a paged KV pool, as transformers' models call it.

transformers' models ask a registered function for their attention and hand it whatever else ``forward`` was given. So
each of them runs over this pool without a line of its own: ``model(input_ids, position_ids=..., paged=batch)``.

A batch is packed: one row per computed position, of all requests one after another, decodes first. Nothing is padded
outside of attention. In each layer

1. the rows' keys and values go to their slots in the pool, then
2. each decode reads its pages, all decodes of like length together; and each prefill chunk reads the pages before it
   and itself, causally.

The order makes a prefix hit what it is: pages before ``start`` are read and never computed.

Invariant: the pool holds numbers, never NaN or infinity, also where nobody has written. Positions behind a request's
end are masked, which weighs them with 0, and 0 times NaN is NaN. So the pool begins as zeros, and what a failed work
wrote is wiped (``PagedBatch.zero_rows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from scheduler_components import ConfigError

__all__ = [
    "PAGED_ATTENTION",
    "AttentionBackend",
    "DecodeGroup",
    "KvLayers",
    "PagedBatch",
    "PrefillChunk",
    "RowSpan",
    "pack_batch",
    "paged_attention",
    "register_paged_attention",
]

PAGED_ATTENTION = "scheduler_components_paged"
"""The name of ``paged_attention`` in transformers' registry."""

_ALIKE_PAGES = 16
"""Decodes of up to so many pages share one call, however their lengths differ; beyond, of up to twice as many."""

_CHANGES_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias", "sinks")
"""Arguments by which a model asks for another attention than this one computes."""


class AttentionBackend(Protocol):
    """What computes attention, layer by layer, in one forward."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attend in one layer.

        Args:
            layer: number of the layer.
            query: ``[rows, heads, head_dim]``.
            key, value: ``[rows, kv_heads, head_dim]``.
            scaling: of the scores; None for one over the root of ``head_dim``.

        Returns:
            ``[rows, heads, head_dim]``.
        """
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature; made for no registered name
    *,
    paged: AttentionBackend | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention modules call: ``[1, heads, rows, head_dim]`` in, ``[1, rows, heads, head_dim]`` out.

    Raises:
        ConfigError: the model asks for an attention that is not computed here.
    """
    hint = "serve a model with full causal attention"
    for name in _CHANGES_ATTENTION:
        if kwargs.get(name) is not None:
            raise ConfigError("model", name, "is an attention that cannot be paged here", hint)
    if not module.is_causal:
        raise ConfigError("model", "attention to later tokens", "cannot be paged", hint)
    if paged is None:
        raise ConfigError("model", "its attention", "is not handed what its forward was given", hint)
    rows = paged.attend(
        module.layer_idx,  # type: ignore[arg-type]  # an int on every attention module of transformers
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
    )
    return rows[None], None


def register_paged_attention() -> None:
    """Let models be loaded with ``attn_implementation=PAGED_ATTENTION``; once is enough, more does no harm."""
    AttentionInterface.register(PAGED_ATTENTION, paged_attention)


class KvLayers(Protocol):
    """A KV pool: per layer one tensor of keys and one of values, ``[num_pages, page_size, kv_heads, head_dim]``."""

    @property
    def keys(self) -> Sequence[torch.Tensor]: ...

    @property
    def values(self) -> Sequence[torch.Tensor]: ...


class RowSpan(Protocol):
    """Positions ``start`` to ``end`` of one request, on its pages: ``ScheduledChunk`` and its request as one."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def pages(self) -> Sequence[int]: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class DecodeGroup:
    """Decodes of like length, which share one call.

    Attributes:
        first_row, end_row: their rows in the batch, one each.
        block_table: their pages, all in one line: ``[decodes * pages]``; short ones are filled up with page 0.
        mask: what is added to the scores: ``[decodes, 1, 1, positions]``, minus infinity behind each one's end.
    """

    first_row: int
    end_row: int
    block_table: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True, kw_only=True, frozen=True)
class PrefillChunk:
    """One request's new positions.

    Attributes:
        first_row, end_row: their rows in the batch.
        pages: that hold all positions up to the chunk's end.
        mask: what is added to the scores, ``[rows, positions]``; None where nothing comes before the chunk.
    """

    first_row: int
    end_row: int
    pages: torch.Tensor
    mask: torch.Tensor | None


@dataclass(slots=True, kw_only=True, frozen=True)
class PagedBatch:
    """``AttentionBackend`` over a pool, for one forward. Made by ``pack_batch``.

    Attributes:
        pool: the layers.
        slots: where each row's key and value go: page times page size plus offset.
        decodes, prefills: who attends to what.
    """

    pool: KvLayers
    slots: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.flatten(0, 1).index_copy_(0, self.slots, key)
        values.flatten(0, 1).index_copy_(0, self.slots, value)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self.decodes:
            rows = slice(group.first_row, group.end_row)
            out[rows] = _decode(group, query[rows], keys, values, scaling)
        for chunk in self.prefills:
            rows = slice(chunk.first_row, chunk.end_row)
            out[rows] = _prefill(chunk, query[rows], key[rows], value[rows], (keys, values), scaling)
        return out

    def zero_rows(self, first_row: int, end_row: int) -> None:
        """Overwrite what these rows wrote, in every layer, by zeros."""
        slots = self.slots[first_row:end_row]
        for layer in (*self.pool.keys, *self.pool.values):
            layer.flatten(0, 1).index_fill_(0, slots, 0.0)


def _decode(
    group: DecodeGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """``[decodes, heads, head_dim]``. The heads that share a key go as rows of one head: no key is repeated."""
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
    """``[rows, heads, head_dim]``. Keys of the chunk itself need not come back from the pool."""
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


def pack_batch(pool: KvLayers, decodes: Sequence[RowSpan], prefills: Sequence[RowSpan]) -> tuple[PagedBatch, list[int]]:
    """Lay a batch out: decodes, sorted by length, then prefills as given.

    Args:
        pool: where keys and values are.
        decodes: spans of one position.
        prefills: spans of any length.

    Returns:
        The batch, and the order of the decodes' rows: at row ``i`` stands ``decodes[order[i]]``.
    """
    page_size, device = pool.keys[0].shape[1], pool.keys[0].device
    order = sorted(range(len(decodes)), key=lambda place: decodes[place].end)
    slots = [_slot(decodes[place].pages, decodes[place].end - 1, page_size) for place in order]
    chunks = []
    for span in prefills:
        chunks.append(_chunk(span, len(slots), pool))
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
    """Cut decodes, shortest first, where one has more pages than twice those of the first of its group."""
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


def _chunk(span: RowSpan, first_row: int, pool: KvLayers) -> PrefillChunk:
    keys = pool.keys[0]
    num_rows = span.end - span.start
    pages = torch.tensor(span.pages[: _num_pages(span, keys.shape[1])], dtype=torch.int64, device=keys.device)
    mask = None
    if span.start:
        mask = torch.full((num_rows, span.end), -torch.inf, dtype=keys.dtype, device=keys.device).triu_(span.start + 1)
    return PrefillChunk(first_row=first_row, end_row=first_row + num_rows, pages=pages, mask=mask)
