"""Two ranks of the reference scheduler whose threads compile grammars at different speed, and one of which fails."""

from __future__ import annotations

import threading

import msgspec
import pytest
from kit.grammars import GatedBackend

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.errors import GrammarError
from scheduler_components.testing.thread_ranks import run_ranks
from scheduler_components.values import FinishReason, GrammarStats, RequestState
from scheduler_components.waiting.agreed_queue import AgreedQueue
from scheduler_components.waiting.grammar_queue import GrammarQueue
from scheduler_components.waiting.thread_grammar_compiler import ThreadGrammarCompiler
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits, SamplingParams
from scheduler_engine.engine.config import GrammarConfig, SchedulerConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

pytestmark = [pytest.mark.threads, pytest.mark.ranks]


class Run(msgspec.Struct):
    """What one rank did. ``problems`` and ``stats`` may differ between ranks."""

    admitted: dict[str, int]
    reasons: dict[str, FinishReason | None]
    digest: int
    problems: dict[str, str]
    stats: GrammarStats


def request(rid: str, source: str) -> EngineRequest:
    limits = SamplingLimits(max_new_tokens=2, ignore_eos=True)
    return EngineRequest(rid, range(10), limits, sampling=SamplingParams(regex=source) if source else SamplingParams())


def test_ranks_admit_refuse_and_abort_together() -> None:
    """Rank 0 has every grammar first. The steps go on meanwhile, with a request that needs none."""
    opens, never = threading.Event(), threading.Event()
    backends = {
        0: GatedBackend(gates={"never": never}),
        1: GatedBackend(
            {"bad": GrammarError("unclosed group"), "broken": MemoryError("no room")}, {"slow": opens, "never": never}
        ),
    }

    def rank(groups: ParallelGroups) -> Run:
        parallel = ParallelState.from_tp_rank(groups.rank, tp_size=2)
        compiler = ThreadGrammarCompiler(open_backend=lambda: backends[groups.rank])
        queue = GrammarQueue(compiler=compiler, queue=AgreedQueue[EngineRequest](name="grammar", max_wait_s=60.0))
        scheduler = Scheduler.compose(
            SchedulerConfig(page_size=4, kv_tokens=256, grammar=GrammarConfig()),
            parallel,
            SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None),
            rooms=[queue],
            groups=groups,
        )
        requests = [request("slow", "slow"), request("bad", "bad"), request("same", "slow"), request("free", "")]
        requests += [request("broken", "broken"), request("aborted", "never")]
        for each in requests:
            scheduler.submit(each)
        admitted: dict[str, int] = {}
        while scheduler.has_work or len(scheduler.waiting.rooms):
            step = scheduler.step().step
            for each in requests:
                if each.state is not RequestState.WAITING:
                    admitted.setdefault(each.rid, step)
                if each.state is RequestState.RUNNING and each.grammar_key is not None:
                    assert each.grammar is not None, f"rank {groups.rank} runs {each.rid} without its grammar"
            if step == 20:
                assert scheduler.abort("aborted")
                if groups.rank == 0:
                    opens.set()
        queue.close()
        return Run(
            admitted,
            {each.rid: each.finish_reason for each in requests},
            scheduler.state_digest,
            {each.rid: each.problem for each in requests},
            queue.stats(),
        )

    try:
        first, second = run_ranks(ParallelState.from_tp_rank(0, tp_size=2), rank)
    finally:
        opens.set()
        never.set()
    assert (first.admitted, first.reasons, first.digest) == (second.admitted, second.reasons, second.digest)
    assert first.reasons == {
        "slow": FinishReason.LENGTH,
        "same": FinishReason.LENGTH,
        "free": FinishReason.LENGTH,
        "bad": FinishReason.REFUSED,
        "broken": FinishReason.ERROR,
        "aborted": FinishReason.ABORT,
    }
    assert first.admitted["free"] == 1
    assert first.admitted["slow"] == first.admitted["same"] > 20
    assert first.problems["bad"] == "grammar: failed on another rank"
    assert second.problems["bad"] == "grammar: regex: unclosed group"
    assert second.problems["broken"] == "grammar: regex: the compiler failed with MemoryError"
    assert (first.stats.waiting, first.stats.failed, second.stats.failed) == (0, 0, 2)
