"""InputBlocker: which of the messages that came go to all ranks, and in which order. On the leading rank alone, pure.

Messages go on in the order in which they came, with these exceptions:

| message | what becomes of it |
| --- | --- |
| a request | goes on; held while input is blocked; refused while it drains, and beyond a bound |
| a further copy of a request in flight | dropped: the first one's answer is the answer |
| another request with an id in use | refused; the first goes on |
| a further copy of a request that has ended | refused: it was served, and would be computed again |
| an abort | goes on; that of a held request ends it here |
| an abort that comes before its request | kept for a while; the request is refused when it comes |
| a command | goes on, past requests that are held: what is to be done while input is blocked is a command |

Whatever is not let in is answered, except a copy of what is in flight. Other ranks never screen: they get what went on,
so the screen may look at a clock.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from zlib import crc32

import attrs

from scheduler_components.failure_log import FailureLog
from scheduler_components.ports import NullRejectionSink, NullRequestIds, RejectionSink, RequestIds
from scheduler_components.validators import check_number, integer_validator, number_validator
from scheduler_components.values import InputKind, InputMessage, ReceiverStats, RejectionReason, RequestRejection

__all__ = ["InputLimits", "InputBlocker", "BlockerState"]

logger = logging.getLogger(__name__)

_ANSWERING = "answering a request that was not let in"


class BlockerState(enum.StrEnum):
    """Whether requests go on."""

    OPEN = "open"
    BLOCKED = "blocked"
    DRAINING = "draining"


def _check_rate(_: object, attribute: attrs.Attribute[float | None], value: float | None) -> None:
    if value is not None:
        check_number(attribute.name, value, "is not a rate")


@attrs.frozen(kw_only=True)
class InputLimits:
    """How much input a replica takes.

    Attributes:
        max_recv_per_poll: messages per receive; further ones wait in the source. SGLang's name.
        max_request_bytes: of one request's frame.
        max_requests_per_s: on average; None for no bound on the rate.
        burst_requests: how many may come at once before the rate counts.
        max_held_requests: while input is blocked.
        max_known_requests: ids of requests that went on, and of aborts that came before their requests, that are kept;
            by default some seconds of a very busy front.
        abort_memory_s: how long the abort of a request that has not come is kept.

    Raises:
        ConfigError: naming the bound that cannot work.
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
    """A message that goes to all ranks: its frame for them, and what this rank has read of it."""

    frame: bytes
    incoming: InputMessage[object]


@dataclass(slots=True, kw_only=True)
class _TokenBucket:
    """As many requests as the rate allows, and a burst."""

    bounds: InputLimits
    _left: float = field(default=-1.0, init=False)
    _at_s: float = field(default=0.0, init=False)

    def wait_s(self, now_s: float) -> float:
        """Take one request in: 0.0, or in how many seconds there will be room for it."""
        rate = self.bounds.max_requests_per_s
        if rate is None:
            return 0.0
        burst = float(self.bounds.burst_requests)
        gained = (now_s - self._at_s) * rate
        self._left = burst if self._left < 0 else min(burst, self._left + max(0.0, gained))
        self._at_s = now_s
        if self._left < 1.0:
            return (1.0 - self._left) / rate
        self._left -= 1.0
        return 0.0


class _KnownRequests:
    """Requests that went on lately, by a sum over their frames, and aborts that came before their requests."""

    __slots__ = ("_early_aborts", "_most", "_sums")

    def __init__(self, most: int) -> None:
        self._most = most
        self._sums: OrderedDict[str, int] = OrderedDict()
        self._early_aborts: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, rid: str) -> bool:
        return rid in self._sums

    def went_on(self, rid: str, frame: bytes) -> None:
        self._sums[rid] = crc32(frame)
        self._sums.move_to_end(rid)
        if len(self._sums) > self._most:
            self._sums.popitem(last=False)

    def is_copy(self, rid: str, frame: bytes) -> bool:
        return self._sums.get(rid) == crc32(frame)

    def aborted_early(self, rid: str, now_s: float) -> None:
        self._early_aborts[rid] = now_s
        self._early_aborts.move_to_end(rid)
        if len(self._early_aborts) > self._most:
            self._early_aborts.popitem(last=False)

    def take_abort(self, rid: str, since_s: float) -> bool:
        """Whether the request was aborted since; asked once, for a later request of this id is another one."""
        at_s = self._early_aborts.pop(rid, None)
        return at_s is not None and at_s >= since_s


@dataclass(slots=True, kw_only=True)
class _Requests:
    """What a screen knows of requests: those that wait for it to be unblocked, those between it and the scheduler."""

    bucket: _TokenBucket
    known: _KnownRequests
    state: BlockerState = BlockerState.OPEN
    held: dict[str, RelayedMessage] = field(default_factory=dict)
    under_way: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class InputBlocker:
    """Decides what goes on.

    Attributes:
        bounds: how much is taken.
        ids: which request ids are in use in the scheduler.
        refusals: where answers go.
        stats: what was counted.
        clock: monotonic seconds.
        failures: answers that could not be given.
    """

    bounds: InputLimits = field(default_factory=InputLimits)
    ids: RequestIds = field(default_factory=NullRequestIds)
    refusals: RejectionSink = field(default_factory=NullRejectionSink)
    stats: ReceiverStats = field(default_factory=ReceiverStats)
    clock: Callable[[], float] = time.monotonic
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _requests: _Requests = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._requests = _Requests(
            bucket=_TokenBucket(bounds=self.bounds), known=_KnownRequests(self.bounds.max_known_requests)
        )

    @property
    def state(self) -> BlockerState:
        """Whether requests go on."""
        return self._requests.state

    def handle(self, frame: bytes, incoming: InputMessage[object]) -> Iterator[RelayedMessage]:
        """Take one message in; returns what goes on because of it, in order."""
        if incoming.kind is InputKind.REQUEST:
            yield from self._request(RelayedMessage(frame, incoming))
        elif incoming.kind is InputKind.ABORT:
            yield from self._abort(RelayedMessage(frame, incoming))
        elif incoming.kind is InputKind.COMMAND:
            yield RelayedMessage(frame, incoming)
        else:
            yield from self._switch(incoming.kind)

    def on_broadcast(self) -> None:
        """What went on is in the scheduler now, whose ``ids`` know it."""
        self._requests.under_way.clear()

    def _request(self, letter: RelayedMessage) -> Iterator[RelayedMessage]:
        requests, rid = self._requests, letter.incoming.rid
        refusal = self._refusal(rid, letter.frame)
        if refusal is not None:
            if refusal.reason is RejectionReason.IN_USE and self._is_copy_in_flight(rid, letter.frame):
                self.stats.requests_repeated += 1
            else:
                self._refuse(refusal, letter)
        elif requests.state is BlockerState.BLOCKED:
            requests.held[rid] = letter
            self.stats.requests_held = len(requests.held)
        else:
            yield self._let_in(letter)

    def _refusal(self, rid: str, frame: bytes) -> RequestRejection | None:
        """Why a request may not come in; None when it may. The rate is asked last: only what comes in counts."""
        requests, bounds, now_s = self._requests, self.bounds, self.clock()
        if rid in requests.held or rid in requests.under_way or self.ids.is_taken(rid):
            text = f"rid={rid!r}: is already in flight; give each request an id of its own"
            return RequestRejection(rid, RejectionReason.IN_USE, text)
        if requests.known.is_copy(rid, frame):
            text = f"rid={rid!r}: this very request was served before; send it with another id to have it served again"
            return RequestRejection(rid, RejectionReason.SERVED, text)
        if requests.known.take_abort(rid, now_s - bounds.abort_memory_s):
            return RequestRejection(rid, RejectionReason.ABORTED, f"rid={rid!r}: was aborted before it came")
        if len(frame) > bounds.max_request_bytes:
            text = f"rid={rid!r}: has {len(frame)} bytes, the limit is {bounds.max_request_bytes}; shorten the prompt"
            return RequestRejection(rid, RejectionReason.TOO_LARGE, text)
        if requests.state is BlockerState.DRAINING:
            text = f"rid={rid!r}: this replica takes no more requests; send it to another one"
            return RequestRejection(rid, RejectionReason.DRAINING, text)
        if requests.state is BlockerState.BLOCKED and len(requests.held) >= bounds.max_held_requests:
            text = f"rid={rid!r}: {len(requests.held)} requests wait already while input is blocked; try again later"
            return RequestRejection(rid, RejectionReason.HELD_FULL, text)
        wait_s = requests.bucket.wait_s(now_s)
        if wait_s:
            text = (
                f"rid={rid!r}: more than {bounds.max_requests_per_s:g} requests per second come; "
                f"try again in {wait_s:.3f} s"
            )
            return RequestRejection(rid, RejectionReason.TOO_MANY, text, wait_s)
        return None

    def _is_copy_in_flight(self, rid: str, frame: bytes) -> bool:
        held = self._requests.held.get(rid)
        return held.frame == frame if held is not None else self._requests.known.is_copy(rid, frame)

    def _let_in(self, letter: RelayedMessage) -> RelayedMessage:
        rid = letter.incoming.rid
        self._requests.known.went_on(rid, letter.frame)
        self._requests.under_way.add(rid)
        self.stats.requests_admitted += 1
        return letter

    def _refuse(self, refusal: RequestRejection, letter: RelayedMessage) -> None:
        self.stats.requests_refused += 1
        try:
            self.refusals.reject(refusal, letter.incoming)
        except Exception as error:  # noqa: BLE001 - counted and logged there; a sink must not end a step
            self.failures.failed(_ANSWERING, error)
        else:
            self.failures.succeeded(_ANSWERING)

    def _abort(self, letter: RelayedMessage) -> Iterator[RelayedMessage]:
        requests, rid = self._requests, letter.incoming.rid
        held = requests.held.pop(rid, None)
        if held is not None:
            self.stats.requests_held = len(requests.held)
            text = f"rid={rid!r}: was aborted before it was let in"
            self._refuse(RequestRejection(rid, RejectionReason.ABORTED, text), held)
        elif rid in requests.under_way or rid in requests.known or self.ids.is_taken(rid):
            yield letter
        else:
            requests.known.aborted_early(rid, self.clock())

    def _switch(self, kind: InputKind) -> Iterator[RelayedMessage]:
        """Block, unblock or drain. Said twice it changes nothing; unblocking also ends a drain."""
        requests = self._requests
        requests.state = {
            InputKind.BLOCK: BlockerState.BLOCKED,
            InputKind.UNBLOCK: BlockerState.OPEN,
            InputKind.DRAIN: BlockerState.DRAINING,
        }[kind]
        if requests.state is BlockerState.BLOCKED:
            return
        # Who waited came before the drain: it is let in.
        held, requests.held = requests.held, {}
        self.stats.requests_held = 0
        for letter in held.values():
            yield self._let_in(letter)
