"""``TorchDevice``: a transformers model behind the ``Device`` port, over a paged KV pool of torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from scheduler_components.ports import LayerDoneCounter, NullLayerDoneCounter
from scheduler_components.reference.device.device import DeviceOutput, DeviceRequest, ScheduledBatch, ScheduledChunk
from scheduler_components.reference.device.torch_attention import KvLayers, PagedBatch, pack_batch
from scheduler_components.reference.device.torch_sampling import SamplingDraw, choose_tokens, token_logprobs

__all__ = ["TorchDevice"]

_NO_NUMBERS = "the model gave logits that are not numbers (NaN or infinite); look at its weights and dtype"


class _Span:
    """A ``RowSpan`` of a work."""

    __slots__ = ("end", "pages", "start")

    def __init__(self, work: ScheduledChunk[DeviceRequest]) -> None:
        self.start, self.end, self.pages = work.start, work.end, work.request.pages


@dataclass(slots=True, kw_only=True, frozen=True)
class _LayerWaitingAttention:
    """``AttentionBackend`` that wait before each layer for pages that are still on their way."""

    paged: PagedBatch
    layer_counter: LayerDoneCounter

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        self.layer_counter.wait_until(layer)
        return self.paged.attend(layer, query, key, value, scaling)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Forward:
    """One batch on the device.

    Attributes:
        works: in the order of their rows.
        places: of the works, in the scheduler's batch.
        paged: the batch as attention sees it.
        first_rows: of each work, and behind them the number of rows.
        logits: of each work's last row; ``[works, vocabulary]``.
    """

    works: Sequence[ScheduledChunk[DeviceRequest]]
    places: Sequence[int]
    paged: PagedBatch
    first_rows: Sequence[int]
    logits: torch.Tensor


@dataclass(slots=True, kw_only=True)
class TorchDevice:
    """Computes batches with ``model``, whose keys and values live in ``pool``.

    Chunks of prompts and decodes go through the model in one forward, one row per position. What stands in the pages
    before a work's ``start`` is read and not computed: a cached prefix, earlier chunks, the earlier tokens of a decode.

    Logits are computed for each work's last position alone. A work whose logits are not numbers fails by itself, and
    what it wrote is wiped. That holds for a chunk within a prompt too, whose last row has read all that came before.

    On a CPU nothing computes beside this thread: ``launch`` keeps the batch and ``wait`` computes it, so that events go
    out first. On CUDA ``launch`` queues the kernels, and ``wait`` reads what they gave.

    Attributes:
        model: loaded with ``torch_attention.PAGED_ATTENTION``, in evaluation mode.
        pool: as many layers as the model has, on its device, of its dtype, of zeros at first.
        layer_counter: where it waits for pages that come from the host, layer by layer.
    """

    model: PreTrainedModel = field(repr=False)
    pool: KvLayers = field(repr=False)
    layer_counter: LayerDoneCounter = field(default_factory=NullLayerDoneCounter)
    _batch: ScheduledBatch[DeviceRequest] = field(default_factory=ScheduledBatch, init=False, repr=False)
    _forward: _Forward | None = field(default=None, init=False, repr=False)

    def launch(self, batch: ScheduledBatch[DeviceRequest]) -> None:
        self._batch, self._forward = batch, None
        self.layer_counter.start_batch()
        if batch.works and self.model.device.type != "cpu":
            self._forward = self._compute(batch)

    def wait(self) -> DeviceOutput:
        """Return what came out of the batch.

        Raises:
            RuntimeError: of torch, such as memory that ran out.
        """
        if not self._batch.works:
            return DeviceOutput()
        return _output(self._forward or self._compute(self._batch))

    @torch.inference_mode()
    def _compute(self, batch: ScheduledBatch[DeviceRequest]) -> _Forward:
        works = batch.works
        decodes = [place for place, work in enumerate(works) if work.num_tokens == 1]
        prefills = [place for place, work in enumerate(works) if work.num_tokens > 1]
        paged, order = pack_batch(
            self.pool, [_Span(works[place]) for place in decodes], [_Span(works[place]) for place in prefills]
        )
        places = [decodes[each] for each in order] + prefills
        laid_out = [works[place] for place in places]
        first_rows = [0]
        tokens: list[int] = []
        positions: list[int] = []
        for work in laid_out:
            tokens += work.request.token_ids[work.start : work.end]
            positions += range(work.start, work.end)
            first_rows.append(len(tokens))
        device = self.model.device
        last_rows = torch.tensor(first_rows[1:], device=device) - 1
        logits = self.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=last_rows,
            paged=_LayerWaitingAttention(paged=paged, layer_counter=self.layer_counter),
        ).logits[0]
        return _Forward(works=laid_out, places=places, paged=paged, first_rows=first_rows, logits=logits)


@torch.inference_mode()
def _output(forward: _Forward) -> DeviceOutput:
    draws = [SamplingDraw(work.request.sampling, work.request.rid, work.end) for work in forward.works]
    tokens, broken = choose_tokens(forward.logits, draws)
    for row in broken:
        forward.paged.zero_rows(forward.first_rows[row], forward.first_rows[row + 1])
    token_ids = [0] * len(tokens)
    logprobs = {}
    for row, (place, work) in enumerate(zip(forward.places, forward.works, strict=True)):
        token_ids[place] = tokens[row]
        num_top = work.request.sampling.logprobs
        if num_top is not None and row not in broken and work.end == len(work.request.token_ids):
            logprobs[place] = token_logprobs(forward.logits[row], tokens[row], num_top)
    return DeviceOutput(tuple(token_ids), {forward.places[row]: _NO_NUMBERS for row in broken}, logprobs)
