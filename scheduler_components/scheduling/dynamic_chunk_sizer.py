"""DynamicChunkSizer: choose the length of the next prefill chunk, and predict the time to first token.

A prefill chunk of x tokens after h tokens attends to (h + x)^2 - h^2 pairs. So chunks of equal size take longer and
longer along a prompt, and delay the decodes in the same step and the later pipeline stages. The time of a step is

    t = base + token * tokens + pair * pairs,        pairs = sum over chunks of (h + x)^2 - h^2

A step may stall, for example because another process takes the core. Such a step says nothing about the next one, so
the fit clips each duration: at most four times the usual error away from its own prediction. If steps really become
slower, the usual error grows with each of them, and the fit follows.

For a whole prompt (h = 0) this is SGLang's quadratic f(l) = a l^2 + b l + c (0.5.23, `DynamicChunkSizer`). SGLang
profiles synthetic prefills before it serves. This fit learns from the steps of real requests and forgets old ones.

Each rank fits with its own clock, but all ranks must cut the same chunks. So a fit is never used directly:
`DynamicChunkSizer` uses the `model` that it was given, and all ranks of a replica get the same model before the same
step, for example through `InternalState`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from scheduler_components._internal.validators import MAX_INTEGER, MAX_TOKENS, check_integer, check_number, check_share
from scheduler_components.errors import ConfigError
from scheduler_components.internal_state import StateValue
from scheduler_components.values import ForwardPassMetrics

__all__ = ["DynamicChunkSizer", "FirstTokenPredictor", "PrefillLatencyFit", "PrefillLatencyModel"]

_MIN_SAMPLES = 8
"""Steps before the first fit, as in SGLang."""

_PAIRS = 1e6
"""Pairs are fitted in millions, so that the three columns have values of similar size."""

_MAX_SHRINK = 4
"""A chunk has at least a quarter of the static size, as in SGLang."""

_CLIP = 4.0
"""Errors beyond four times the usual one are clipped: 2.7 standard deviations of a normal distribution."""

_MIN_CLIP = 0.1
"""A duration within a tenth of its prediction is never clipped."""

_ERROR_GAIN = 1.1
"""Change of the usual error per step, so that it becomes the median."""

_STARTS = (_MIN_SAMPLES, 2 * _MIN_SAMPLES, 4 * _MIN_SAMPLES)
"""Steps at which the first fit is made again over all steps so far: of few samples one outlier is not recognised."""

_REWEIGHTINGS = 12
"""Rounds of the first fit, in which a sample counts the less the more it differs from the fit before."""

_FIRST_MEDIAN_GAIN, _MEDIAN_GAIN = 0.2, 0.02
"""Change of a running median by its first value, and the smallest change per value."""

_NUM_ERRORS = 256
"""Predictions whose error is kept."""

_MAX_EXPECTED = 65_536


class PrefillLatencyModel(msgspec.Struct, frozen=True, gc=False):
    """Duration of a step with prefill: microseconds per step, per token, and per million pairs."""

    base_us: float
    token_us: float
    million_pairs_us: float

    def chunk_us(self, history_tokens: int, tokens: float) -> float:
        """Return the time that a chunk adds to its step."""
        return self.token_us * tokens + self.million_pairs_us * (tokens + 2 * history_tokens) * tokens / _PAIRS

    def tokens_in(self, history_tokens: int, budget_us: float) -> float:
        """Return the chunk after `history_tokens` that adds `budget_us`: the positive root of a x^2 + b x - budget."""
        a = self.million_pairs_us / _PAIRS
        b = 2 * a * history_tokens + self.token_us
        return 2 * budget_us / (b + math.sqrt(b * b + 4 * a * budget_us))


_Sample: TypeAlias = tuple[float, float, float, float]
"""One step: 1, tokens, million pairs, and its duration in microseconds."""


def _zeros() -> list[list[float]]:
    return [[0.0] * 4 for _ in range(3)]


def _step_us(model: PrefillLatencyModel, sample: _Sample) -> float:
    return model.base_us + model.token_us * sample[1] + model.million_pairs_us * sample[2]


@dataclass(slots=True, kw_only=True)
class PrefillLatencyFit:
    """Least-squares fit over the steps with prefill, as running sums with exponentially decreasing weights.

    Durations are clipped around the prediction of the fit, so that a stall does not spoil it. The first fit minimises
    absolute errors instead of squares, for the same reason.

    Attributes:
        memory_steps: a step so many steps ago has a third of the weight of the newest. 512 steps with prefill take
            some minutes.
        num_steps: observed steps.

    Raises:
        ConfigError: `memory_steps` is below 1.
    """

    memory_steps: int = 512
    num_steps: int = field(default=0, init=False)
    _known: tuple[int, PrefillLatencyModel | None] = field(default=(0, None), init=False, repr=False)
    _products: list[list[float]] = field(default_factory=_zeros, init=False, repr=False)
    _first: list[_Sample] = field(default_factory=list, init=False, repr=False)
    _usual_error_us: float = field(default=0.0, init=False, repr=False)
    _expected: PrefillLatencyModel | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("memory_steps", self.memory_steps, "is not a number of steps")

    def observe(self, tokens: int, pairs: int, step_s: float) -> None:
        """Add one step with prefill to the fit. A step without a duration is ignored."""
        if step_s <= 0.0 or not math.isfinite(step_s) or tokens <= 0:
            return
        sample = (1.0, float(tokens), pairs / _PAIRS, step_s * 1e6)
        self.num_steps += 1
        self._add(self._clipped(sample))
        if self.num_steps <= _STARTS[-1]:
            self._first.append(sample)
            if self.num_steps in _STARTS:
                self._start()
        elif self.num_steps % _MIN_SAMPLES == 0:
            self._first.clear()
            self._expected = self._fitted()

    def observe_metrics(self, metrics: ForwardPassMetrics) -> None:
        """Add one step from its forward-pass metrics, as a planner receives them. One without prefill is ignored.

        The metrics have sums over the step's prefills. So the pairs are exact for one prefill, and for several those of
        prefills with equal chunks after equal histories.
        """
        scheduled = metrics.scheduled_requests
        tokens, num_prefills = scheduled.sum_prefill_tokens, scheduled.num_prefill_requests
        if num_prefills > 0:
            pairs = tokens * (tokens + 2 * scheduled.sum_prefill_kv_tokens) // num_prefills
            self.observe(tokens, pairs, metrics.wall_time)

    def _start(self) -> None:
        """Make the first fit: of least absolute errors, by least squares with weights."""
        samples, errors = self._first, [0.0]
        least_us = 1e-6 * sorted(sample[3] for sample in samples)[len(samples) // 2]
        self._expected, self._products = None, _zeros()
        for sample in samples:
            self._add(sample, keep=1.0)
        fitted = self._fitted()
        for _ in range(_REWEIGHTINGS):
            if fitted is None:
                return
            errors = [abs(sample[3] - _step_us(fitted, sample)) for sample in samples]
            weights = [least_us / max(error, least_us) for error in errors]
            self._products = _zeros()
            for sample, weight in zip(samples, weights, strict=True):
                self._add(sample, weight, keep=1.0)
            fitted = self._fitted()
        self._expected, self._usual_error_us = fitted, sorted(errors)[len(errors) // 2]
        self._products = _zeros()
        for sample in samples:
            self._add(self._clipped(sample), keep=1.0)

    def _clipped(self, sample: _Sample) -> _Sample:
        """Return the sample with its duration clipped, and adjust the usual error."""
        expected = self._expected
        if expected is None:
            return sample
        predicted_us = _step_us(expected, sample)
        error_us = sample[3] - predicted_us
        limit_us = max(_CLIP * self._usual_error_us, _MIN_CLIP * predicted_us)
        self._usual_error_us *= _ERROR_GAIN if abs(error_us) > self._usual_error_us else 1.0 / _ERROR_GAIN
        self._usual_error_us = max(self._usual_error_us, predicted_us * _MIN_CLIP / _CLIP)
        return (*sample[:3], predicted_us + max(-limit_us, min(limit_us, error_us)))

    def _add(self, sample: _Sample, weight: float = 1.0, *, keep: float | None = None) -> None:
        kept = 1.0 - 1.0 / self.memory_steps if keep is None else keep
        for products, factor in zip(self._products, sample[:3], strict=True):
            for column, value in enumerate(sample):
                products[column] = products[column] * kept + weight * factor * value

    def model(self) -> PrefillLatencyModel | None:
        """Return the best model; None before eight steps, or if all steps had the same shape.

        If a coefficient would be negative, it is 0 and the others are fitted again.
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
    """Solve linear equations, one per row with its right side at the end; return None if they are singular."""
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
    """Chooses chunks of equal duration with the given model. Without a model every chunk has the static size.

    The batcher calls `chunk_tokens` for each chunk. A `StateProvider`: the model can be set, and the state also shows
    this rank's own fit.

    Attributes:
        page_size: tokens per page; chunks are whole pages.
        smooth: interpolation from the static size (0) to the size of equal duration (1). 0.75 as in SGLang, so that an
            inaccurate model does not cut prompts into tiny chunks.
        fit: this rank's fit, which decides nothing.
        model: decides the sizes; the same on all ranks of a replica.

    Raises:
        ConfigError: `page_size` is below 1, `smooth` is not from 0 to 1, or the model gives no size for some chunk.
    """

    page_size: int = 1
    smooth: float = 0.75
    fit: PrefillLatencyFit = field(default_factory=PrefillLatencyFit)
    model: PrefillLatencyModel | None = None

    def __post_init__(self) -> None:
        check_integer("page_size", self.page_size)
        check_share("smooth", self.smooth)
        if self.model is not None:
            self._try(self.model)

    def with_model(self, model: PrefillLatencyModel | None) -> DynamicChunkSizer:
        """Return a sizer that uses `model`, with the same fit.

        Raises:
            ConfigError: the model gives no size for some chunk.
        """
        return DynamicChunkSizer(page_size=self.page_size, smooth=self.smooth, fit=self.fit, model=model)

    def chunk_tokens(self, history_tokens: int, static_tokens: int) -> int:
        """Return the size of the chunk after `history_tokens`; `static_tokens` is the size at the start of a prompt.

        It is at most the static size and at least a quarter of it, in whole pages if the static size has one. The
        static size is at most `MAX_TOKENS`.
        """
        model = self.model
        if model is None:
            return static_tokens
        equal = model.tokens_in(history_tokens, model.chunk_us(0, static_tokens))
        tokens = int(static_tokens + self.smooth * (equal - static_tokens))
        tokens = max(tokens, static_tokens // _MAX_SHRINK)
        return min(static_tokens, max(tokens - tokens % self.page_size, self.page_size))

    @property
    def settable(self) -> Collection[str]:
        return _MODEL_NAMES

    def state(self) -> Mapping[str, StateValue]:
        """Return the model in use (None for each coefficient without one) and this rank's fit."""
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
        """Validate a new model: all three coefficients, as numbers, or as None for chunks of the static size."""
        given = [changes.get(name) for name in _MODEL_NAMES]
        if missing := sorted(set(_MODEL_NAMES) - changes.keys()):
            raise ConfigError(missing[0], None, "is missing", "set all three coefficients of the model together")
        if given == [None] * len(given):
            return
        for name, value in zip(_MODEL_NAMES, given, strict=True):
            check_number(name, value, "is not a time", or_zero=name != "chunk_token_us")
        self.with_model(_model_of(changes))

    def set_state(self, changes: Mapping[str, StateValue]) -> None:
        self.model = self.with_model(_model_of(changes)).model

    def _try(self, model: PrefillLatencyModel) -> None:
        """Size a chunk with the smallest and with the largest arguments. Every value on the way grows with both."""
        try:
            for history_tokens, static_tokens in ((0, 1), (MAX_INTEGER, MAX_TOKENS)):
                self.chunk_tokens(history_tokens, static_tokens)
        except (ArithmeticError, ValueError):  # infinite, or not a number
            largest = max(_MODEL_NAMES, key=lambda name: getattr(model, name.removeprefix("chunk_")))
            hint = "give the microseconds that a real step takes"
            value = getattr(model, largest.removeprefix("chunk_"))
            raise ConfigError(largest, value, "gives no size for some chunk", hint) from None


_MODEL_NAMES = ("chunk_base_us", "chunk_token_us", "chunk_million_pairs_us")


def _model_of(changes: Mapping[str, StateValue]) -> PrefillLatencyModel | None:
    base, token, pairs = (changes[name] for name in _MODEL_NAMES)
    return None if token is None else PrefillLatencyModel(*map(float, (base or 0, token, pairs or 0)))


@dataclass(slots=True, kw_only=True)
class _RunningMedian:
    """The median of recent positive values: each value moves it by a fifth at first, and by 2 % after ten values."""

    value: float
    _num_values: int = 0

    def add(self, value: float) -> None:
        self._num_values += 1
        if self.value <= 0.0:
            self.value = value
            return
        factor = 1.0 + max(_MEDIAN_GAIN, _FIRST_MEDIAN_GAIN / self._num_values)
        self.value *= factor if value > self.value else 1.0 / factor


@dataclass(slots=True, kw_only=True)
class FirstTokenPredictor:
    """Predicts the time to a request's first token, and measures the error of its predictions.

    It uses this rank's fit and clock, so it decides nothing. The fit knows steps with prefill. What it does not know is
    learned from the errors: the bias of requests that can start immediately, because decodes and other steps take time,
    too, and the time until a slot becomes free of requests that have to wait for one.

    Attributes:
        fit: duration of steps.
        clock: seconds with any origin.
        num_observed: predictions whose first token was generated.
    """

    fit: PrefillLatencyFit
    clock: Callable[[], float] = time.monotonic
    num_observed: int = field(default=0, init=False)
    # By request: when it was made, the prediction, and its parts as the fit gave them: prefill_s and slots_ahead.
    _expected: dict[str, tuple[float, float, float, int]] = field(default_factory=dict, init=False, repr=False)
    _bias: _RunningMedian = field(default_factory=lambda: _RunningMedian(value=1.0), init=False, repr=False)
    _slot_s: _RunningMedian = field(default_factory=lambda: _RunningMedian(value=0.0), init=False, repr=False)
    _ordered_s: list[float] | None = field(default=None, init=False, repr=False)
    _errors_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_ERRORS), init=False, repr=False)

    def predict_s(
        self, own_tokens: int, *, tokens_ahead: int, step_tokens: int, history_tokens: int = 0, slots_ahead: int = 0
    ) -> float | None:
        """Return the seconds to the first token of a request that arrives now; None before the first fit.

        Args:
            own_tokens: tokens to prefill.
            tokens_ahead: tokens to prefill before them, of waiting requests and running prefills.
            step_tokens: prefilled tokens per step.
            history_tokens: cached tokens before its own.
            slots_ahead: requests that must end before it can start, because all slots are in use.
        """
        model = self.fit.model()
        if model is None:
            return None
        num_steps = max(1, -(-(tokens_ahead + own_tokens) // step_tokens))
        own_us = model.chunk_us(history_tokens, own_tokens)
        prefill_s = (num_steps * model.base_us + model.token_us * tokens_ahead + own_us) * 1e-6
        return prefill_s * self._bias.value + slots_ahead * self._slot_s.value

    def start(self, rid: str, predicted_s: float | None, *, slots_ahead: int = 0) -> None:
        """Record a prediction made now, with the same `slots_ahead`, unless 65,536 are pending."""
        if predicted_s is not None and len(self._expected) < _MAX_EXPECTED:
            slots_s = slots_ahead * self._slot_s.value
            prefill_s = (predicted_s - slots_s) / self._bias.value
            self._expected[rid] = (self.clock(), predicted_s, prefill_s, slots_ahead)

    def on_first_token(self, rid: str) -> None:
        """Measure the error of the prediction when the first token is generated."""
        expected = self._expected.pop(rid, None)
        if expected is None:
            return
        made_s, predicted_s, prefill_s, slots_ahead = expected
        took_s = self.clock() - made_s
        self._errors_s.append(abs(took_s - predicted_s))
        self.num_observed += 1
        self._ordered_s = None
        if slots_ahead:
            waited_s = took_s - prefill_s * self._bias.value
            self._slot_s.add(max(0.0, waited_s) / slots_ahead)
        elif prefill_s > 0.0:
            self._bias.add(max(took_s / prefill_s, 1e-3))

    def discard(self, rid: str) -> None:
        """Discard the prediction of an ended request."""
        self._expected.pop(rid, None)

    def error_s(self, share: float) -> float:
        """Return a quantile of the last 256 errors: `share` = 0.5 is the median; 0 before the first prediction."""
        ordered = self._ordered_s
        if ordered is None:
            ordered = self._ordered_s = sorted(self._errors_s)
        return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * share) - 1)] if ordered else 0.0
