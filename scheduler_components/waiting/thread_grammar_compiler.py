"""ThreadGrammarCompiler: compile grammars in a thread, each once, and keep them.

The scheduler's thread makes all calls. The worker runs only ``GrammarBackend.compile``, so it shares no state. Requests
with equal grammars wait for one compilation. A compilation that has not begun is cancelled when no request waits for it
any more; one that has begun ends, and its result is kept. A source that is no grammar is kept, too, so that a client
that repeats it does not occupy the worker.

The contents of the cache differ between ranks, because their threads are not equally fast. So a grammar from the cache
is a fact of this rank like a compiled one, and ``poll`` returns both.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import GrammarError, first_line
from scheduler_components.ports import GrammarBackend
from scheduler_components.values import GrammarKey, GrammarStats
from scheduler_components.waiting.grammar_queue import CompileResult

__all__ = ["ThreadGrammarCompiler"]

logger = logging.getLogger(__name__)

_COMPILING = "compiling a grammar"


_Job: TypeAlias = "tuple[Future[tuple[CompileResult, float]], list[str]]"
"""A compilation, which returns its duration, too, and the requests that wait for it. Their shared result has no id."""


def _one_worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="grammar")


@dataclass(slots=True, kw_only=True)
class ThreadGrammarCompiler:
    """The ``GrammarCompiler`` over a backend and one worker thread.

    One worker, because the ranks of a machine share its cores with their devices. The number of waiting compilations is
    bounded by the number of requests that the ``GrammarQueue`` admits.

    Attributes:
        open_backend: opens the backend at the first compilation, on the worker: reading a tokenizer may take seconds.
            If it raises, every compilation is an error with its text.
        max_cached: grammars that are kept; the one used least recently is dropped first. A JSON schema takes 0.1 to
            some megabytes.
        clock: monotonic seconds, for statistics.

    Raises:
        ConfigError: ``max_cached`` is below 1.
    """

    open_backend: Callable[[], GrammarBackend]
    max_cached: int = 128
    clock: Callable[[], float] = time.monotonic
    _worker: ThreadPoolExecutor = field(default_factory=_one_worker, init=False, repr=False)  # starts with its work
    _backend: GrammarBackend | None = field(default=None, init=False, repr=False)  # the worker's
    _open_problem: str = field(default="", init=False, repr=False)  # the worker's
    _jobs: dict[GrammarKey, _Job] = field(default_factory=dict, init=False, repr=False)
    _cache: OrderedDict[GrammarKey, CompileResult] = field(default_factory=OrderedDict, init=False, repr=False)
    _hits: list[CompileResult] = field(default_factory=list, init=False, repr=False)  # found in the cache
    _counts: GrammarStats = field(default_factory=GrammarStats, init=False, repr=False)
    _failures: FailureLog = field(default_factory=lambda: FailureLog(logger), init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("max_cached", self.max_cached)

    def start(self, rid: str, key: GrammarKey) -> None:
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self._hits.append(_result_for(rid, known))
            self._count(cache_hits=1)
        elif (job := self._jobs.get(key)) is not None:
            job[1].append(rid)
            self._count(joined=1)
        else:
            self._jobs[key] = self._worker.submit(self._compile, key), [rid]

    def poll(self) -> Sequence[CompileResult]:
        results, self._hits = self._hits, []
        for key, (future, rids) in list(self._jobs.items()):
            if future.done():
                del self._jobs[key]
                shared = self._result_of(future, key)
                results += (_result_for(rid, shared) for rid in rids)
        return results

    def cancel(self, rid: str) -> None:
        self._hits = [each for each in self._hits if each.rid != rid]
        for key, (future, rids) in self._jobs.items():
            if rid in rids:
                rids.remove(rid)
                if not rids and future.cancel():
                    del self._jobs[key]
                    self._count(cancelled=1)
                return

    def stats(self) -> GrammarStats:
        return msgspec.structs.replace(self._counts, compiling=len(self._jobs), cached=len(self._cache))

    def close(self) -> None:
        """Cancel what has not begun. The compilation that has begun ends on its thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _compile(self, key: GrammarKey) -> tuple[CompileResult, float]:
        """Compile on the worker."""
        started_s = self.clock()
        backend = self._opened()
        if backend is None:
            return CompileResult("", None, self._open_problem, is_error=True), 0.0
        grammar, problem = None, ""
        try:
            grammar = backend.compile(key)
        except GrammarError as error:
            problem = str(error)
        return CompileResult("", grammar, problem), self.clock() - started_s

    def _opened(self) -> GrammarBackend | None:
        """Return the backend. None if it cannot be opened, which is tried once."""
        if self._backend is None and not self._open_problem:
            try:
                self._backend = self.open_backend()
            except Exception as error:
                logger.exception("the grammar backend cannot be opened")
                self._open_problem = f"this engine cannot compile grammars ({first_line(error)})"
        return self._backend

    def _result_of(self, future: Future[tuple[CompileResult, float]], key: GrammarKey) -> CompileResult:
        """Return the result of a compilation, and keep it if it would be the same again."""
        error = future.exception()  # also a panic of a native library, which is no Exception
        if error is not None:
            self._failures.failed(_COMPILING, error)
            self._count(failed=1)
            return CompileResult("", None, f"the compiler failed with {type(error).__name__}", is_error=True)
        self._failures.succeeded(_COMPILING)
        result, duration_s = future.result()
        self._count(compiled=result.grammar is not None, failed=result.grammar is None, compile_s=duration_s)
        self._cache[key] = result
        if len(self._cache) > self.max_cached:
            self._cache.popitem(last=False)
        return result

    def _count(self, **more: float) -> None:
        added = {name: getattr(self._counts, name) + value for name, value in more.items()}
        self._counts = msgspec.structs.replace(self._counts, **added)


def _result_for(rid: str, shared: CompileResult) -> CompileResult:
    return msgspec.structs.replace(shared, rid=rid)
