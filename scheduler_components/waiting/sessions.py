"""SessionTable: conversations of several turns, whose pages stay on the device between two turns.

A turn is one request of a session. Its prompt is the text of an earlier turn and the tokens that the client adds, so a
client sends only what is new.

**Pages.** When a turn ends, its full pages are in the prefix cache like those of any request. The session locks them
there, so that no eviction takes them before the next turn. A session owns no page: a page has one owner, the cache. A
session locks one prefix, that of the turn that ended last; other branches share its beginning.

**Bounds.** The number of sessions, the pages that all of them lock, the tokens of all texts that they keep, and the
tokens and the turns of one session are limited. A turn is refused if its input does not fit next to the kept texts. If
its output makes them too long, its session forgets its first turns, and at last this one. Above the limit of pages, and
whenever a request would be preempted or refused for lack of pages, the pages of the least recently used session are
released first. They stay in the cache until they are evicted, and the session stays open: its next turn computes again
what is missing.

**Time.** A session without a turn in flight is closed when it has been idle for its timeout. The table never reads a
clock. It compares agreed times (``StepAgreement.now_s``) only, so all ranks close a session in the same step. By the
clock of each rank, one rank may close a session for which another rank accepts a turn. The first rank then refuses a
request that the second computes, and the next collective of the model hangs. A turn that begins between two agreements
counts from the next one, because the last agreement of an idle replica may be old.

The invariant: all ranks of a replica make the same calls with the same agreed times, so all of them have the same
sessions, and each session has locked the same prefix. The locks of the table are those that ``holdings`` lists.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs

from scheduler_components._internal.validators import integer_validator, number_validator
from scheduler_components.agreement import AgreedValues, Proposal
from scheduler_components.errors import ConfigError
from scheduler_components.ports import DecisionSink, NullDecisionLog
from scheduler_components.values import FinishReason, HeldCount, PageHolding, SessionParams, SessionStats

if TYPE_CHECKING:  # the frontend process reads SessionLimits and must not load the cache
    from scheduler_components.cache import PrefixNamespace
    from scheduler_components.scheduling.request_kv_cache import PrefixCache

__all__ = ["SessionLimits", "SessionTable"]

Node = TypeVar("Node")

_NOTHING_OWNED = HeldCount()


@attrs.frozen(kw_only=True)
class SessionLimits:
    """Bounds of a table of sessions.

    Attributes:
        max_sessions: open sessions. A further one is refused, because closing another client's session would lose its
            conversation.
        max_pages: pages that all sessions lock together. Half of the pool or less leaves room for requests.
        max_turns: turns of one session that can be continued. The one that ended first is forgotten.
        max_text_tokens: tokens of all turns that can be continued, of all sessions together. Each takes four bytes on
            each rank, so the default is 64 MiB.
        idle_timeout_s: timeout of a session that names none. An hour, so that sessions that no client closes end.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    max_sessions: int = attrs.field(default=256, validator=integer_validator())
    max_pages: int = attrs.field(default=2048, validator=integer_validator(at_least=0))
    max_turns: int = attrs.field(default=32, validator=integer_validator())
    max_text_tokens: int = attrs.field(default=16 * 2**20, validator=integer_validator())
    idle_timeout_s: float = attrs.field(default=3600.0, validator=number_validator("is not a timeout"))


@dataclass(slots=True)
class _Turn:
    """A turn that has ended.

    Attributes:
        tokens: input and output.
        num_input_tokens: length of the input.
        parent: the turn that it continued.
    """

    tokens: array[int]
    num_input_tokens: int
    parent: str | None


@dataclass(slots=True, kw_only=True)
class _Session(Generic[Node]):
    """An open session.

    Attributes:
        capacity_tokens: limit of the input of a turn.
        timeout_s: idle time after which it is closed.
        is_streaming: each turn continues the last one, and there is one at a time.
        last_used_s: agreed time at which it was opened, or a turn last began or ended.
        turns: by request id, in the order in which they ended.
        in_flight: turns that have not ended, with the turns that they continue.
        is_closing: it is closed when no turn is in flight.
        node, pages: the locked prefix; None and empty without one.
        num_text_tokens: tokens of its turns, as the table has counted them.
    """

    session_id: str
    capacity_tokens: int
    timeout_s: float
    is_streaming: bool
    last_used_s: float = 0.0
    turns: dict[str, _Turn] = field(default_factory=dict)
    in_flight: dict[str, str | None] = field(default_factory=dict)
    is_closing: bool = False
    node: Node | None = None
    pages: Sequence[int] = ()
    num_text_tokens: int = 0

    def forget_children(self, rid: str | None) -> tuple[str, ...]:
        """Forget the turns that continue a turn, or all turns. Return those of them that are in flight."""
        forgotten = {rid}
        parents = {name: turn.parent for name, turn in self.turns.items()} | self.in_flight
        num_before = 0
        while len(forgotten) > num_before:
            num_before = len(forgotten)
            forgotten |= {name for name, parent in parents.items() if rid is None or parent in forgotten}
        forgotten.discard(rid)
        for name in [name for name in self.turns if name in forgotten]:
            del self.turns[name]
        in_flight = tuple(name for name in self.in_flight if name in forgotten)
        for name in in_flight:
            del self.in_flight[name]
        return in_flight


@dataclass(slots=True, kw_only=True)
class SessionTable(Generic[Node]):
    """The open sessions of one rank. Pure.

    It is an ``AgreementPart``, a ``PageHolders``, an ``IdlePages`` and a ``StatsSource``. A scheduler gives it to its
    ``StepAgreement``, or calls ``step`` in each step. It calls ``extend`` and ``begin_turn`` for each request with
    ``SessionParams``, and ``end_turn`` when the request has ended and its pages are in the cache
    (``SessionKvReleaser``).

    Attributes:
        cache: has the pages.
        limits: bounds of the table.
        decisions: notes which session is closed for idleness, and which loses its pages.
        now_s: the agreed time of the last ``step``.
    """

    cache: PrefixCache[Node]
    limits: SessionLimits = field(default_factory=SessionLimits)
    decisions: DecisionSink = field(default_factory=NullDecisionLog)
    now_s: float = field(default=-math.inf, init=False)
    _sessions: dict[str, _Session[Node]] = field(default_factory=dict, init=False, repr=False)
    _holding: dict[str, _Session[Node]] = field(default_factory=dict, init=False, repr=False)
    _touched: dict[str, _Session[Node]] = field(default_factory=dict, init=False, repr=False)
    _next_due_s: float = field(default=math.inf, init=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False, repr=False)

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._sessions

    @property
    def next_deadline_s(self) -> float:
        """The agreed time before which no session is closed for idleness; infinite without one.

        An idle scheduler must take a step at that time.
        """
        return self._next_due_s

    # --- between two steps, in one order on all ranks ---

    def open(
        self, session_id: str, *, capacity_tokens: int, timeout_s: float | None = None, is_streaming: bool = False
    ) -> None:
        """Open a session.

        Args:
            session_id: unique among the open sessions.
            capacity_tokens: limit of the input of a turn: earlier turns and new tokens.
            timeout_s: idle time after which it is closed; None for the limit of the table.
            is_streaming: each turn continues the last one, and there is one at a time.

        Raises:
            ConfigError: the id is empty or in use, a value is invalid, or too many sessions are open.
        """
        if not session_id:
            raise self._refusal("session_id", session_id, "is empty", "give an id, or none to get one")
        if session_id in self._sessions:
            raise self._refusal("session_id", session_id, "is open already", "close it, or give another id")
        if capacity_tokens < 1:
            raise self._refusal("capacity_of_str_len", capacity_tokens, "holds no token", "give at least 1")
        if timeout_s is not None and not 0.0 < timeout_s < math.inf:
            raise self._refusal("timeout", timeout_s, "is not a timeout", "give a finite number of seconds above 0")
        if len(self._sessions) >= self.limits.max_sessions:
            problem = f"is one more than the {self.limits.max_sessions} sessions that may be open"
            raise self._refusal("session_id", session_id, problem, "close one, or try again later")
        session = self._sessions[session_id] = _Session(
            session_id=session_id,
            capacity_tokens=capacity_tokens,
            timeout_s=self.limits.idle_timeout_s if timeout_s is None else timeout_s,
            is_streaming=is_streaming,
        )
        self._counts["opened"] += 1
        self._touch(session)

    def close(self, session_id: str) -> None:
        """Close a session and release its pages. With a turn in flight, close it when the turn has ended.

        Raises:
            ConfigError: the session is not open.
        """
        session = self._find(session_id)
        self._counts["closed"] += 1
        session.is_closing = True
        self._close_if_unused(session)

    def extend(self, params: SessionParams, token_ids: Sequence[int]) -> array[int]:
        """Return the whole input of a turn: tokens of the turn that it continues, then ``token_ids``. Changes nothing.

        Raises:
            ConfigError: the session is not open, the turn that it continues is unknown or in flight, the input is
                empty or too long, or the sessions keep too many tokens.
        """
        session = self._find(params.id)
        tokens = self._context(session, params)
        tokens.extend(token_ids)
        if not tokens:
            raise self._refusal("input_ids", "0 tokens", "is empty", "give at least one token")
        if len(tokens) > session.capacity_tokens:
            problem = f"with its session is longer than its capacity of {session.capacity_tokens}"
            raise self._refusal("input_ids", f"{len(tokens)} tokens", problem, "open a session of more capacity")
        num_kept = self.num_text_tokens - (session.num_text_tokens if session.is_streaming else 0)
        if num_kept + len(tokens) > self.limits.max_text_tokens:
            problem = f"with the {num_kept} that sessions keep are more than the {self.limits.max_text_tokens} allowed"
            raise self._refusal("input_ids", f"{len(tokens)} tokens", problem, "close a session, or try again later")
        return tokens

    def begin_turn(self, params: SessionParams, rid: str) -> tuple[str, ...]:
        """Record that a request is in flight. Call ``extend`` before, and submit its tokens.

        Returns:
            The turns in flight that this one replaces. Abort them.
        """
        session = self._find(params.id)
        replaced = session.forget_children(params.rid) if params.replace else ()
        self._count_text(session)
        session.in_flight[rid] = self._parent_of(session, params)
        self._touch(session)
        return replaced

    def cancel_turn(self, session_id: str, rid: str) -> None:
        """Handle that a turn has ended before it computed anything. It cannot be continued."""
        session = self._sessions.get(session_id)
        if session is not None and rid in session.in_flight:
            del session.in_flight[rid]
            self._touch(session)
            self._close_if_unused(session)

    # --- in a step ---

    def fill(self, proposal: Proposal) -> None:
        """Add nothing to the agreement: the table needs its time only."""

    def apply(self, step: int, agreed: AgreedValues) -> None:
        """Close idle sessions by the agreed time."""
        self.step(agreed.now_s)

    def step(self, now_s: float) -> tuple[str, ...]:
        """Close the sessions that have been idle for their timeout, and return their ids.

        Args:
            now_s: the agreed time of this step.
        """
        self.now_s = now_s
        for session in self._touched.values():
            self._use(session)
        self._touched.clear()
        if now_s < self._next_due_s:
            return ()
        idle = [session for session in self._sessions.values() if not session.in_flight]
        expired = [session for session in idle if now_s - session.last_used_s >= session.timeout_s]
        for session in expired:
            self._counts["reaped"] += 1
            self.decisions.note("expire", "sessions", session.session_id)
            self._remove(session)
        kept = (session for session in idle if session.session_id in self._sessions)
        self._next_due_s = min((session.last_used_s + session.timeout_s for session in kept), default=math.inf)
        return tuple(session.session_id for session in expired)

    def end_turn(
        self,
        session_id: str,
        rid: str,
        token_ids: Sequence[int],
        *,
        num_input_tokens: int,
        reason: FinishReason,
        namespace: PrefixNamespace,
    ) -> None:
        """Keep the tokens of a turn that has ended, and lock its pages. No effect if its session is closed.

        As in SGLang, a turn that was aborted can be continued, except in a streaming session, whose next turn continues
        the one before. A turn that ended for any other reason cannot be continued.

        Args:
            session_id, rid: as given to ``begin_turn``.
            token_ids: input and output. Their full pages are in the cache.
            num_input_tokens: length of the input.
            reason: why it has ended.
            namespace: identifies the prefix together with its tokens.
        """
        session = self._sessions.get(session_id)
        if session is None or rid not in session.in_flight:
            return
        parent = session.in_flight.pop(rid)
        is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if is_complete or (reason is FinishReason.ABORT and not session.is_streaming):
            if session.is_streaming:
                session.turns.clear()
            session.turns[rid] = _Turn(array("I", token_ids), num_input_tokens, parent)
            if len(session.turns) > self.limits.max_turns:
                del session.turns[next(iter(session.turns))]
            self._count_text(session)
            while self.num_text_tokens > self.limits.max_text_tokens:
                del session.turns[next(iter(session.turns))]
                self._count_text(session)
            if session.turns:
                self._counts["turns"] += 1
                if not session.is_closing:
                    self._hold(session, token_ids, namespace)
        if reason is FinishReason.ABORT:
            self._touch(session)  # between two steps, where the last agreed time may be old
        else:
            self._use(session)
        self._close_if_unused(session)

    def release_next(self, num_missing: int = 1) -> bool:
        """Release the pages of the least recently used session.

        Return False, without a change, if all sessions together hold fewer than ``num_missing`` pages.
        """
        if not self._holding or self.num_held_pages < num_missing:
            return False
        self._release_early(next(iter(self._holding.values())))
        return True

    def release_all(self) -> int:
        """Release the pages of all sessions, for a clear of the cache, and return their number. They stay open."""
        num_pages = self.num_held_pages
        for session in list(self._holding.values()):
            self._release_early(session)
        return num_pages

    # --- what others read ---

    @property
    def num_held_pages(self) -> int:
        """Pages that sessions have locked; a page that two sessions share counts twice."""
        return self._counts["held_pages"]

    @property
    def num_text_tokens(self) -> int:
        """Tokens of all turns that can be continued."""
        return self._counts["text_tokens"]

    def count_held(self) -> HeldCount:
        """Return zero: the cache owns all pages of sessions."""
        return _NOTHING_OWNED

    def holdings(self) -> Iterator[PageHolding]:
        """Yield each locked prefix."""
        for session in self._holding.values():
            yield PageHolding(session.session_id, "session", (), session.pages, session.node)

    def stats(self) -> SessionStats:
        return SessionStats(open=len(self._sessions), **self._counts)

    # --- internals ---

    def _find(self, session_id: str) -> _Session[Node]:
        session = self._sessions.get(session_id)
        if session is None or session.is_closing:
            problem = "is not open: never opened, closed, or idle for too long"
            raise self._refusal("session_id", session_id, problem, "open a session")
        return session

    def _context(self, session: _Session[Node], params: SessionParams) -> array[int]:
        """Return the tokens that a turn continues."""
        if session.is_streaming:
            self._check_streaming(session, params)
        parent = self._parent_of(session, params)
        if parent is None:
            return array("I")
        turn = session.turns.get(parent)
        if turn is None:
            problem = "is still in flight" if parent in session.in_flight else f"is no turn of {session.session_id!r}"
            hint = "continue one of the last turns that have ended"
            raise self._refusal("session_params.rid", parent, problem, hint)
        end = turn.num_input_tokens if params.drop_previous_output else len(turn.tokens)
        offset = params.offset or end
        if not 0 <= offset <= end:
            hint = f"give 1 to {end}, or 0 for all"
            raise self._refusal("session_params.offset", offset, f"is outside the {end} tokens of {parent!r}", hint)
        return turn.tokens[:offset]

    def _check_streaming(self, session: _Session[Node], params: SessionParams) -> None:
        for name in ("replace", "drop_previous_output", "offset"):
            if getattr(params, name):
                problem = "is not possible in a streaming session"
                raise self._refusal(f"session_params.{name}", getattr(params, name), problem, "leave it out")
        if session.in_flight:
            problem = "has a turn in flight, and a streaming session has one at a time"
            raise self._refusal("session_params.id", session.session_id, problem, "wait for its end")

    @staticmethod
    def _parent_of(session: _Session[Node], params: SessionParams) -> str | None:
        return next(iter(session.turns), None) if session.is_streaming else params.rid

    def _touch(self, session: _Session[Node]) -> None:
        """Count the idle time of a session from the next agreed time on."""
        self._touched[session.session_id] = session

    def _use(self, session: _Session[Node]) -> None:
        """Make a session the most recently used one, at the agreed time of this step."""
        session.last_used_s = self.now_s
        self._next_due_s = min(self._next_due_s, session.last_used_s + session.timeout_s)
        if session.session_id in self._holding:
            self._holding[session.session_id] = self._holding.pop(session.session_id)

    def _count_text(self, session: _Session[Node]) -> None:
        """Count the turns of a session that were added or forgotten."""
        num_before = session.num_text_tokens
        session.num_text_tokens = sum(len(turn.tokens) for turn in session.turns.values())
        self._counts["text_tokens"] += session.num_text_tokens - num_before

    def _hold(self, session: _Session[Node], token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        """Lock the cached prefix of a turn instead of the session's earlier one."""
        match = self.cache.match_prefix(token_ids, namespace)
        num_pages = len(match.page_array)
        if num_pages:
            self.cache.lock(match.node)
        self._release(session)
        if not num_pages:
            return
        session.node, session.pages = match.node, match.page_array
        self._holding[session.session_id] = session
        self._counts["held_pages"] += num_pages
        while self.num_held_pages > self.limits.max_pages:
            self._release_early(next(iter(self._holding.values())))

    def _release_early(self, session: _Session[Node]) -> None:
        self.decisions.note("apply", "sessions", "release", session.session_id, len(session.pages))
        self._counts["pages_released"] += len(session.pages)
        self._release(session)

    def _release(self, session: _Session[Node]) -> None:
        """Unlock the prefix of a session, if it has one."""
        if session.node is None:
            return
        self.cache.unlock(session.node)
        self._counts["held_pages"] -= len(session.pages)
        session.node, session.pages = None, ()
        del self._holding[session.session_id]

    def _close_if_unused(self, session: _Session[Node]) -> None:
        if session.is_closing and not session.in_flight:
            self._remove(session)

    def _remove(self, session: _Session[Node]) -> None:
        self._release(session)
        session.turns.clear()
        self._count_text(session)
        del self._sessions[session.session_id]
        self._touched.pop(session.session_id, None)

    def _refusal(self, name: str, value: object, problem: str, hint: str) -> ConfigError:
        self._counts["refused"] += 1
        return ConfigError(name, value, problem, hint)
