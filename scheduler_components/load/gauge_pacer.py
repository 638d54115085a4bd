"""When a gauge is worth sending: throttle, dedupe and heartbeat. Pure: time comes in."""

from __future__ import annotations

import math

from scheduler_components.errors import ConfigError

__all__ = ["HEARTBEAT_S", "MIN_INTERVAL_S", "GaugePacer"]

MIN_INTERVAL_S = 0.05
"""20 samples a second follow a queue closely enough to balance it, and cost a reader of 100 ranks 2,000 messages."""

HEARTBEAT_S = 1.0
"""sgl-router takes a rank for silent after 5 s without a sample; a fifth of that survives losses."""


class GaugePacer:
    """Decides about a gauge that is offered every step.

    A sample is due when the last look at the gauge was ``min_interval_s`` ago. What is found goes out when it is not
    what went out last, or when the last sample is ``heartbeat_s`` old. A clock that is set back counts as no time
    passed, so it neither silences the gauge nor floods its readers.

    Attributes:
        sent: samples that went out.
        throttled: offers that came too soon to look.
        repeated: looks that found what was sent already.

    Raises:
        ConfigError: an interval is negative or not finite, or the heartbeat is 0 or shorter than the throttle.
    """

    __slots__ = (
        "min_interval_s", "heartbeat_s", "sent", "throttled", "repeated",
        "_content", "_last_now", "_since_look_s", "_since_sent_s",
    )  # fmt: skip

    def __init__(self, *, min_interval_s: float = MIN_INTERVAL_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        if not 0 <= min_interval_s < math.inf:
            raise ConfigError("min_interval_s", min_interval_s, "is not a time span", "give seconds, 0 or more")
        if not 0 < heartbeat_s < math.inf:
            raise ConfigError("heartbeat_s", heartbeat_s, "is not a time span", "give seconds above 0")
        if heartbeat_s < min_interval_s:
            raise ConfigError(
                "heartbeat_s", heartbeat_s, f"is shorter than min_interval_s={min_interval_s}", "give a longer one"
            )
        self.min_interval_s = min_interval_s
        self.heartbeat_s = heartbeat_s
        self.sent = self.throttled = self.repeated = 0
        self._content: object = None
        self._last_now: float | None = None
        self._since_look_s = self._since_sent_s = math.inf

    def is_due(self, now: float) -> bool:
        """Say whether to look at the gauge now; an offer that comes too soon is counted."""
        self._advance(now)
        if self._since_look_s < self.min_interval_s:
            self.throttled += 1
            return False
        return True

    def is_news(self, content: object, now: float) -> bool:
        """Say whether to send what a look found; ``content`` must not be None."""
        self._advance(now)
        self._since_look_s = 0.0
        if content == self._content and self._since_sent_s < self.heartbeat_s:
            self.repeated += 1
            return False
        return True

    def went_out(self, content: object, now: float) -> None:
        """Note what was sent."""
        self._advance(now)
        self._since_sent_s = 0.0
        self._content = content
        self.sent += 1

    def _advance(self, now: float) -> None:
        if self._last_now is not None and now > self._last_now:
            self._since_look_s += now - self._last_now
            self._since_sent_s += now - self._last_now
        self._last_now = now

    def __repr__(self) -> str:
        return f"<GaugePacer: {self.sent} sent, {self.throttled} throttled, {self.repeated} repeated>"
