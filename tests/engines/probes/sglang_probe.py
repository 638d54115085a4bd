"""A plugin for tests that reports the cache and the messages of SGLang's scheduler from inside its process.

A question is a file in the directory that ``SGLANG_PROBE`` names. Each rank answers when its scheduler is idle. If this
kit's components are active, the probe keeps SGLang's own load inquirer over the same queues and compares both in each
step.
"""

import functools
import json
import os
import statistics
import time
from array import array
from pathlib import Path

import msgspec
from sglang.srt.managers.schedule_policy import CacheAwarePolicy, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

FOLDER = Path(os.environ["SGLANG_PROBE"])
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
PARTS = "sglang.srt.managers.scheduler_components"
answered = set()
inquirers = []
seen = {"events": [], "kv_metrics": [], "reports": 0, "different": [], "most_waiting": 0, "costs_us": None}
seen |= {"sorts": 0, "other_order": [], "verdicts": 0, "other_verdicts": [], "admitted": []}


def load_plugin():
    HookRegistry.register(f"{PARTS}.load_inquirer.SchedulerLoadInquirer.__init__", keep_inquirer, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.process_batch_result", compare_loads, HookType.BEFORE)
    HookRegistry.register(f"{SCHEDULER}.on_idle", answer, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.take_events", keep_events, HookType.AFTER
    )
    HookRegistry.register("sglang.srt.managers.io_struct.sock_send", keep_kv_metrics, HookType.BEFORE)
    if "SCHEDULER_COMPONENTS_SCHEDULING" in os.environ:
        HookRegistry.register(f"{SCHEDULER}.__init__", compare_decisions, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.get_new_batch_prefill", keep_batch, HookType.AFTER)


def compare_decisions(_, scheduler, *__, **___):
    """Wrap what the scheduler calls, outside of all hooks."""
    policy, sort, adder_class = scheduler.policy, scheduler.policy.calc_priority, scheduler.get_prefill_adder_class
    policy.calc_priority = functools.partial(compare_orders, sort, policy)
    scheduler.get_prefill_adder_class = functools.partial(compared_adder, adder_class)


def compare_orders(sort, policy, waiting, *args, **kwargs):
    """Sort a copy of the list by SGLang's own functions, after this kit has sorted the list."""
    copy, count = list(waiting), len(waiting)
    sort(waiting, *args, **kwargs)
    kind = policy._determine_active_policy(copy)
    if kind is CacheAwarePolicy.LPM:
        SchedulePolicy._sort_by_longest_prefix(copy, policy._compute_prefix_matches(copy, kind))
    if policy.enable_priority_scheduling:
        SchedulePolicy._sort_by_priority_and_fcfs(copy, policy.priority_sign)
    seen["sorts"] += 1
    seen["most_waiting"] = max(seen["most_waiting"], count)
    if copy != waiting:
        keys = [[(r.num_matched_prefix_tokens, r.rid) for r in each] for each in (copy, waiting)]
        seen["other_order"].append({"waiting": count, "theirs": keys[0], "ours": keys[1]})


@functools.cache
def compared_adder(adder_class):
    ours = adder_class()
    if ours is PrefillAdder:
        return ours

    class Compared(ours):
        def budget_state(self):
            return compared("budget_state", super().budget_state(), PrefillAdder.budget_state(self))

        def _check_prefill_budget(self, req, **demand):
            theirs = PrefillAdder._check_prefill_budget(self, req, **demand)
            return compared("check", super()._check_prefill_budget(req, **demand), theirs)

    return Compared


def compared(question, ours, theirs):
    seen["verdicts"] += 1
    if ours != theirs:
        seen["other_verdicts"].append((question, str(ours), str(theirs)))
    return ours


def keep_batch(plan, *_, **__):
    if plan.batch_to_run is not None:
        seen["admitted"].append([(r.rid, r.prefix_len, r.extend_len) for r in plan.batch_to_run.reqs])


def keep_inquirer(_, inquirer, **__):
    inquirers.append(inquirer)


def keep_events(events, _):
    seen["events"] += [msgspec.msgpack.encode(event).hex() for event in events]


def keep_kv_metrics(_, message, *__):
    if type(message).__name__ == "KvMetrics":
        seen["kv_metrics"].append(msgspec.structs.asdict(message))


def compare_loads(scheduler, *_, **__):
    theirs, ours = inquirers[-1], scheduler.load_inquirer
    if theirs is ours:
        return
    expected, found = (msgspec.structs.asdict(inquirer.get_loads()) for inquirer in (theirs, ours))
    expected, found = (msgspec.to_builtins(load | {"timestamp": 0}, enc_hook=float) for load in (expected, found))
    pending = (theirs._get_num_pending_tokens(7), ours._get_num_pending_tokens(7))
    seen["reports"] += 1
    seen["most_waiting"] = max(seen["most_waiting"], len(scheduler.waiting_queue))
    if expected != found or pending[0] != pending[1]:
        keys = [key for key in expected if expected[key] != found[key]]
        seen["different"].append({key: (expected[key], found[key]) for key in keys} | {"pending": pending})
    if len(scheduler.waiting_queue) >= 1_000 and seen["costs_us"] is None:
        seen["costs_us"] = costs_us(
            theirs=theirs.get_loads, ours=ours.get_loads, component=ours.loads.inquirer.get_loads
        )


def costs_us(**calls):
    """Return the median CPU time of one call of each function, measured in turns."""
    taken = {name: [] for name in calls}
    for _ in range(30):
        for name, call in calls.items():
            began = time.thread_time_ns()
            for _ in range(20):
                call()
            taken[name].append((time.thread_time_ns() - began) / 20_000)
    return {name: round(statistics.median(times), 2) for name, times in taken.items()}


def answer(_, scheduler):
    for question in FOLDER.glob("*.question"):
        if question in answered or not scheduler.is_fully_idle():
            continue
        answered.add(question)
        parallel = get_parallel()
        write_answer(
            f"{question.stem}.{parallel.dp_rank or 0}.{parallel.tp_rank}", resident(scheduler, question) | seen
        )


def write_answer(name, content):
    unfinished = FOLDER / f"{name}.unfinished"
    unfinished.write_text(json.dumps(content))
    unfinished.rename(FOLDER / f"{name}.answer")


def resident(scheduler, question):
    """Return the cached tokens of each prompt, the number of all cached tokens, and the modules of the components."""
    core = scheduler.tree_cache.tree_core
    prompts = json.loads(question.read_text())
    found = [core.match_full_device_prefix(RadixKey(array("q", prompt)))[0] for prompt in prompts]
    parts = [scheduler.kv_events_publisher, scheduler.load_inquirer, scheduler.load_publisher]
    return {"prompts": found, "total": core.total_size()[0], "parts": [type(part).__module__ for part in parts]}
