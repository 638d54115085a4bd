"""ThreadGrammarCompiler: one compilation per grammar, results for every request that still waits, and for no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from kit.grammar_replica import GrammarReplica
from kit.grammars import GatedBackend
from kit.waiting import wait_until

from scheduler_components import ConfigError, ParallelState
from scheduler_components.errors import GrammarError
from scheduler_components.ports import GrammarBackend
from scheduler_components.values import GrammarKey
from scheduler_components.waiting.grammar_queue import CompileResult
from scheduler_components.waiting.thread_grammar_compiler import ThreadGrammarCompiler

pytestmark = pytest.mark.threads


def key(source: str) -> GrammarKey:
    return GrammarKey("regex", source)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not any(each.name.startswith("grammar") for each in threading.enumerate()))


@contextmanager
def opened(
    backend: GatedBackend | Callable[[], GrammarBackend], *, max_cached: int = 8
) -> Iterator[ThreadGrammarCompiler]:
    """A compiler over a backend, or over what opens one."""
    gates = backend.gates if isinstance(backend, GatedBackend) else {}
    open_backend = (lambda: backend) if isinstance(backend, GatedBackend) else backend
    compiler = ThreadGrammarCompiler(open_backend=open_backend, max_cached=max_cached)
    try:
        yield compiler
    finally:
        for gate in gates.values():
            gate.set()
        compiler.close()


def drain(compiler: ThreadGrammarCompiler, number: int = 1) -> list[CompileResult]:
    """Poll until this many results have come."""
    results: list[CompileResult] = []
    wait_until(lambda: len(results) >= number, poll=lambda: results.extend(compiler.poll()))
    return results


def rids(results: Sequence[CompileResult]) -> list[str]:
    return [each.rid for each in results]


def test_requests_with_one_grammar_wait_for_one_compilation() -> None:
    backend = GatedBackend(gates={"a": threading.Event()})
    with opened(backend) as compiler:
        for rid in ("r1", "r2", "r3"):
            compiler.start(rid, key("a"))
        assert compiler.poll() == []
        assert compiler.stats().compiling == 1
        backend.gates["a"].set()
        results = drain(compiler, 3)
        assert rids(results) == ["r1", "r2", "r3"]
        assert len({id(each.grammar) for each in results}) == 1
        compiler.start("r4", key("a"))
        assert rids(compiler.poll()) == ["r4"]  # from the cache, without a thread
        stats = compiler.stats()
    assert backend.begun == ["a"]
    assert (stats.compiled, stats.joined, stats.cache_hits, stats.failed, stats.cached) == (1, 2, 1, 0, 1)
    assert stats.compile_s > 0


def test_a_source_that_is_no_grammar_fails_once_and_is_kept() -> None:
    backend = GatedBackend({"(": GrammarError("unclosed group")})
    with opened(backend) as compiler:
        compiler.start("r1", key("("))
        assert drain(compiler) == [CompileResult("r1", None, "unclosed group")]
        compiler.start("r2", key("("))
        assert compiler.poll() == [CompileResult("r2", None, "unclosed group")]
    assert backend.begun == ["("]
    assert compiler.stats().failed == 1


class NativePanicError(BaseException):
    """As pyo3's PanicException, which is no Exception."""


@pytest.mark.parametrize("error", [MemoryError("no room"), NativePanicError("panicked")])
def test_a_failure_of_the_library_fails_its_requests_and_is_not_kept(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    backend = GatedBackend({"a": error})
    with opened(backend) as compiler:
        compiler.start("r1", key("a"))
        problem = f"the compiler failed with {type(error).__name__}"
        assert drain(compiler) == [CompileResult("r1", None, problem, is_error=True)]
        backend.outcomes = {}
        compiler.start("r2", key("a"))
        assert drain(compiler)[0].grammar is not None
    assert backend.begun == ["a", "a"]
    assert compiler.stats().failed == 1
    assert "compiling a grammar failed" in caplog.text


def test_a_compilation_that_nothing_waits_for_is_cancelled_before_it_begins() -> None:
    backend = GatedBackend(gates={"slow": threading.Event()})
    with opened(backend) as compiler:
        compiler.start("r1", key("slow"))
        wait_until(lambda: backend.begun)
        compiler.start("r2", key("next"))
        compiler.start("r3", key("next"))
        compiler.cancel("r2")
        assert compiler.stats().cancelled == 0
        compiler.cancel("r3")
        compiler.cancel("unknown")
        assert compiler.stats().cancelled == 1
        compiler.cancel("r1")  # it has begun: its result is kept for the next request
        compiler.start("r4", key("slow"))
        backend.gates["slow"].set()
        assert rids(drain(compiler)) == ["r4"]
        assert compiler.poll() == []
    assert backend.begun == ["slow"]


def test_a_result_that_was_not_polled_is_cancelled() -> None:
    with opened(GatedBackend()) as compiler:
        compiler.start("r1", key("a"))
        drain(compiler)
        compiler.start("r2", key("a"))
        compiler.cancel("r2")
        assert compiler.poll() == []


def test_the_grammar_used_least_recently_is_dropped() -> None:
    backend = GatedBackend()
    with opened(backend, max_cached=2) as compiler:
        for source in ("a", "b", "a", "c", "a", "b"):
            compiler.start("r", key(source))
            drain(compiler)
        assert compiler.stats().cached == 2
    assert backend.begun == ["a", "b", "c", "b"]


def test_a_backend_that_cannot_be_opened_fails_every_grammar(caplog: pytest.LogCaptureFixture) -> None:
    num_opened = []

    def open_backend() -> GrammarBackend:
        num_opened.append(1)
        raise ConfigError("tokenizer", "", "cannot be read", "give another")

    with opened(open_backend) as compiler:
        compiler.start("r1", key("a"))
        compiler.start("r2", key("b"))
        problems = {(each.problem, each.is_error) for each in drain(compiler, 2)}
    assert problems == {("this engine cannot compile grammars (tokenizer='': cannot be read; give another)", True)}
    assert len(num_opened) == 1
    assert "the grammar backend cannot be opened" in caplog.text


def test_a_cache_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_cached=0"):
        ThreadGrammarCompiler(open_backend=GatedBackend, max_cached=0)


def test_two_ranks_whose_threads_are_not_equally_fast_admit_in_the_same_step() -> None:
    """The grammar of rank 0 is compiled and in its cache, while the thread of rank 1 still compiles."""
    slow = GatedBackend(gates={"a": threading.Event()})
    with opened(GatedBackend()) as fast_compiler, opened(slow) as slow_compiler:
        replica = GrammarReplica(ParallelState.from_tp_rank(0, tp_size=2), {0: fast_compiler, 1: slow_compiler})
        replica.enter("r1", key("a"))
        wait_until(lambda: fast_compiler.stats().cached, poll=lambda: replica.step(0.0))
        replica.enter("r2", key("a"))
        assert [replica.step(0.0) for _ in range(5)] == [[]] * 5
        slow.gates["a"].set()
        left: list[tuple[str, str]] = []
        wait_until(lambda: left, poll=lambda: left.extend(replica.step(0.0)))
    assert left == [("r1", "ready"), ("r2", "ready")]
