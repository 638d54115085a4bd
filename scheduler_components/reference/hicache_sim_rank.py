"""One simulated rank: a small scheduler over a real hierarchical cache. Everything in it follows from its commands."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import attrs

from scheduler_components.cache.radix_tree import RadixNode
from scheduler_components.errors import OutOfPagesError
from scheduler_components.hicache.hi_radix_cache import HiRadixCache

__all__ = ["Commands", "SimulatedRequest", "SimulatedScheduler", "SimulatedWorkload"]


@attrs.frozen
class SimulatedRequest:
    """A prompt, and for how many steps it runs."""

    rid: str
    token_ids: tuple[int, ...]
    num_steps: int


@attrs.frozen
class Commands:
    """What all ranks are told before a step."""

    arrivals: tuple[SimulatedRequest, ...] = ()
    aborts: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class SimulatedWorkload:
    """Chats whose prompts grow turn by turn over a few shared beginnings; some requests are aborted.

    Attributes:
        seed: of everything in it.
        page_size: tokens a page.
        num_chats: that take turns; more of them reuse less.
        max_pages: where a chat begins anew.
    """

    seed: int
    page_size: int
    num_chats: int = 12
    max_pages: int = 14
    arrival_rate: float = 0.5
    abort_rate: float = 0.05

    def steps(self, num_steps: int) -> Iterator[Commands]:
        """The commands of each step."""
        rng = random.Random(self.seed)  # noqa: S311  a simulation
        num_pages = [2] * self.num_chats
        open_rids: list[str] = []
        for step in range(num_steps):
            arrivals = []
            if rng.random() < self.arrival_rate:
                chat = rng.randrange(self.num_chats)
                num_pages[chat] = num_pages[chat] % self.max_pages + rng.randint(1, 4)
                length = num_pages[chat] * self.page_size + rng.randrange(self.page_size)
                arrivals.append(SimulatedRequest(f"r{step}", self._tokens(chat, length), rng.randint(1, 6)))
                open_rids.append(f"r{step}")
            aborts: tuple[str, ...] = ()
            if open_rids and rng.random() < self.abort_rate:
                aborts = (open_rids.pop(rng.randrange(len(open_rids))),)
            del open_rids[:-8]
            yield Commands(tuple(arrivals), aborts)

    def _tokens(self, chat: int, length: int) -> tuple[int, ...]:
        shared = 2 * self.page_size
        return tuple((chat % 3 if at < shared else 1000 + chat * 100 + at) for at in range(length))


@dataclass(slots=True, kw_only=True)
class _Running:
    request: SimulatedRequest
    node: RadixNode
    pages: list[int]
    num_shared: int
    num_steps_left: int


@dataclass(slots=True, kw_only=True)
class SimulatedScheduler:
    """First come, first served; as many as the pool holds.

    Attributes:
        cache: real.
        max_running: slots.
        num_served: requests that ran to their end.
    """

    cache: HiRadixCache
    max_running: int = 4
    num_served: int = field(default=0, init=False)
    _waiting: list[SimulatedRequest] = field(default_factory=list, init=False)
    _running: list[_Running] = field(default_factory=list, init=False)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def step(self, commands: Commands) -> None:
        """Take in commands, move on what runs, let in what may."""
        for request in commands.arrivals:
            self._waiting.append(request)
            self.cache.preparations.expect(request.rid, request.token_ids)
        for rid in commands.aborts:
            self._abort(rid)
        for running in list(self._running):
            running.num_steps_left -= 1
            if running.num_steps_left <= 0:
                self._finish(running)
        self._admit()

    def _admit(self) -> None:
        for place, request in enumerate(self._waiting[:3]):
            ready = self.cache.preparations.is_ready(request.rid, request.token_ids, is_next=place == 0)
            if place == 0 and (not ready or len(self._running) >= self.max_running or not self._start(request)):
                return
            if place == 0:
                del self._waiting[0]
                return

    def _start(self, request: SimulatedRequest) -> bool:
        cache = self.cache
        match = cache.match_prefix(request.token_ids)
        cache.lock(match.node)
        num_pages = len(request.token_ids) // cache.page_size
        try:
            fresh = cache.allocate(num_pages - len(match.pages))
        except OutOfPagesError:
            cache.unlock(match.node)
            return False
        cache.preparations.book_admission(
            request.rid, prompt_tokens=len(request.token_ids), cached_tokens=match.num_tokens
        )
        self._running.append(
            _Running(
                request=request,
                node=match.node,
                pages=[*match.pages, *fresh],
                num_shared=len(match.pages),
                num_steps_left=request.num_steps,
            )
        )
        return True

    def _finish(self, running: _Running) -> None:
        self._running.remove(running)
        self.cache.insert(running.request.token_ids, running.pages)
        self.cache.unlock(running.node)
        self.num_served += 1

    def _abort(self, rid: str) -> None:
        self._waiting = [request for request in self._waiting if request.rid != rid]
        self.cache.preparations.forget(rid)
        for running in self._running:
            if running.request.rid == rid:
                self._running.remove(running)
                self.cache.free(running.pages[running.num_shared :])
                self.cache.unlock(running.node)
                return
