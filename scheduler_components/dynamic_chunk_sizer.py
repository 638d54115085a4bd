"""DynamicChunkSizer: how long the next chunk of a prompt may be, and how soon a first token will come.

A prefill chunk of x tokens behind h tokens attends to (h + x)^2 - h^2 pairs, so chunks of one size take longer and
longer along a prompt, and hold up the decodes beside them and the pipeline stages behind them. A step's time is

    t = base + token * tokens + pair * pairs,        pairs = sum over chunks of (h + x)^2 - h^2

which for a whole prompt (h = 0) is SGLang's quadratic f(l) = a l^2 + b l + c (0.5.23, ``DynamicChunkSizer``). SGLang
profiles synthetic prefills before it serves; here the fit learns from the steps that happen anyway, and forgets.

What is learned comes from a clock, and each rank has its own. Ranks must cut the same chunks, so a fit is never used by
itself: ``DynamicChunkSizer`` goes by the model that it was given (``model``), which is given to all ranks of a replica
before
the same step, for example through ``InternalState``.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from scheduler_components.errors import ConfigError
from scheduler_components.internal_state import StateValue
from scheduler_components.validators import check_integer, check_number

__all__ = ["DynamicChunkSizer", "FirstTokenPredictor", "PrefillLatencyFit", "PrefillLatencyModel"]

_MIN_SAMPLES = 8  # as SGLang's
_PAIRS = 1e6  # pairs are fitted in millions: the three columns have numbers of one size
_LEAST_SHARE = 4  # a chunk is at least this part of the static size, as in SGLang
_NEWEST = 256  # forecasts whose error is remembered
_MAX_EXPECTED = 65_536


class PrefillLatencyModel(msgspec.Struct, frozen=True, gc=False):
    """How long a step with prefill takes: microseconds per step, per token, and per million pairs."""

    base_us: float
    token_us: float
    million_pairs_us: float

    def chunk_us(self, history_tokens: int, tokens: float) -> float:
        """What a chunk adds to its step."""
        return self.token_us * tokens + self.million_pairs_us * (tokens + 2 * history_tokens) * tokens / _PAIRS

    def tokens_in(self, history_tokens: int, budget_us: float) -> float:
        """The chunk behind ``history_tokens`` that adds ``budget_us``: the positive root of a x^2 + b x - budget."""
        a = self.million_pairs_us / _PAIRS
        b = 2 * a * history_tokens + self.token_us
        return 2 * budget_us / (b + math.sqrt(b * b + 4 * a * budget_us))


@dataclass(slots=True, kw_only=True)
class PrefillLatencyFit:
    """Least squares over steps with prefill, in nine sums; older steps weigh less and less.

    Attributes:
        memory_steps: a step so long ago weighs a third of the newest. 512 steps with prefill are some minutes.
        num_steps: observed so far.

    Raises:
        ConfigError: ``memory_steps`` is below 1.
    """

    memory_steps: int = 512
    num_steps: int = field(default=0, init=False)
    _known: tuple[int, PrefillLatencyModel | None] = field(default=(0, None), init=False, repr=False)
    _products: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(3)], init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("memory_steps", self.memory_steps, "is not a number of steps")

    def observe(self, tokens: int, pairs: int, step_s: float) -> None:
        """Learn from one step that prefilled; one that took no time is left out."""
        if step_s <= 0.0 or not math.isfinite(step_s) or tokens <= 0:
            return
        keep = 1.0 - 1.0 / self.memory_steps
        row = (1.0, float(tokens), pairs / _PAIRS)
        seen = (*row, step_s * 1e6)
        for products, factor in zip(self._products, row, strict=True):
            for column, value in enumerate(seen):
                products[column] = products[column] * keep + factor * value
        self.num_steps += 1

    def model(self) -> PrefillLatencyModel | None:
        """Return the model that fits best; None before eight steps, or while all had one shape.

        A time that would be negative is 0, and the others are fitted again without it.
        """
        if self._known[0] != self.num_steps:
            self._known = self.num_steps, self._fitted()
        return self._known[1]

    def _fitted(self) -> PrefillLatencyModel | None:
        if self.num_steps < _MIN_SAMPLES:
            return None
        for columns in ((0, 1, 2), (0, 1), (1, 2), (1,)):
            found = _solve([[self._products[row][column] for column in (*columns, 3)] for row in columns])
            if found is not None and all(value >= 0.0 for value in found):
                by_column = dict(zip(columns, found, strict=True))
                if by_column[1] > 0.0:
                    return PrefillLatencyModel(by_column.get(0, 0.0), by_column[1], by_column.get(2, 0.0))
        return None


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Solve linear equations, one a row with its right side at the end; None where they do not determine the answer."""
    size = len(rows)
    scales = [max(abs(rows[at][at]), 1e-300) for at in range(size)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(rows[row][at]) / scales[row])
        if abs(rows[pivot][at]) <= 1e-9 * scales[pivot]:
            return None
        rows[at], rows[pivot] = rows[pivot], rows[at]
        scales[at], scales[pivot] = scales[pivot], scales[at]
        for row in range(at + 1, size):
            factor = rows[row][at] / rows[at][at]
            rows[row] = [value - factor * above for value, above in zip(rows[row], rows[at], strict=True)]
    found = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][other] * found[other] for other in range(at + 1, size))
        found[at] = (rows[at][size] - known) / rows[at][at]
    return found if all(map(math.isfinite, found)) else None


@dataclass(slots=True, kw_only=True)
class DynamicChunkSizer:
    """Cuts chunks that take equally long, by the model that it was given; without one they are as long as ever.

    A ``StateProvider``: the model can be set, and what this rank's own fit says is shown beside it.

    Attributes:
        page_size: chunks are whole pages.
        smooth: how far a chunk goes from the static size to the one of equal time; 0.75 as in SGLang, since a model
            that is a little off should not cut prompts to pieces.
        fit: learns on this rank; decides nothing.
        model: decides; the same on all ranks of a replica.

    Raises:
        ConfigError: a size is none, or ``smooth`` no share.
    """

    page_size: int = 1
    smooth: float = 0.75
    fit: PrefillLatencyFit = field(default_factory=PrefillLatencyFit)
    model: PrefillLatencyModel | None = None

    def __post_init__(self) -> None:
        check_integer("page_size", self.page_size)
        if not 0.0 <= self.smooth <= 1.0:
            raise ConfigError("smooth", self.smooth, "is not a share", "give a number from 0 to 1")

    def chunk_tokens(self, history_tokens: int, static_tokens: int) -> int:
        """Return the longest chunk behind ``history_tokens``, of which ``static_tokens`` is the size at the beginning.

        Never above the static size, and not below a quarter of it; whole pages where the static size has one.
        """
        model = self.model
        if model is None:
            return static_tokens
        equal = model.tokens_in(history_tokens, model.chunk_us(0, static_tokens))
        tokens = int(static_tokens + self.smooth * (equal - static_tokens))
        tokens = max(tokens, static_tokens // _LEAST_SHARE)
        return min(static_tokens, max(tokens - tokens % self.page_size, self.page_size))

    @property
    def settable(self) -> Collection[str]:
        return _MODEL_NAMES

    def state(self) -> Mapping[str, StateValue]:
        """The model that decides, or None for each of its times, and what was learned here."""
        used, fitted = self.model, self.fit.model()
        return {
            **{name: None if used is None else getattr(used, name.removeprefix("chunk_")) for name in _MODEL_NAMES},
            **{
                name.replace("chunk_", "fitted_"): None if fitted is None else getattr(fitted, name[len("chunk_") :])
                for name in _MODEL_NAMES
            },
            "fitted_steps": self.fit.num_steps,
        }

    def check_state(self, changes: Mapping[str, StateValue]) -> None:
        """All three times are set together, to numbers, or to None for chunks of the static size."""
        given = [changes.get(name) for name in _MODEL_NAMES]
        if missing := sorted(set(_MODEL_NAMES) - changes.keys()):
            raise ConfigError(missing[0], None, "is missing", "set all three times of the model together")
        if given == [None] * len(given):
            return
        for name, value in zip(_MODEL_NAMES, given, strict=True):
            check_number(name, value, "is not a time", or_zero=name != "chunk_token_us")

    def set_state(self, changes: Mapping[str, StateValue]) -> None:
        base, token, pairs = (changes[name] for name in _MODEL_NAMES)
        self.model = None if token is None else PrefillLatencyModel(*map(float, (base or 0, token, pairs or 0)))


_MODEL_NAMES = ("chunk_base_us", "chunk_token_us", "chunk_million_pairs_us")


@dataclass(slots=True, kw_only=True)
class FirstTokenPredictor:
    """Says when a request's first token will come, and how far off such forecasts were.

    Nothing is decided by it: times come from this rank's fit and clock.

    Attributes:
        fit: what is known of steps.
        clock: seconds from any origin.
        num_observed: forecasts whose token came.
    """

    fit: PrefillLatencyFit
    clock: Callable[[], float] = time.monotonic
    num_observed: int = field(default=0, init=False)
    _expected: dict[str, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    _ordered_s: list[float] | None = field(default=None, init=False, repr=False)
    _errors_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST), init=False, repr=False)

    def predict_s(
        self, own_tokens: int, *, tokens_ahead: int, step_tokens: int, history_tokens: int = 0
    ) -> float | None:
        """Seconds until the first token of a request that comes now; None while the fit knows nothing.

        Args:
            own_tokens: to prefill.
            tokens_ahead: to prefill before them: of waiting requests, and of prefills under way.
            step_tokens: prefilled in a step.
            history_tokens: cached before its own.
        """
        model = self.fit.model()
        if model is None:
            return None
        num_steps = max(1, -(-(tokens_ahead + own_tokens) // step_tokens))
        own_us = model.chunk_us(history_tokens, own_tokens)
        return (num_steps * model.base_us + model.token_us * tokens_ahead + own_us) * 1e-6

    def start(self, rid: str, predicted_s: float | None) -> None:
        """Remember a forecast made now; beyond 65,536 of them none is."""
        if predicted_s is not None and len(self._expected) < _MAX_EXPECTED:
            self._expected[rid] = (self.clock(), predicted_s)

    def on_first_token(self, rid: str) -> None:
        """The first token has come."""
        expected = self._expected.pop(rid, None)
        if expected is not None:
            made_s, predicted_s = expected
            self._errors_s.append(abs(self.clock() - made_s - predicted_s))
            self.num_observed += 1
            self._ordered_s = None

    def discard(self, rid: str) -> None:
        """The request is over."""
        self._expected.pop(rid, None)

    def error_s(self, share: float) -> float:
        """The error that ``share`` of the last 256 forecasts did not exceed, 0.5 for the median; 0 before the first."""
        ordered = self._ordered_s
        if ordered is None:
            ordered = self._ordered_s = sorted(self._errors_s)
        return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * share) - 1)] if ordered else 0.0
