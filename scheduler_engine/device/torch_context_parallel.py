"""Context parallelism of prefills: the ranks divide the rows of each chunk and gather keys and values in each layer.

Every rank has the whole KV pool of its heads, so a prefix hit, a decode and a page transfer need no other rank:

1. Of a chunk's positions each rank computes every ``size``-th one, like SGLang's ``round-robin-split``. Every rank
   computes the last one, which gives the next token, and all decodes.
2. In each layer the ranks sum a tensor with the keys and values of all rows. A rank adds zeros for the rows of others,
   and rank 0 alone adds those rows that every rank computes. All ranks then write the same bits to their pools.
3. Attention reads the pool, so a row sees the rows that other ranks have computed.
4. The ranks use the logits of rank 0. Two ranks have batches of different shapes, and a matrix product may round
   differently in each, so that their own logits could lead to different tokens.

This form moves twice as many bytes as an all-gather, and none of them while the device computes. It is here to be
correct next to tensor parallelism, HiCache and weight updates on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scheduler_engine.device.torch_attention import PagedBatch
from scheduler_engine.device.torch_model_parallel import ModelParallelGroup


def computed_positions(start: int, end: int, group: ModelParallelGroup) -> list[int]:
    """Return the positions from ``start`` to ``end`` that this rank computes, in order. The last is always among them.

    Args:
        start, end: half-open range of at least one position.
        group: the ranks that divide it.
    """
    return [*range(start + (group.rank - start) % group.size, end - 1, group.size), end - 1]


def gather_plan(
    spans: Sequence[range], computed: Sequence[Sequence[int]], group: ModelParallelGroup
) -> tuple[list[int], list[int]]:
    """Return which rows of this rank's forward it gives to the others, and which rows of the whole batch they are.

    Args:
        spans: positions of each chunk, in the order of rows.
        computed: those of them that this rank computes.
        group: the ranks. Rank 0 gives the last row of each chunk, which every rank computes.
    """
    given: list[int] = []
    targets: list[int] = []
    row = first_target = 0
    for span, positions in zip(spans, computed, strict=True):
        num_given = len(positions) if group.rank == 0 else len(positions) - 1
        given += range(row, row + num_given)
        targets += [first_target + position - span.start for position in positions[:num_given]]
        row += len(positions)
        first_target += len(span)
    return given, targets


@dataclass(slots=True, kw_only=True, frozen=True)
class ContextParallelAttention:
    """The ``AttentionBackend`` of one rank's rows.

    Attributes:
        paged: slots of all rows of the batch, and what this rank's rows read.
        group: the ranks that compute the other rows.
        given: rows of this rank whose keys and values it gives to the others.
        targets: the rows of the whole batch in which these belong.
    """

    paged: PagedBatch
    group: ModelParallelGroup
    given: torch.Tensor
    targets: torch.Tensor

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        gathered = key.new_zeros((2, len(self.paged.slots), *key.shape[1:]))
        gathered[0].index_copy_(0, self.targets, key[self.given])
        gathered[1].index_copy_(0, self.targets, value[self.given])
        self.group.all_reduce(gathered)
        self.paged.write(layer, gathered[0], gathered[1])
        return self.paged.read(layer, query, key, value, scaling)


def context_parallel_attention(
    paged: PagedBatch, spans: Sequence[range], computed: Sequence[Sequence[int]], group: ModelParallelGroup
) -> ContextParallelAttention:
    """Return the attention of one rank's rows. The arguments are those of ``gather_plan``."""
    given, targets = gather_plan(spans, computed, group)
    device = paged.slots.device
    return ContextParallelAttention(
        paged=paged,
        group=group,
        given=torch.tensor(given, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
    )


def use_logits_of_first_rank(logits: torch.Tensor, group: ModelParallelGroup) -> None:
    """Replace the logits of each rank by those of rank 0, so that all ranks choose the same tokens."""
    if group.rank:
        logits.zero_()
    group.all_reduce(logits)
