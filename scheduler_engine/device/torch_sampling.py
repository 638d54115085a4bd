"""Sample the next token of each row of logits: greedy, or a draw after transformers' own filters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from scheduler_engine.device.sampling import SamplingParams, TokenLogprobs


class SamplingDraw(msgspec.Struct, frozen=True, gc=False):
    """The sampling of one row.

    Attributes:
        sampling: the sampling parameters.
        rid: the seed if ``sampling`` has none.
        position: position of the sampled token.
    """

    sampling: SamplingParams
    rid: str
    position: int


def uniform_sample(draw: SamplingDraw) -> float:
    """Return a number from 0 up to 1 that depends on seed and position only, on every machine."""
    seed = draw.rid if draw.sampling.seed is None else draw.sampling.seed
    digest = blake2b(f"{seed}/{draw.position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose_tokens(
    logits: torch.Tensor, draws: Sequence[SamplingDraw], bitmasks: Mapping[int, bytes] | None = None
) -> tuple[list[int], list[int]]:
    """Choose one token per row.

    Args:
        logits: ``[rows, vocabulary]``, of any float type.
        draws: one per row.
        bitmasks: for each row with a grammar, one bit per token, lowest first: 1 if the token may be chosen.

    Returns:
        The tokens, and the rows with logits that are not finite. Ignore the tokens of these rows.
    """
    logits = _biased(logits, draws)
    best, tokens = logits.max(dim=-1)  # NaN wins a maximum
    if bitmasks:
        logits = _masked(logits, bitmasks)
        allowed_best, tokens = logits.max(dim=-1)
        # A row is broken if its maximum is NaN or infinite before the mask, which hides such a logit, or after it.
        best = torch.where(best.isfinite(), allowed_best, best)
    broken = (~best.isfinite()).nonzero().flatten().tolist()
    by_cut: dict[SamplingParams, list[int]] = defaultdict(list)
    for row, draw in enumerate(draws):
        if not draw.sampling.is_greedy and row not in broken:
            by_cut[msgspec.structs.replace(draw.sampling, **_NO_CUT)].append(row)
    for cut, rows in by_cut.items():
        tokens[rows] = _draw(logits[rows].float(), cut, [uniform_sample(draws[row]) for row in rows])
    return tokens.tolist(), broken


_NO_CUT: Mapping[str, object] = {"seed": None, "logprobs": None, "logit_bias": (), "json_schema": None, "regex": None}
"""What does not differ between rows that are drawn together."""


_BITS = torch.arange(256, dtype=torch.int32)[:, None] >> torch.arange(8, dtype=torch.int32) & 1
_FORBIDDEN = (_BITS == 0).view(torch.int64)[:, 0]
"""Which of eight tokens a byte of a bitmask forbids: eight booleans as one integer, which is faster than shifts."""


def _masked(logits: torch.Tensor, bitmasks: Mapping[int, bytes]) -> torch.Tensor:
    """Return the logits with minus infinity for each token whose bit is 0 or missing. Rows without a bitmask stay."""
    rows, vocab_size = logits.shape
    size = -(-vocab_size // 8)
    packed = bytearray(b"\xff" * (rows * size))
    for row, bitmask in bitmasks.items():
        packed[row * size : (row + 1) * size] = bitmask[:size].ljust(size, b"\0")
    forbidden = _FORBIDDEN[torch.frombuffer(packed, dtype=torch.uint8).int()].view(torch.bool).view(rows, -1)
    return logits.masked_fill(forbidden[:, :vocab_size].to(logits.device), float("-inf"))


def _biased(logits: torch.Tensor, draws: Sequence[SamplingDraw]) -> torch.Tensor:
    """Return the logits with the biases of each row. The given ones stay as they are, for log probabilities."""
    rows = [row for row, draw in enumerate(draws) if draw.sampling.logit_bias]
    if not rows:
        return logits
    logits = logits.clone()
    for row in rows:
        for token, bias in draws[row].sampling.logit_bias:
            logits[row, token] += bias
    return logits


def _draw(logits: torch.Tensor, cut: SamplingParams, uniforms: Sequence[float]) -> torch.Tensor:
    """Draw one token per row: the token at which the running sum of probabilities passes the row's number."""
    candidates = None
    if 0 < cut.top_k < logits.shape[-1]:  # the other filters then sort few tokens instead of all
        logits, candidates = logits.topk(cut.top_k)
    kept = _warpers(cut)(None, logits)  # type: ignore[arg-type]  # these warpers do not read tokens
    sums = kept.softmax(dim=-1).double().cumsum(dim=-1)
    points = torch.tensor(uniforms, dtype=sums.dtype, device=sums.device)[:, None] * sums[:, -1:]
    places = torch.searchsorted(sums, points, right=True).clamp_(max=sums.shape[-1] - 1)
    return (places if candidates is None else candidates.gather(1, places))[:, 0]


def _warpers(cut: SamplingParams) -> LogitsProcessorList:
    """Return the warpers in the order in which transformers' ``generate`` applies them."""
    warpers = LogitsProcessorList()
    if cut.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(cut.temperature)))
    if cut.top_k:
        warpers.append(TopKLogitsWarper(cut.top_k))
    if cut.top_p < 1.0:
        warpers.append(TopPLogitsWarper(float(cut.top_p)))
    if cut.min_p:
        warpers.append(MinPLogitsWarper(float(cut.min_p)))
    return warpers


def token_logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Return the log probabilities of ``token`` and of the ``num_top`` most probable tokens in one row of logits."""
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, logprobs.shape[-1]))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
