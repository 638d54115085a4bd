"""The times by which a follower of either kind waits, and its deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import attrs

from scheduler_components.validators import number_validator

__all__ = ["Deadlines", "FollowPolicy"]


@attrs.frozen(kw_only=True)
class FollowPolicy:
    """How long a follower waits, in seconds.

    Attributes:
        answer_timeout_s: silence within a replay answer after which the answer counts as lost. Dynamo has no such limit
            and receives nothing more after one lost end marker.
        retry_min_s, retry_max_s: the pause after an unanswered request doubles between these, with jitter. A publisher
            that comes back gets a request within the longest pause.
        request_interval_s: a stream sends four requests without a pause, and then one per interval: in ``t`` seconds at
            most ``4 + t / request_interval_s``.
        probe_interval_s: time between two probes. It bounds how long a lost last batch stays unnoticed. A publisher
            without the extension is probed after this time of silence.
        dead_after_s: time without a connection after which the publisher counts as dead.

    Raises:
        ConfigError: a time is not above 0.
    """

    answer_timeout_s: float = attrs.field(default=5.0, validator=number_validator())
    retry_min_s: float = attrs.field(default=0.2, validator=number_validator())
    retry_max_s: float = attrs.field(default=2.0, validator=number_validator())
    request_interval_s: float = attrs.field(default=0.5, validator=number_validator())
    probe_interval_s: float = attrs.field(default=2.0, validator=number_validator())
    dead_after_s: float = attrs.field(default=15.0, validator=number_validator())

    def pause_s(self, failures: int, jitter: float) -> float:
        """Return the pause after ``failures`` in a row. ``jitter`` from 0 to 1 shortens it by up to half."""
        longest = min(self.retry_max_s, self.retry_min_s * 2.0 ** min(failures - 1, 30))
        return longest * (1.0 - jitter / 2)


@dataclass(slots=True)
class Deadlines:
    """Times on the caller's monotonic clock, in seconds; infinite when not set.

    Attributes:
        answer_s: the answer to the open request is overdue.
        retry_s: a failed request may be sent again.
        credit_s: the follower restores one replay request.
        probe_s: a probe is due.
        silent_s: the heartbeat is overdue.
        dead_s: the publisher counts as dead.
    """

    answer_s: float = math.inf
    retry_s: float = math.inf
    credit_s: float = math.inf
    probe_s: float = math.inf
    silent_s: float = math.inf
    dead_s: float = math.inf

    def next_s(self) -> float:
        return min(self.answer_s, self.retry_s, self.credit_s, self.probe_s, self.silent_s, self.dead_s)
