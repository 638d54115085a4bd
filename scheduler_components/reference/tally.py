"""What became of the requests of a workload."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Outcomes", "Tally", "TokenCounts", "percentile"]

_KEPT_REASONS = 8  # reasons carry numbers, so a trace of long prompts would make thousands of them


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """How many requests went one way, and the first few reasons."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        self.count += 1
        if len(self.reasons) < _KEPT_REASONS:
            self.reasons.append(reason)


@dataclass(slots=True, kw_only=True)
class TokenCounts:
    """Tokens of finished requests."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached / prompt tokens, 0 to 1."""
        return self.cached / self.prompt if self.prompt else 0.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """Kept by a driver while it runs; every request that was sent ends as finished, refused or failed.

    Attributes:
        total: requests that will be sent; None while a trace of unknown length is read.
        sent, finished: requests.
        refused: the scheduler could never have served them.
        failed: anything else that is no answer.
        tokens: of finished requests.
        first_token_s: seconds from sending to the first token, where it was seen.
    """

    total: int | None = None
    sent: int = 0
    finished: int = 0
    refused: Outcomes = field(default_factory=Outcomes)
    failed: Outcomes = field(default_factory=Outcomes)
    tokens: TokenCounts = field(default_factory=TokenCounts)
    first_token_s: list[float] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return self.finished + self.refused.count + self.failed.count

    def finish(self, *, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Count one answered request."""
        self.finished += 1
        self.tokens.prompt += prompt_tokens
        self.tokens.cached += cached_tokens
        self.tokens.output += output_tokens


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of ``values`` do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)] if ordered else 0.0
