"""Run a transformers model behind the ``Device`` port, over a paged KV pool of torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from scheduler_components.errors import GrammarError
from scheduler_components.ports import LayerDoneCounter, NullLayerDoneCounter
from scheduler_engine.device.device import DeviceOutput, DeviceRequest, ScheduledBatch, ScheduledChunk
from scheduler_engine.device.torch_adapters import AdaptedRows, NullRowAdapters, RowAdapters
from scheduler_engine.device.torch_attention import AttentionBackend, KvLayers, PagedBatch, pack_batch
from scheduler_engine.device.torch_context_parallel import (
    computed_positions,
    context_parallel_attention,
    use_logits_of_first_rank,
)
from scheduler_engine.device.torch_model_parallel import ModelParallelGroup, NullModelParallelGroup
from scheduler_engine.device.torch_sampling import SamplingDraw, choose_tokens, token_logprobs

_NO_NUMBERS = "the model returned logits that are not finite (NaN or infinity); check its weights and dtype"


class _Span:
    """The ``RowSpan`` of a scheduled chunk."""

    __slots__ = ("end", "pages", "start")

    def __init__(self, chunk: ScheduledChunk[DeviceRequest]) -> None:
        self.start, self.end, self.pages = chunk.start, chunk.end, chunk.request.pages


@dataclass(slots=True, kw_only=True, frozen=True)
class _LayerWaitingAttention:
    """An ``AttentionBackend`` that waits before each layer for pages that are still being copied to the device."""

    attention: AttentionBackend
    layer_counter: LayerDoneCounter

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        self.layer_counter.wait_until(layer)
        return self.attention.attend(layer, query, key, value, scaling)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Forward:
    """One batch on the device.

    Attributes:
        chunks: the chunks in the order of their rows.
        places: index of each chunk in the scheduler's batch.
        paged: the packed batch for attention.
        first_rows: first row of each chunk in the batch of all ranks, then the number of its rows.
        logits: logits of each chunk's last row; ``[chunks, vocabulary]``.
    """

    chunks: Sequence[ScheduledChunk[DeviceRequest]]
    places: Sequence[int]
    paged: PagedBatch
    first_rows: Sequence[int]
    logits: torch.Tensor


@dataclass(slots=True, kw_only=True)
class TorchDevice:
    """Compute batches with ``model`` and keep their keys and values in ``pool``.

    Prompt chunks and decodes share one forward pass with one row per position. A chunk reads the pages before its
    ``start`` (a cached prefix, earlier chunks, earlier tokens of a decode) and does not compute them.

    The device computes logits for the last position of each chunk only. A chunk with logits that are not finite fails
    alone, and the device overwrites its rows with zeros. This includes a chunk inside a prompt, because its last row
    has read everything before it.

    The grammar of a request masks its logits before the next token is chosen, greedily or by a draw. Each rank of a
    replica computes the masks itself, from the same tokens.

    On a CPU ``launch`` keeps the batch and ``wait`` computes it on the same thread, so that events are sent first. On
    CUDA ``launch`` queues the kernels and ``wait`` reads their results.

    Attributes:
        model: loaded with ``torch_attention.PAGED_ATTENTION``, in evaluation mode.
        pool: KV layers of the model, on its device and of its dtype, initially zeros.
        layer_counter: the device waits on it, layer by layer, for pages from the host.
        context: the ranks that divide the rows of prefills; by default this rank computes all of them.
        adapters: apply the adapters of the requests to their rows.
    """

    model: PreTrainedModel = field(repr=False)
    pool: KvLayers = field(repr=False)
    layer_counter: LayerDoneCounter = field(default_factory=NullLayerDoneCounter)
    context: ModelParallelGroup = field(default_factory=NullModelParallelGroup, repr=False)
    adapters: RowAdapters = field(default_factory=NullRowAdapters, repr=False)
    _batch: ScheduledBatch[DeviceRequest] = field(default_factory=ScheduledBatch, init=False, repr=False)
    _forward: _Forward | None = field(default=None, init=False, repr=False)

    def launch(self, batch: ScheduledBatch[DeviceRequest]) -> None:
        self._batch, self._forward = batch, None
        self.layer_counter.start_batch()
        if batch.chunks and self.model.device.type != "cpu":
            self._forward = self._compute(batch)

    def wait(self) -> DeviceOutput:
        """Return the output of the launched batch.

        Raises:
            RuntimeError: torch failed, for example because memory ran out.
        """
        if not self._batch.chunks:
            return DeviceOutput()
        return _output(self._forward or self._compute(self._batch))

    @torch.inference_mode()
    def _compute(self, batch: ScheduledBatch[DeviceRequest]) -> _Forward:
        chunks = batch.chunks
        decodes = [place for place, chunk in enumerate(chunks) if chunk.num_tokens == 1]
        prefills = [place for place, chunk in enumerate(chunks) if chunk.num_tokens > 1]
        computed = [computed_positions(chunk.start, chunk.end, self.context) for chunk in chunks]
        paged, order = pack_batch(
            self.pool,
            [_Span(chunks[place]) for place in decodes],
            [_Span(chunks[place]) for place in prefills],
            [computed[place] for place in prefills] if self.context.size > 1 else None,
        )
        places = [decodes[each] for each in order] + prefills
        laid_out = [chunks[place] for place in places]
        first_rows, last_rows = [0], []
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[AdaptedRows] = []
        for place in places:
            request = chunks[place].request
            positions += computed[place]
            rows.append(AdaptedRows(request.lora_id, len(tokens), len(positions)))
            tokens += [request.token_ids[position] for position in computed[place]]
            first_rows.append(first_rows[-1] + chunks[place].num_tokens)
            last_rows.append(len(tokens) - 1)
        attention: AttentionBackend = paged
        if self.context.size > 1:
            spans = [range(chunk.start, chunk.end) for chunk in laid_out]
            attention = context_parallel_attention(paged, spans, [computed[place] for place in places], self.context)
        self.adapters.start_batch(rows)
        device = self.model.device
        logits = self.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(last_rows, device=device),
            paged=_LayerWaitingAttention(attention=attention, layer_counter=self.layer_counter),
        ).logits[0]
        use_logits_of_first_rank(logits, self.context)
        return _Forward(chunks=laid_out, places=places, paged=paged, first_rows=first_rows, logits=logits)


@torch.inference_mode()
def _output(forward: _Forward) -> DeviceOutput:
    draws = [SamplingDraw(chunk.request.sampling, chunk.request.rid, chunk.end) for chunk in forward.chunks]
    bitmasks, problems = _bitmasks(forward)
    tokens, broken = choose_tokens(forward.logits, draws, bitmasks)
    for row in broken:
        forward.paged.zero_rows(forward.first_rows[row], forward.first_rows[row + 1])
    token_ids = [0] * len(tokens)
    logprobs = {}
    for row, (place, chunk) in enumerate(zip(forward.places, forward.chunks, strict=True)):
        token_ids[place] = tokens[row]
        num_top = chunk.request.sampling.logprobs
        if num_top is not None and row not in broken and chunk.end == len(chunk.request.token_ids):
            logprobs[place] = token_logprobs(forward.logits[row], tokens[row], num_top)
    problems |= dict.fromkeys(broken, _NO_NUMBERS)
    return DeviceOutput(tuple(token_ids), {forward.places[row]: each for row, each in problems.items()}, logprobs)


def _bitmasks(forward: _Forward) -> tuple[dict[int, bytes], dict[int, str]]:
    """Return the bitmask of each row that ends its request's tokens and has a grammar, and the problems of others."""
    bitmasks, problems = {}, {}
    for row, chunk in enumerate(forward.chunks):
        grammar, token_ids = chunk.request.grammar, chunk.request.token_ids
        if grammar is None or chunk.end < len(token_ids):
            continue
        try:
            bitmasks[row] = grammar.next_bitmask(token_ids)
        except GrammarError as error:
            problems[row] = str(error)
    return bitmasks, problems
