"""InputBlocker: admit, hold or reject each message that arrives. It runs on the leading rank only and does no I/O.

Messages are relayed in order of arrival, with these exceptions:

| message | result |
| --- | --- |
| a request | relayed; held while input is blocked; rejected while draining, and beyond a limit |
| a copy of a request in flight | dropped, because the first one is answered |
| a different request with an id in use | rejected; the first one continues |
| a copy of a request that has ended | rejected: it was served, and would be computed again |
| an abort | relayed; the abort of a held request ends it here |
| an abort that arrives before its request | kept for a while; the request is rejected when it arrives |
| a command | relayed, ahead of held requests: what has to happen while input is blocked is a command |

Every request is relayed or answered; only copies of requests in flight are not. That includes requests that a failed
relay has lost, and those that are held or not yet relayed when the replica stops. The other ranks receive the admitted
messages, so this component may use its clock.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from zlib import crc32

import attrs

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.old_names import old_names
from scheduler_components._internal.validators import check_number, integer_validator, number_validator
from scheduler_components.values import InputKind, InputMessage, ReceiverStats, RejectionReason, RequestRejection

__all__ = ["BlockerState", "InputBlocker", "InputLimits", "RelayedMessage"]

logger = logging.getLogger(__name__)

_REJECTING = "answering a rejected request"


class BlockerState(enum.StrEnum):
    """Whether requests are admitted."""

    OPEN = "open"
    BLOCKED = "blocked"
    DRAINING = "draining"
    CLOSED = "closed"


def _stopped(rid: str) -> RequestRejection:
    text = f"rid={rid!r}: this replica stopped before it took the request; send the request to another one"
    return RequestRejection(rid, RejectionReason.STOPPED, text)


def _check_rate(_: object, attribute: attrs.Attribute[float | None], value: float | None) -> None:
    if value is not None:
        check_number(attribute.name, value, "is not a rate")


@attrs.frozen(kw_only=True)
class InputLimits:
    """Limits of the input that one replica admits.

    Attributes:
        max_recv_per_poll: messages per receive; further ones wait in the source. SGLang's name.
        max_request_bytes: size of one request's frame.
        max_requests_per_s: average rate; None for no limit.
        burst_requests: requests that may arrive together before the rate applies.
        max_held_requests: requests held while input is blocked.
        max_known_requests: remembered ids of admitted requests, and of early aborts; the default covers some seconds of
            a very busy frontend.
        abort_memory_s: how long the abort of a request that has not arrived is remembered.

    Raises:
        ConfigError: naming the invalid limit.
    """

    max_recv_per_poll: int = attrs.field(default=256, validator=integer_validator())
    max_request_bytes: int = attrs.field(default=64 * 1024 * 1024, validator=integer_validator())
    max_requests_per_s: float | None = attrs.field(default=None, validator=_check_rate)
    burst_requests: int = attrs.field(default=256, validator=integer_validator())
    max_held_requests: int = attrs.field(default=4096, validator=integer_validator())
    max_known_requests: int = attrs.field(default=16_384, validator=integer_validator())
    abort_memory_s: float = attrs.field(default=60.0, validator=number_validator(or_zero=True))


@attrs.frozen
class RelayedMessage:
    """An admitted message: its frame for the other ranks, and the decoded message for this one."""

    frame: bytes
    incoming: InputMessage[object]


@dataclass(slots=True, kw_only=True)
class _KnownRequests:
    """Requests that are held while input is blocked, those admitted but not yet relayed, and recent ones.

    Attributes:
        most: bound of the two that follow.
        sums: checksums of recently admitted requests.
        early_aborts: aborts that arrived before their requests, with their times.
    """

    most: int
    sums: OrderedDict[str, int] = field(default_factory=OrderedDict)
    early_aborts: OrderedDict[str, float] = field(default_factory=OrderedDict)
    held: dict[str, RelayedMessage] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)

    def on_admitted(self, rid: str, frame: bytes) -> None:
        self.admitted.add(rid)
        self.sums[rid] = crc32(frame)
        self.sums.move_to_end(rid)
        if len(self.sums) > self.most:
            self.sums.popitem(last=False)

    def on_lost(self, rid: str) -> None:
        self.admitted.discard(rid)
        self.sums.pop(rid, None)

    def is_copy(self, rid: str, frame: bytes) -> bool:
        return self.sums.get(rid) == crc32(frame)

    def on_early_abort(self, rid: str, now_s: float) -> None:
        self.early_aborts[rid] = now_s
        self.early_aborts.move_to_end(rid)
        if len(self.early_aborts) > self.most:
            self.early_aborts.popitem(last=False)

    def pop_abort(self, rid: str, since_s: float) -> bool:
        """Return and forget whether the request was aborted since then: a later request of this id is another one."""
        at_s = self.early_aborts.pop(rid, None)
        return at_s is not None and at_s >= since_s


@dataclass(slots=True, kw_only=True)
class InputBlocker:
    """Admits, holds or rejects messages.

    `RequestReceiver` passes each decoded message to `handle`, calls `on_broadcast` after each relay, and `reject_lost`
    for messages that no relay will carry.

    Attributes:
        bounds: the limits.
        active_ids: request ids that the scheduler has in use.
        reject: stores or sends the answer to one rejected request, without waiting; on the leading rank only.
        stats: the counters of the receiver.
        clock: monotonic seconds.
        failures: answers that could not be sent.
        state: whether requests are admitted.
    """

    bounds: InputLimits = field(default_factory=InputLimits)
    active_ids: Container[str] = frozenset()
    reject: Callable[[RequestRejection, InputMessage[object]], None] = lambda *_: None
    stats: ReceiverStats = field(default_factory=ReceiverStats)
    clock: Callable[[], float] = time.monotonic
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    state: BlockerState = field(default=BlockerState.OPEN, init=False)
    _tokens_left: float = field(default=-1.0, init=False, repr=False)  # of the rate; negative before the first request
    _tokens_at_s: float = field(default=0.0, init=False, repr=False)
    _requests: _KnownRequests = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._requests = _KnownRequests(most=self.bounds.max_known_requests)

    def handle(self, frame: bytes, incoming: InputMessage[object]) -> Iterator[RelayedMessage]:
        """Process one message; yield the messages to relay because of it, in order."""
        if incoming.kind is InputKind.REQUEST:
            yield from self._request(RelayedMessage(frame, incoming))
        elif incoming.kind is InputKind.ABORT:
            yield from self._abort(RelayedMessage(frame, incoming))
        elif incoming.kind is InputKind.COMMAND:
            yield RelayedMessage(frame, incoming)
        else:
            yield from self._switch(incoming.kind)

    def on_broadcast(self, relayed: Iterable[RelayedMessage] | None = None) -> None:
        """Forget the relayed requests: the scheduler has them now, and `active_ids` contains their ids.

        Args:
            relayed: the relayed messages; None if every admitted message was relayed.
        """
        admitted = self._requests.admitted
        if relayed is None:
            self.stats.requests_admitted += len(admitted)
            admitted.clear()
            return
        for message in relayed:
            if message.incoming.kind is InputKind.REQUEST:
                self.stats.requests_admitted += 1
                admitted.discard(message.incoming.rid)

    def reject_lost(self, messages: Iterable[RelayedMessage]) -> None:
        """Answer admitted requests that were not relayed and will not be, because the relay failed or is closed."""
        for message in messages:
            if message.incoming.kind is InputKind.REQUEST:
                rid = message.incoming.rid
                self._requests.on_lost(rid)
                self._reject(_stopped(rid), message)

    def close(self) -> None:
        """Answer every held request, and reject all later ones. Safe to call twice."""
        requests = self._requests
        self.state = BlockerState.CLOSED
        held, requests.held = requests.held, {}
        self.stats.requests_held = 0
        for message in held.values():
            self._reject(_stopped(message.incoming.rid), message)

    def _request(self, message: RelayedMessage) -> Iterator[RelayedMessage]:
        requests, rid = self._requests, message.incoming.rid
        rejection = self._rejection(rid, message.frame)
        if rejection is not None:
            if rejection.reason is RejectionReason.IN_USE and self._is_copy_in_flight(rid, message.frame):
                self.stats.requests_repeated += 1
            else:
                self._reject(rejection, message)
        elif self.state is BlockerState.BLOCKED:
            requests.held[rid] = message
            self.stats.requests_held = len(requests.held)
        else:
            yield self._admit(message)

    def _rejection(self, rid: str, frame: bytes) -> RequestRejection | None:
        """Return why a request is rejected, or None. The rate is checked last, to count admitted requests only."""
        requests, bounds, now_s = self._requests, self.bounds, self.clock()
        if rid in requests.held or rid in requests.admitted or rid in self.active_ids:
            text = f"rid={rid!r}: is already in flight; give each request a unique id"
            return RequestRejection(rid, RejectionReason.IN_USE, text)
        if requests.is_copy(rid, frame):
            text = f"rid={rid!r}: this request was served before; send it with another id to have it served again"
            return RequestRejection(rid, RejectionReason.SERVED, text)
        if requests.pop_abort(rid, now_s - bounds.abort_memory_s):
            return RequestRejection(rid, RejectionReason.ABORTED, f"rid={rid!r}: was aborted before it arrived")
        if len(frame) > bounds.max_request_bytes:
            text = f"rid={rid!r}: has {len(frame)} bytes, the limit is {bounds.max_request_bytes}; shorten the prompt"
            return RequestRejection(rid, RejectionReason.TOO_LARGE, text)
        if self.state is BlockerState.CLOSED:
            return _stopped(rid)
        if self.state is BlockerState.DRAINING:
            text = f"rid={rid!r}: this replica is draining; send the request to another one"
            return RequestRejection(rid, RejectionReason.DRAINING, text)
        if self.state is BlockerState.BLOCKED and len(requests.held) >= bounds.max_held_requests:
            text = f"rid={rid!r}: input is blocked and {len(requests.held)} requests are held already; try again later"
            return RequestRejection(rid, RejectionReason.HELD_FULL, text)
        wait_s = self._rate_wait_s(now_s)
        if wait_s:
            text = (
                f"rid={rid!r}: exceeds the rate of {bounds.max_requests_per_s:g} requests per second; "
                f"try again in {wait_s:.3f} s"
            )
            return RequestRejection(rid, RejectionReason.TOO_MANY, text, wait_s)
        return None

    def _rate_wait_s(self, now_s: float) -> float:
        """Count one request and return 0.0, or return the seconds until it could be admitted: a token bucket."""
        rate = self.bounds.max_requests_per_s
        if rate is None:
            return 0.0
        burst = float(self.bounds.burst_requests)
        gained = max(0.0, (now_s - self._tokens_at_s) * rate)
        self._tokens_left = burst if self._tokens_left < 0 else min(burst, self._tokens_left + gained)
        self._tokens_at_s = now_s
        if self._tokens_left < 1.0:
            return (1.0 - self._tokens_left) / rate
        self._tokens_left -= 1.0
        return 0.0

    def _is_copy_in_flight(self, rid: str, frame: bytes) -> bool:
        held = self._requests.held.get(rid)
        return held.frame == frame if held is not None else self._requests.is_copy(rid, frame)

    def _admit(self, message: RelayedMessage) -> RelayedMessage:
        rid = message.incoming.rid
        self._requests.on_admitted(rid, message.frame)
        return message

    def _reject(self, rejection: RequestRejection, message: RelayedMessage) -> None:
        self.stats.requests_refused += 1
        with self.failures.guard(_REJECTING):
            self.reject(rejection, message.incoming)

    def _abort(self, message: RelayedMessage) -> Iterator[RelayedMessage]:
        requests, rid = self._requests, message.incoming.rid
        held = requests.held.pop(rid, None)
        if held is not None:
            self.stats.requests_held = len(requests.held)
            text = f"rid={rid!r}: was aborted before it was admitted"
            self._reject(RequestRejection(rid, RejectionReason.ABORTED, text), held)
        elif rid in requests.admitted or rid in requests.sums or rid in self.active_ids:
            yield message
        else:
            requests.on_early_abort(rid, self.clock())

    def _switch(self, kind: InputKind) -> Iterator[RelayedMessage]:
        """Block, unblock or drain. A repetition changes nothing; unblocking also ends a drain."""
        requests = self._requests
        if self.state is BlockerState.CLOSED:
            return
        self.state = {
            InputKind.BLOCK: BlockerState.BLOCKED,
            InputKind.UNBLOCK: BlockerState.OPEN,
            InputKind.DRAIN: BlockerState.DRAINING,
        }[kind]
        if self.state is BlockerState.BLOCKED:
            return
        # Held requests arrived before the drain, so they are admitted.
        held, requests.held = requests.held, {}
        self.stats.requests_held = 0
        for message in held.values():
            yield self._admit(message)


__getattr__ = old_names(__name__)
