"""A plugin for tests that times the passes of SGLang's loop, and the parts of this kit's decision log within them.

The probe of the tests returns the figures with its answers, under ``passes``: one row per pass that ran a batch. A row
has the mode, the number of requests, the microseconds of the thread's processor time, of the process's and of the
clock, the thread's processor time in the log's notes and in its agreement, and the clock of the agreement.
"""

import time

import sglang_probe
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from scheduler_components.engines import sglang_decision_log

passes = sglang_probe.seen["passes"] = []
began = None
spent = {"notes": 0, "agreement": 0, "agreement clock": 0}


def load_plugin():
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.ingest_requests", on_pass, HookType.BEFORE)
    sglang_decision_log.note_calls = note_calls
    sglang_decision_log.SglangDecisionLog._schedule_and_agree = schedule_and_agree


def on_pass(scheduler, *_, **__):
    global began
    now = (time.thread_time_ns(), time.process_time_ns(), time.perf_counter_ns())
    batch = scheduler.last_batch
    if began is not None and batch is not None and len(passes) < 100_000:
        taken = [(after - before) / 1e3 for before, after in zip(began, now, strict=True)]
        passes.append([batch.forward_mode.name, batch.batch_size(), *taken, *(each / 1e3 for each in spent.values())])
    spent.update(dict.fromkeys(spent, 0))
    began = now


def note_calls(target, method, log, *, kind, values, original=sglang_decision_log.note_calls):
    def timed(result, args):
        started = time.thread_time_ns()
        try:
            return values(result, args)
        finally:
            spent["notes"] += time.thread_time_ns() - started

    return original(target, method, log, kind=kind, values=timed)


def schedule_and_agree(
    self, schedule, *args, original=sglang_decision_log.SglangDecisionLog._schedule_and_agree, **kwargs
):
    plan = schedule(*args, **kwargs)
    started, clock = time.thread_time_ns(), time.perf_counter_ns()
    original(self, lambda: plan)
    spent["agreement"] += time.thread_time_ns() - started
    spent["agreement clock"] += time.perf_counter_ns() - clock
    return plan
