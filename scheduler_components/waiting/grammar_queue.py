"""GrammarQueue: requests wait until every rank of the replica has compiled their grammar.

Each rank compiles each grammar, because each rank masks its logits. The threads end at different moments, one rank may
have the grammar in its cache, and one may fail alone. So "compiled" is a fact of one rank and decides nothing. The
``AgreedQueue`` releases a request in the step in which all ranks have its grammar. It refuses the request in the step
in which one rank reports that its source is no grammar, and fails it if the backend of a rank has an error. Time limits
compare with the agreed time. A grammar from the cache takes the same way, which costs its request the rest of a step,
or a few steps if more than 16 requests wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

from scheduler_components.agreement import AgreedValues, Proposal
from scheduler_components.errors import QueueFullError
from scheduler_components.ports import CompiledGrammar
from scheduler_components.values import GrammarKey, GrammarStats
from scheduler_components.waiting.agreed_queue import AgreedQueue
from scheduler_components.waiting.held_request import HeldRequest, RequestGrammar

__all__ = ["CompileResult", "GrammarCompiler", "GrammarQueue"]


R = TypeVar("R", bound=HeldRequest)


class CompileResult(msgspec.Struct, frozen=True):
    """The end of a compilation that a request waits for.

    Attributes:
        rid: the request.
        grammar: the compiled grammar; None if it cannot be compiled.
        problem: why not, in one sentence.
        is_error: the backend failed, so the source may be right.
    """

    rid: str
    grammar: CompiledGrammar | None
    problem: str = ""
    is_error: bool = False


class GrammarCompiler(Protocol):
    """Compiles grammars in the background. The scheduler's thread makes all calls."""

    def start(self, rid: str, key: GrammarKey) -> None:
        """Begin to compile the grammar of a request and return immediately."""
        ...

    def poll(self) -> Sequence[CompileResult]:
        """Return what has ended since the last call."""
        ...

    def cancel(self, rid: str) -> None:
        """Stop waiting for the grammar of a request: ``poll`` does not return it. No effect for an unknown one."""
        ...

    def stats(self) -> GrammarStats:
        """Return the counters of this compiler. Those of the queue are 0."""
        ...

    def close(self) -> None:
        """Compile nothing further. Safe to call twice."""
        ...


@dataclass(slots=True, kw_only=True)
class GrammarQueue(Generic[R]):
    """The ``WaitingRoom`` of requests with a grammar, and the ``StatsSource`` of ``GrammarStats``.

    Attributes:
        compiler: compiles on this rank.
        queue: the requests that wait, the same on all ranks.
    """

    compiler: GrammarCompiler
    queue: AgreedQueue[R] = field(default_factory=lambda: AgreedQueue(name="grammar", max_wait_s=30.0))
    _compiling: dict[str, R] = field(default_factory=dict, init=False, repr=False)  # on this rank

    def enter(self, request: R) -> bool:
        """Begin to compile the grammar of a request and return True; False if it has none.

        All ranks call it between the same two steps.

        Raises:
            QueueFullError: too many requests wait; nothing has changed.
        """
        key = request.grammar_key
        if key is None:
            return False
        if not self.queue.add(request.rid, request):
            raise QueueFullError(self.queue.name, self.queue.max_waiting)
        self._compiling[request.rid] = request
        self.compiler.start(request.rid, key)
        return True

    def end(self, request: R) -> None:
        """Release what this rank holds for a request that has ended. All ranks call it between the same two steps."""
        self.queue.cancel(request.rid)
        if self._compiling.pop(request.rid, None) is not None:
            self.compiler.cancel(request.rid)
        request.grammar = None

    def fill(self, proposal: Proposal) -> None:
        """Add which grammars this rank has compiled."""
        for result in self.compiler.poll():
            request = self._compiling.pop(result.rid)
            if result.grammar is None:
                assert request.grammar_key is not None
                report = self.queue.on_error if result.is_error else self.queue.on_failed
                report(result.rid, f"{request.grammar_key.kind}: {result.problem}")
            else:
                request.grammar = RequestGrammar(result.grammar, num_prompt_tokens=request.num_prompt_tokens)
                self.queue.on_ready(result.rid)
        self.queue.fill(proposal)

    def apply(self, step: int, agreed: AgreedValues) -> None:
        """Release or refuse the requests on which all ranks agreed."""
        self.queue.apply(step, agreed)

    def stats(self) -> GrammarStats:
        """Return the counters of the compiler and of the queue."""
        waits = self.queue.stats()
        return msgspec.structs.replace(
            self.compiler.stats(), waiting=waits.waiting, expired=waits.expired, refused=waits.refused
        )

    def close(self) -> None:
        """Compile nothing further. Safe to call twice."""
        self.compiler.close()
