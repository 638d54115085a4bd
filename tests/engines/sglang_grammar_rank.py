"""SGLang's own ``GrammarManager`` as the part that ``AGREEMENT_CHECKS`` exercise. Processes import it by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from sglang.srt.constrained.grammar_manager import GrammarManager

from scheduler_components.agreement import ParallelGroups

__all__ = ["SglangGrammarRank"]


class Request:
    """The members of SGLang's ``Req`` that its grammar manager uses."""

    def __init__(self, rid: str) -> None:
        self.rid, self.grammar_key, self.grammar_wait_ct = rid, ("regex", rid), 0
        self.grammar: Any = Future()
        self.problem = ""

    def finished(self) -> bool:
        return bool(self.problem)

    def set_finish_with_abort(self, problem: str) -> None:
        self.problem = self.problem or problem


class Grammar:
    def copy(self) -> Grammar:
        return self


class SglangGrammarRank:
    """One tensor-parallel rank. It gathers over gloo, as SGLang does over ``dp_tp_cpu_group``."""

    def __init__(self, groups: ParallelGroups, clock: Callable[[], float], leads: bool) -> None:
        self.manager: Any = object.__new__(GrammarManager)
        vars(self.manager).update(
            grammar_queue=[],
            grammar_backend=SimpleNamespace(set_cache=lambda key, value: None),
            grammar_sync_group=dist.group.WORLD,
            grammar_sync_size=dist.get_world_size(),
            pp_rank=0,
            pp_size=1,
            pp_group=None,
            SGLANG_GRAMMAR_POLL_INTERVAL=0.005,  # both as by default
            SGLANG_GRAMMAR_MAX_POLL_ITERATIONS=10_000,
        )

    def add(self, rid: str, timeout_s: float) -> bool:
        self.manager.grammar_queue.append(Request(rid))
        return True

    def report(self, rid: str, is_ready: bool) -> None:
        for request in self.manager.grammar_queue:
            if request.rid == rid and isinstance(request.grammar, Future) and not request.grammar.done():
                if is_ready:
                    request.grammar.set_result(Grammar())
                else:
                    request.grammar.set_exception(RuntimeError("this rank cannot"))

    def cancel(self, rid: str) -> None:
        for request in self.manager.grammar_queue:
            if request.rid == rid:  # as ``abort_requests``
                request.grammar.cancel()
                request.set_finish_with_abort("Aborted by AbortReq.")

    def step(self, step: int) -> list[tuple[str, str]]:
        left = []
        for request in self.manager.get_ready_grammar_requests():
            if "Aborted" not in request.problem:
                reason = "expired" if "timed out" in request.problem else "failed" if request.problem else "ready"
                left.append((request.rid, reason))
        return left
