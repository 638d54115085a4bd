"""Last news of requests that are over, kept until the receiver takes them: bounded, and counted where it overflows."""

from __future__ import annotations

from collections import deque

import msgspec

from scheduler_components.errors import ConfigError
from scheduler_components.output.delta import OutputDelta, TokenOutput

__all__ = ["HeldEnds"]

_BYTES_A_TOKEN = 36
"""A pointer in a tuple and a small int behind it."""

_BYTES_A_LOGPROB = 32


class HeldEnds:
    """Holds the last delta of ended requests, oldest first.

    Beyond ``max_bytes`` the oldest lose their tokens, with logprobs and hidden states, and keep their end: their
    clients learn that it is over and that tokens are missing. Beyond ``max_ends`` the oldest are dropped whole.

    Args:
        max_ends: requests; the default is some seconds of a busy scheduler.
        max_bytes: what their tokens may take.

    Attributes:
        num_bytes: held now.
        ends_dropped, tokens_dropped: lost so far.

    Raises:
        ConfigError: a bound below 1.
    """

    __slots__ = ("num_bytes", "ends_dropped", "tokens_dropped", "_bare", "_full", "_max_bytes", "_max_ends")

    def __init__(self, *, max_ends: int = 16_384, max_bytes: int = 64 * 1024 * 1024) -> None:
        for name, value in (("max_ends", max_ends), ("max_bytes", max_bytes)):
            if value < 1:
                raise ConfigError(name, value, "leaves no room", "give at least 1")
        self._max_ends = max_ends
        self._max_bytes = max_bytes
        self.num_bytes = self.ends_dropped = self.tokens_dropped = 0
        # Tokens are taken from the oldest first, so all that have lost theirs are older than all that have not.
        self._bare: deque[OutputDelta] = deque()
        self._full: deque[OutputDelta] = deque()

    def __len__(self) -> int:
        return len(self._bare) + len(self._full)

    @property
    def deltas(self) -> tuple[OutputDelta, ...]:
        """What is held, oldest first."""
        return (*self._bare, *self._full)

    def hold(self, delta: OutputDelta) -> None:
        """Take one request's last news in."""
        self._full.append(delta)
        self.num_bytes += _size_bytes(delta.output)
        while self.num_bytes > self._max_bytes:
            self._take_tokens_of_oldest()
        if len(self) > self._max_ends:
            self._drop_oldest()

    def _take_tokens_of_oldest(self) -> None:
        delta = self._full.popleft()
        self._lose_tokens(delta)
        output = msgspec.structs.replace(delta.output, token_ids=(), logprobs=None, hidden_states=None)
        self._bare.append(msgspec.structs.replace(delta, output=output))

    def _drop_oldest(self) -> None:
        self._lose_tokens((self._bare or self._full).popleft())
        self.ends_dropped += 1

    def _lose_tokens(self, delta: OutputDelta) -> None:
        self.tokens_dropped += len(delta.output.token_ids)
        self.num_bytes -= _size_bytes(delta.output)

    def taken(self) -> None:
        """Forget what is held: the receiver has it."""
        self._bare.clear()
        self._full.clear()
        self.num_bytes = 0

    def drop_all(self) -> None:
        """Give up what is held: there will be no receiver."""
        while self:
            self._drop_oldest()


def _size_bytes(output: TokenOutput) -> int:
    return (
        len(output.token_ids) * _BYTES_A_TOKEN
        + len(output.logprobs or ()) * _BYTES_A_LOGPROB
        + sum(map(len, output.hidden_states or ()))
    )
