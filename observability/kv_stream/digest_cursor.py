"""Recovery of a stream whose publisher has the replay extension: by epoch, number and digest.

The theory is at the top of ``stream_cursor``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from observability.kv_stream.instructions import (
    Apply,
    ApplyStaged,
    Clear,
    Instruction,
    RetryLater,
    SendReplayRequest,
    Staging,
    request_token,
)
from observability.kv_stream.stream_state import UNCONNECTED, CursorCounters, StreamState, change_state
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind, ReplayVerb
from scheduler_components.kv_events.stream_digest import EPOCH_BYTES, STREAM_DIGEST_BYTES, digest_after

__all__ = ["NO_EPOCH", "DigestCursor", "Position"]

_NONE: tuple[Instruction, ...] = ()
_FOLLOWING = (StreamState.LIVE, StreamState.PARTIAL)

NO_EPOCH = bytes(EPOCH_BYTES)
"""The epoch in requests of a subscriber without a view."""


@dataclass(slots=True)
class Position:
    """A position in one epoch of a publisher. ``digest`` covers every batch below ``next``.

    Initially the position is unknown.
    """

    epoch: bytes = NO_EPOCH
    next: int = 0
    digest: bytes = bytes(STREAM_DIGEST_BYTES)

    def advance(self, payload: bytes) -> None:
        """Move past one batch."""
        self.digest = digest_after(self.digest, self.next, payload)
        self.next += 1

    def matches(self, meta: ReplayMeta) -> bool:
        """Return True when the publisher has the same digest at the same number of the same epoch."""
        return (self.epoch, self.next, self.digest) == (meta.epoch, meta.start, meta.chain)

    def copy(self) -> Position:
        return Position(self.epoch, self.next, self.digest)


class _Phase(Enum):
    """How far the answer to an extended request has come."""

    STATUS_SENT = auto()
    SYNC_SENT = auto()
    SNAPSHOT_SENT = auto()
    CHUNKS = auto()
    BATCHES = auto()
    DONE = auto()


_FIRST_PHASE = {
    ReplayVerb.STATUS: _Phase.STATUS_SENT,
    ReplayVerb.SYNC: _Phase.SYNC_SENT,
    ReplayVerb.SNAPSHOT: _Phase.SNAPSHOT_SENT,
}

_ANSWER_GRAMMAR = {
    (_Phase.STATUS_SENT, ReplayMetaKind.STATUS, False): _Phase.DONE,
    (_Phase.SYNC_SENT, ReplayMetaKind.BEGIN, False): _Phase.BATCHES,  # the publisher has the position of the request
    (_Phase.SYNC_SENT, ReplayMetaKind.BEGIN, True): _Phase.CHUNKS,  # it has not, or its replay buffer starts later
    (_Phase.SNAPSHOT_SENT, ReplayMetaKind.BEGIN, True): _Phase.CHUNKS,
    (_Phase.CHUNKS, ReplayMetaKind.BEGIN, False): _Phase.BATCHES,
    (_Phase.BATCHES, ReplayMetaKind.END, False): _Phase.DONE,
}
"""The allowed META messages of each phase, by kind and whether they begin a snapshot, and the phase that follows. Any
other META breaks the answer. Chunks come in CHUNKS, numbered from 0, and batches in BATCHES. Every META except a status
and the first one of a snapshot names a position at which both sides must have the same digest."""


class _Fit(Enum):
    """How a message of an answer fits the messages before it.

    SPLICED: the publisher has other batches than the applied ones under these numbers.
    """

    NEXT = auto()
    REPEATED = auto()
    BROKEN = auto()
    SPLICED = auto()


@dataclass(slots=True)
class _ExtendedRequest:
    """The open extended request and its answer so far.

    Attributes:
        request_id: number of the request.
        position: of the view. An incremental answer advances it.
        newest_dropped: highest live number beyond a gap before the request was sent, -1 for none.
        initial: position of the view when the request was sent. A status is compared with it, because the view may have
            advanced since.
        staging: position of the staging view of a snapshot; None in an incremental answer.
        is_damaged: a part of the snapshot could not be read.
    """

    request_id: int
    position: Position
    phase: _Phase
    newest_dropped: int
    initial: Position = field(init=False)
    staging: Position | None = None
    is_damaged: bool = False
    num_chunks: int = 0

    def __post_init__(self) -> None:
        self.initial = self.position.copy()

    @property
    def is_status(self) -> bool:
        return self.phase is _Phase.STATUS_SENT

    @property
    def has_advanced(self) -> bool:
        """True when a part of the answer is permanently in the view."""
        return self.staging is None and self.phase is _Phase.BATCHES and self.position.next > self.initial.next

    def accept_payload(self, seq: int, payload: bytes) -> _Fit:
        """Check a chunk or a batch against the phase and the expected number."""
        position = self.staging or self.position
        if self.phase is _Phase.CHUNKS:
            expected = self.num_chunks
        elif self.phase is _Phase.BATCHES:
            expected = position.next
        else:
            return _Fit.BROKEN
        if seq != expected:
            return _Fit.REPEATED if seq < expected else _Fit.BROKEN
        if self.phase is _Phase.CHUNKS:
            self.num_chunks += 1
        else:
            position.advance(payload)
        return _Fit.NEXT

    def accept_meta(self, meta: ReplayMeta) -> _Fit:
        """Check a META against the grammar and its position against that of the view or staging view."""
        is_snapshot = meta.snap and meta.kind is ReplayMetaKind.BEGIN
        phase = _ANSWER_GRAMMAR.get((self.phase, meta.kind, is_snapshot))
        if phase is None:
            return _Fit.BROKEN
        if is_snapshot:
            self.staging = Position(meta.epoch, meta.start, meta.chain)
        elif meta.kind is not ReplayMetaKind.STATUS:
            position = self.staging or self.position
            if meta.kind is ReplayMetaKind.END and meta.epoch == position.epoch and meta.start > position.next:
                return _Fit.BROKEN  # the last batches of the answer are missing
            if self.phase is _Phase.SYNC_SENT and meta.chunks is not None:
                return _Fit.BROKEN  # the snapshot before these batches is missing
            if not position.matches(meta):
                return _Fit.SPLICED if self.staging is None else _Fit.BROKEN
            if self.phase is _Phase.CHUNKS and meta.chunks not in (None, self.num_chunks):
                return _Fit.BROKEN
        self.phase = phase
        return _Fit.NEXT


class DigestCursor:
    """Recovers one stream by status, incremental replay and snapshot. ``StreamCursor`` calls its methods.

    Args:
        patience: failed requests in a row after which a followed view counts as not proved. The same number on a
            connection that has not shown the extension means that a successor without the extension took over. Before
            the extension was ever seen, one failed request means that.
        counters: shared with the other cursor of the stream.
        is_shown: the publisher has shown the extension on this connection, to another cursor.

    Attributes:
        has_extension: the publisher has shown the extension.
        lacks_extension: it has not, or its successor has not: follow it with ``PlainCursor``.
        upstream: from the last status or end, see ``ReplayMeta``.
    """

    __slots__ = (
        "_damaged_at", "_failures", "_has_strays", "_newest_dropped", "_num_unverified", "_patience",
        "_position", "_request", "_shown_on_connection", "_state", "counters", "has_extension", "lacks_extension",
        "upstream",
    )  # fmt: skip

    def __init__(
        self,
        *,
        patience: int = 3,
        counters: CursorCounters | None = None,
        is_shown: bool = False,
    ) -> None:
        self.counters = counters or CursorCounters()
        self.has_extension = self._shown_on_connection = is_shown
        self.lacks_extension = False
        self.upstream: str | None = None
        self._patience = patience
        self._state = StreamState.CONNECTING
        self._position = Position()
        self._request: _ExtendedRequest | None = None
        self._newest_dropped = -1
        self._has_strays = False
        self._failures = self._num_unverified = 0
        self._damaged_at: int | None = None

    def __repr__(self) -> str:
        return f"<DigestCursor {self._state} at {self.last_seq}, open request {self.open_request_id}>"

    @property
    def state(self) -> StreamState:
        """How far the view of this stream can be trusted now."""
        return self._state

    @property
    def last_seq(self) -> int:
        """Number of the last batch in the view; one below the publisher's first number for an empty view."""
        return self._position.next - 1

    @property
    def open_request_id(self) -> int | None:
        """Number of the open replay request, None without one."""
        return self._request.request_id if self._request else None

    @property
    def is_accepting_live(self) -> bool:
        """False while the cursor would drop live batches: leave them in the socket."""
        if self._request is not None and not self._request.is_status:
            return False
        return self._state in _FOLLOWING or self._has_gap or self._awaits_credit

    @property
    def _has_gap(self) -> bool:
        """True while the cursor has dropped a live batch that no request covers."""
        return self._newest_dropped >= self._position.next and self._state not in UNCONNECTED

    @property
    def _awaits_credit(self) -> bool:
        """True while a gap has ended LIVE and no request is open, even if the missing batches arrived late since."""
        return self._state is StreamState.RECOVERING and self._request is None and not self._failures

    def on_live_batch(self, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        """Process one batch of the live channel; see ``StreamCursor.on_live_batch``."""
        before = self.on_connected()
        if not self.is_accepting_live:
            if self._request is not None:
                self._newest_dropped = max(seq, self._newest_dropped)
            return before
        if seq == self._position.next:
            self._position.advance(payload)
            self.counters.applied += 1
            return (Apply(seq, payload, False),)
        if seq < self._position.next:
            # Repeated, late, or of another epoch: the next probe shows which.
            self.counters.duplicates += 1
            return _NONE
        self.counters.gaps += 1
        self._newest_dropped = max(seq, self._newest_dropped)
        return self._recover_gap()

    # --- the connection ---

    def on_connected(self) -> tuple[Instruction, ...]:
        if self._state not in UNCONNECTED:
            return _NONE
        return self._sync()

    def on_disconnected(self) -> tuple[Instruction, ...]:
        if self._state is StreamState.DEAD:
            return _NONE
        self._failures = 0
        self._shown_on_connection = False
        self._change_state(StreamState.CONNECTING)
        return self._drop_request()

    def on_connection_timeout(self) -> tuple[Instruction, ...]:
        self._failures = 0
        self._position = Position()
        self._damaged_at = None
        self._change_state(StreamState.DEAD)
        return (*self._drop_request(), Clear("the publisher is unreachable"))

    # --- gaps ---

    def on_credit_available(self) -> tuple[Instruction, ...]:
        is_due = self._awaits_credit or (self._has_gap and not self._failures)
        return self._recover_gap() if is_due else _NONE

    def _recover_gap(self) -> tuple[Instruction, ...]:
        """Request the missing batches if there is credit. For probable strays, a LIVE view requests only a status."""
        if self._request is None and self.counters.credit and self._has_strays and self._state in _FOLLOWING:
            return self._send(ReplayVerb.STATUS)
        if self._request is None and self.counters.credit:
            return self._sync()
        if not self._has_strays:
            self._change_state(StreamState.RECOVERING)
        return _NONE

    # --- answers ---

    def on_replay_batch(self, request_id: int, seq: int, payload: bytes) -> tuple[Instruction, ...]:
        request = self._request
        if request is None or request.request_id != request_id:
            self.counters.stale_replays += 1
            return _NONE
        fit = request.accept_payload(seq, payload)
        if fit is _Fit.REPEATED:
            self.counters.duplicates += 1
            return _NONE
        if fit is not _Fit.NEXT:
            return self._on_answer_failed()
        staging = request.staging
        if staging is not None and request.phase is _Phase.CHUNKS:
            return (ApplyStaged(staging.next - 1, payload, True),)
        self.counters.applied += 1
        self.counters.recovered += 1
        return (Apply(seq, payload, True) if staging is None else ApplyStaged(seq, payload, False),)

    def on_replay_meta(self, request_id: int, meta: ReplayMeta) -> tuple[Instruction, ...]:
        request = self._request
        if request is None or request.request_id != request_id or meta.token != request_token(request_id):
            self.counters.stale_replays += 1
            return _NONE
        self.has_extension = self._shown_on_connection = True
        fit = request.accept_meta(meta)
        if fit is _Fit.SPLICED:
            return self._on_digest_mismatch()
        if fit is not _Fit.NEXT:
            return self._on_answer_failed()
        if meta.kind is ReplayMetaKind.STATUS:
            self._request = None
            return self._check_status(request, meta)
        if meta.kind is ReplayMetaKind.END:
            return self._finish(request, meta)
        return (Staging.START,) if meta.snap else _NONE

    def _check_status(self, request: _ExtendedRequest, meta: ReplayMeta) -> tuple[Instruction, ...]:
        """Compare a status with the position of the request: the view may have advanced since."""
        initial = request.initial
        self._failures = 0
        if meta.epoch != initial.epoch:
            return self._sync()
        self._set_upstream(meta)
        has_advanced = self._position.next > initial.next
        if meta.start != initial.next:
            # The publisher's replay buffer starts after the position. In a busy stream the missing batches may be in
            # transit, so a followed view waits for the next probe. A view that a gap made doubtful gets no probe.
            self._num_unverified += 1
            may_wait = has_advanced and self._num_unverified == 1 and self._state in _FOLLOWING
            return _NONE if may_wait else self._sync()
        if not initial.matches(meta):
            return self._on_digest_mismatch()
        self.counters.verified += 1
        self._num_unverified = 0
        if self._damaged_at is not None and meta.first > self._damaged_at:
            return self._sync(ReplayVerb.SNAPSHOT)  # the damaged batch is folded into the snapshot, and readable there
        self._has_strays = request.newest_dropped >= meta.next
        if meta.next > self._position.next and (
            not has_advanced or self._position.next <= request.newest_dropped < meta.next
        ):
            return self._sync()
        if self._has_gap:
            return self._recover_gap()
        self._settle()
        return _NONE

    def _finish(self, request: _ExtendedRequest, meta: ReplayMeta) -> tuple[Instruction, ...]:
        """End an answer whose digest matches the publisher's."""
        self._request = None
        self._failures = self._num_unverified = 0
        self._set_upstream(meta)
        self.counters.verified += 1
        self._has_strays = request.newest_dropped >= meta.next
        commit = _NONE if request.staging is None else self._commit_staging(request, request.staging)
        if self._has_gap:
            return (*commit, *self._sync())
        self._settle()
        return commit

    def _commit_staging(self, request: _ExtendedRequest, staging: Position) -> tuple[Instruction, ...]:
        self.counters.snapshots += 1
        self.counters.restarts += self._position.epoch not in (NO_EPOCH, staging.epoch)
        self._position = staging
        # The damage may be anywhere in the snapshot: it is readable again once the replay buffer starts after all of
        # it.
        self._damaged_at = staging.next if request.is_damaged else None
        return (Staging.COMMIT,)

    def on_replay_end(self, request_id: int) -> tuple[Instruction, ...]:
        """Handle a bare end marker: the publisher has no extension, or had to cut its answer."""
        return self._on_answer_failed() if request_id == self.open_request_id else _NONE

    def on_replay_timeout(self, request_id: int) -> tuple[Instruction, ...]:
        """Handle silence. Before the extension was ever seen, no answer is owed."""
        if request_id != self.open_request_id:
            return _NONE
        self.counters.replays_unanswered += int(self.has_extension)
        return self._on_answer_failed()

    def _on_digest_mismatch(self) -> tuple[Instruction, ...]:
        """Request a snapshot: the applied batches are not what the publisher sent under these numbers."""
        self.counters.splices += 1
        return self._sync(ReplayVerb.SNAPSHOT)

    def _on_answer_failed(self) -> tuple[Instruction, ...]:
        """Abandon the open request. Its applied batches stay, because each was contiguous."""
        request = self._request
        assert request is not None
        self.counters.replays_cut += int(self.has_extension)
        if request.has_advanced:
            self._failures = 0
            return self._sync()
        dropped = self._drop_request()
        self._failures += 1
        if not self.has_extension or (self._failures >= self._patience and not self._shown_on_connection):
            self.lacks_extension = True
        elif self._failures >= self._patience and self._state in _FOLLOWING:
            self._change_state(StreamState.PARTIAL)
        return (*dropped, RetryLater(self._failures))

    # --- time, which the follower measures ---

    def on_retry_due(self) -> tuple[Instruction, ...]:
        if self._request is not None or not self._failures:
            return _NONE
        return self._send(ReplayVerb.STATUS) if self._state in _FOLLOWING else self._sync()

    def on_probe_due(self) -> tuple[Instruction, ...]:
        if self._state not in _FOLLOWING or self._request is not None or self._failures:
            return _NONE
        return self._send(ReplayVerb.STATUS)

    # --- what the follower found in a batch ---

    def on_clear_applied(self) -> tuple[Instruction, ...]:
        """Forget earlier damage: a clear removes whatever an unreadable batch would have changed."""
        if self._request is not None and self._request.staging is not None:
            self._request.is_damaged = False
            return _NONE
        self._damaged_at = None
        if self._state is StreamState.PARTIAL and self._failures < self._patience:
            self._settle()
        return _NONE

    def on_batch_damaged(self) -> tuple[Instruction, ...]:
        if self._request is not None and self._request.staging is not None:
            self._request.is_damaged = True
            return _NONE
        self._damaged_at = self.last_seq
        if self._state is StreamState.LIVE:
            self._settle()
        return _NONE

    # --- requests and state ---

    def _sync(self, verb: ReplayVerb = ReplayVerb.SYNC) -> tuple[Instruction, ...]:
        self._change_state(StreamState.SYNCING if self._position.epoch == NO_EPOCH else StreamState.RECOVERING)
        return self._send(verb)

    def _send(self, verb: ReplayVerb) -> tuple[Instruction, ...]:
        self.counters.replays_asked += 1
        request_id, position = self.counters.replays_asked, self._position
        self._request = _ExtendedRequest(request_id, position, _FIRST_PHASE[verb], self._newest_dropped)
        self._newest_dropped = -1
        return (SendReplayRequest(request_id, position.next, verb, position.epoch),)

    def _drop_request(self) -> tuple[Instruction, ...]:
        request, self._request = self._request, None
        if request is not None:
            self._newest_dropped = max(request.newest_dropped, self._newest_dropped)
        return _NONE if request is None or request.staging is None else (Staging.ABORT,)

    def _set_upstream(self, meta: ReplayMeta) -> None:
        """Store the relay's own state. A relay that does not know its stream ends LIVE, whatever the answer proves."""
        self.upstream = meta.upstream
        if self.upstream is not None and self._state is StreamState.LIVE:
            self._change_state(StreamState.PARTIAL)

    def _settle(self) -> None:
        is_whole = self._damaged_at is None and self.upstream is None
        self._change_state(StreamState.LIVE if is_whole else StreamState.PARTIAL)

    def _change_state(self, state: StreamState) -> None:
        self._state = change_state(self._state, state, self.counters)
