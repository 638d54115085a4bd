"""Rates over the recent past, in memory that does not grow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_components.errors import ConfigError

__all__ = ["RateMeter", "RollingSums"]

_GENERATED, _INPUT, _CACHED = range(3)


class RollingSums:
    """Sums of ``num_sums`` counters over the last ``window_s``, kept in ``num_buckets`` buckets of time.

    Pure: time comes in with ``advance``. A time before the last one counts as no time passed, so a clock that is
    set back neither freezes the window nor empties it.

    Raises:
        ConfigError: the window is not a positive number, or there is no bucket.
    """

    __slots__ = ("_bucket_s", "_buckets", "_elapsed_s", "_index", "_last_now", "_window_start_s", "sums")

    def __init__(self, *, num_sums: int, window_s: float, num_buckets: int, now: float) -> None:
        if not (0 < window_s < math.inf):
            raise ConfigError("window_s", window_s, "is not a time span", "give seconds above 0")
        if num_buckets < 1:
            raise ConfigError("num_buckets", num_buckets, "leaves nowhere to count", "give at least 1")
        self.sums = [0] * num_sums
        self._buckets = [[0] * num_sums for _ in range(num_buckets)]
        self._bucket_s = window_s / num_buckets
        self._index = 0  # of the current bucket since the start; its place in the ring is the remainder
        self._elapsed_s = 0.0
        self._window_start_s = 0.0  # where the oldest bucket begins, in elapsed time
        self._last_now = now

    def advance(self, now: float) -> None:
        """Move to ``now``: buckets that fall out of the window leave the sums."""
        if now > self._last_now:
            self._elapsed_s += now - self._last_now
        self._last_now = now
        index = int(self._elapsed_s / self._bucket_s)
        if index != self._index:
            self._expire(index)

    def _expire(self, index: int) -> None:
        ring = len(self._buckets)
        for step in range(1, min(index - self._index, ring) + 1):
            bucket = self._buckets[(self._index + step) % ring]
            for column, amount in enumerate(bucket):
                self.sums[column] -= amount
                bucket[column] = 0
        self._index = index
        self._window_start_s = max(0, index + 1 - ring) * self._bucket_s

    def add(self, column: int, amount: int) -> None:
        """Count ``amount`` in the current bucket; a negative amount counts as 0."""
        if amount > 0:
            self._buckets[self._index % len(self._buckets)][column] += amount
            self.sums[column] += amount

    @property
    def span_s(self) -> float:
        """Seconds that the sums cover: the window, less what the current bucket still lacks; at least one bucket."""
        covered_s = self._elapsed_s - self._window_start_s
        return covered_s if covered_s > self._bucket_s else self._bucket_s


@dataclass(slots=True, kw_only=True)
class RateMeter:
    """Generation throughput and cache hit rate over a rolling window: the kit's ``RateSource``.

    Tokens are summed in buckets of time, so a rate moves in steps of one bucket, and an idle scheduler reads 0
    one window after its last token. Right after the start the window is as long as the meter is old.

    Attributes:
        window_s: how far back the rates look.
        num_buckets: resolution of the window, and its whole memory.
        clock: seconds from any origin.

    Raises:
        ConfigError: the window or the number of buckets is not positive.
    """

    window_s: float = 10.0
    num_buckets: int = 20
    clock: Callable[[], float] = time.monotonic
    _window: RollingSums = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._window = RollingSums(num_sums=3, window_s=self.window_s, num_buckets=self.num_buckets, now=self.clock())

    def observe_prefill(self, input_tokens: int, cached_tokens: int) -> None:
        """Count a request that entered prefill: its input, and the part that a cached prefix covered."""
        window = self._window
        window.advance(self.clock())
        window.add(_INPUT, input_tokens)
        window.add(_CACHED, min(cached_tokens, input_tokens))

    def observe_decode(self, tokens: int) -> None:
        """Count tokens that a step generated, over all its requests."""
        window = self._window
        window.advance(self.clock())
        window.add(_GENERATED, tokens)

    @property
    def gen_throughput(self) -> float:
        """Generated tokens a second over the window."""
        window = self._window
        window.advance(self.clock())
        return window.sums[_GENERATED] / window.span_s

    @property
    def cache_hit_rate(self) -> float:
        """Cached / input tokens over the window, 0 to 1; 0 when nothing was prefilled in it."""
        window = self._window
        window.advance(self.clock())
        input_tokens = window.sums[_INPUT]
        return window.sums[_CACHED] / input_tokens if input_tokens else 0.0
