"""GrammarQueue: requests leave in the same step on all ranks, however differently the ranks compile."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.grammar_replica import GrammarReplica, GrammarUser, ManualCompiler
from kit.variants import found, instead_of, variants

from scheduler_components import ParallelState
from scheduler_components.errors import QueueDivergenceError, QueueFullError
from scheduler_components.values import GrammarKey
from scheduler_components.waiting.grammar_queue import GrammarQueue, RequestGrammar

TWO_RANKS = ParallelState.from_tp_rank(0, tp_size=2)
KEYS = [GrammarKey("regex", "a"), GrammarKey("json_schema", "{}"), GrammarKey("regex", "(")]
A, B, BAD = KEYS


def make_replica(
    world: ParallelState = TWO_RANKS,
    *,
    queue_type: type[GrammarQueue[GrammarUser]] = GrammarQueue,
    max_waiting: int = 5,
) -> tuple[GrammarReplica, dict[int, ManualCompiler]]:
    compilers = {rank: ManualCompiler() for rank in range(world.attn_cp_size * world.attn_tp_size * world.pp_size)}
    return GrammarReplica(world, compilers, queue_type=queue_type, max_waiting=max_waiting), compilers


class Event(msgspec.Struct, frozen=True):
    """A request enters or ends, or a rank (taken modulo the number of ranks) ends a compilation."""

    verb: str
    rid: str
    key: int
    rank: int


events = st.lists(
    st.lists(
        st.builds(
            Event,
            st.sampled_from(["enter", "enter", "finish", "finish", "finish", "end"]),
            st.sampled_from("abcdef"),
            st.integers(0, 2),
            st.integers(0, 3),
        ),
        max_size=5,
    ),
    min_size=1,
    max_size=15,
)
worlds = st.builds(
    lambda cp, tp, pp: ParallelState.from_tp_rank(0, tp_size=cp * tp, attn_cp_size=cp, pp_size=pp),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 2),
)


@given(worlds, events)
def test_requests_leave_in_the_same_step_whatever_ends_when(
    world: ParallelState, schedule: Sequence[Sequence[Event]]
) -> None:
    """``GrammarReplica.step`` compares the ranks. Here: who leaves, why, and that nothing is kept afterwards."""
    replica, compilers = make_replica(world, max_waiting=4)
    ended = [set[int]() for _ in compilers]
    waiting: dict[str, int] = {}
    for turn in schedule:
        for event in turn:
            if event.verb == "enter" and event.rid not in waiting:
                if len(waiting) == 4:
                    with pytest.raises(QueueFullError):
                        replica.leader.queue.enter(GrammarUser(event.rid, KEYS[event.key]))
                    for rank in list(replica.ranks.values())[1:]:  # all ranks get the same calls
                        with pytest.raises(QueueFullError):
                            rank.queue.enter(GrammarUser(event.rid, KEYS[event.key]))
                else:
                    assert replica.enter(event.rid, KEYS[event.key])
                    waiting[event.rid] = event.key
            elif event.verb == "finish":
                compilers[event.rank % len(compilers)].finish(KEYS[event.key], "no" if event.key == 2 else "")
                ended[event.rank % len(compilers)].add(event.key)
            elif event.verb == "end" and waiting.pop(event.rid, None) is not None:
                replica.end(event.rid)
        for rid, reason in replica.step(seconds=0.0):
            key = waiting.pop(rid)
            assert reason == ("failed" if key == 2 else "ready")
            assert any(key in each for each in ended) if key == 2 else all(key in each for each in ended)
    for rid, _ in replica.step(seconds=100.0):
        waiting.pop(rid)
    assert replica.step(seconds=100.0) == []
    assert not waiting
    for rank, compiler in zip(replica.ranks.values(), compilers.values(), strict=True):
        assert not compiler.waiting
        assert not compiler.results
        assert rank.queue.stats().waiting == 0


def test_a_failure_on_one_rank_refuses_the_request_on_all() -> None:
    replica, compilers = make_replica()
    replica.enter("r", BAD)
    compilers[0].finish(BAD)
    compilers[1].finish(BAD, "unclosed group")
    assert replica.step() == [("r", "failed")]
    assert [rank.problems["r"] for rank in replica.ranks.values()] == [
        "failed on another rank",
        "regex: unclosed group",
    ]
    assert all(rank.users["r"].grammar is None for rank in replica.ranks.values())


def test_an_error_of_one_backend_is_no_fault_of_the_request() -> None:
    replica, compilers = make_replica()
    replica.enter("r", A)
    compilers[0].finish(A)
    compilers[1].finish(A, "the compiler failed", is_error=True)
    assert replica.step() == [("r", "error")]
    assert [rank.problems["r"] for rank in replica.ranks.values()] == [
        "failed on another rank",
        "regex: the compiler failed",
    ]


def test_a_request_without_a_grammar_does_not_wait() -> None:
    replica, _ = make_replica()
    assert not replica.enter("r", None)
    replica.end("r")
    assert replica.step() == []


def test_statistics_are_those_of_the_compiler_and_of_the_queue() -> None:
    replica, compilers = make_replica(max_waiting=1)
    replica.enter("r", A)
    for rank in replica.ranks.values():
        with pytest.raises(QueueFullError, match="'grammar' holds 1 requests"):
            rank.queue.enter(GrammarUser("more", B))
    stats = replica.leader.queue.stats()
    assert (stats.waiting, stats.refused, stats.expired, stats.compiled) == (1, 1, 0, 0)
    replica.step(0.0)
    replica.step(6.0)
    compilers[0].finish(A)
    stats = replica.leader.queue.stats()
    assert (stats.waiting, stats.refused, stats.expired, stats.compiled) == (0, 1, 1, 1)


class BrokenQueue(GrammarQueue):
    @instead_of("enter", QueueDivergenceError)
    def admits_from_the_cache(self, request):
        """A request whose grammar this rank has does not wait, as a shortcut."""
        return request.grammar_key not in self.compiler.known and super().enter(request)

    @instead_of("fill", AssertionError)
    def ignores_failures(self, proposal):
        """A failed compilation is reported like a successful one."""
        for result in self.compiler.poll():
            self.queue.on_ready(result.rid)
        self.queue.fill(proposal)

    @instead_of("fill", AssertionError)
    def blames_the_request(self, proposal):
        """An error of the backend is reported as a bad grammar."""
        for result in self.compiler.poll():
            request = self._compiling.pop(result.rid)
            if result.grammar is None:
                self.queue.on_failed(result.rid, result.problem)
            else:
                request.grammar = RequestGrammar(result.grammar, num_prompt_tokens=0)
                self.queue.on_ready(result.rid)
        self.queue.fill(proposal)

    # A compilation that no request waits for is not cancelled.
    keeps_compiling = found(AssertionError, end=lambda self, request: self.queue.cancel(request.rid))

    @instead_of("fill", AssertionError)
    def writes_the_grammar_too_late(self, proposal):
        """The grammar is not there when the request leaves."""
        for result in self.compiler.poll():
            self._compiling.pop(result.rid)
            self.queue.on_ready(result.rid)
        self.queue.fill(proposal)


BROKEN = variants(BrokenQueue)


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", BROKEN)
def test_without_this_rule_the_ranks_differ(name: str) -> None:
    def verify(kind: type[GrammarQueue[GrammarUser]]) -> None:
        replica, compilers = make_replica(queue_type=kind)
        compilers[0].finish(A)
        replica.enter("r", A)
        replica.step()
        replica.enter("aborted", B)
        replica.end("aborted")
        assert not any("aborted" in compiler.waiting for compiler in compilers.values())
        compilers[1].finish(A)
        assert replica.step() == [("r", "ready")]
        replica.enter("bad", BAD)
        for compiler in compilers.values():
            compiler.finish(BAD, "unclosed group")
        assert replica.step() == [("bad", "failed")]
        replica.enter("good", B)
        compilers[0].finish(B, "no memory", is_error=True)
        assert replica.step() == [("good", "error")]

    verify(GrammarQueue)
    broken, error = BROKEN[name]
    with pytest.raises(error):
        verify(broken)
