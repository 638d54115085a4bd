"""A plugin for tests that lets one TP rank of SGLang take one decision by a fact of its own.

``SGLANG_DIVERGENCE`` names the decision. The rank takes it once, for the request whose id begins with ``victim``.
"""

import os
import time
from types import SimpleNamespace

from sglang.srt.constrained import grammar_manager
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.managers.scheduler_components import flush_wrapper
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.session import session_controller

ODD_RANK = 1
PLANTS = {}


def load_plugin():
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", start, HookType.AFTER)


def start(_, scheduler, *__, **___):
    name = os.environ.get("SGLANG_DIVERGENCE", "")
    if name and get_parallel().tp_rank == ODD_RANK:
        PLANTS[name](scheduler)
    if name == "grammar":
        compile_slowly(scheduler)


def plant(function):
    PLANTS[function.__name__] = function
    return function


def is_victim(request):
    return request.rid.startswith("victim")


def fast_clock():
    """A clock that shows a thousand seconds after each second."""
    began = time.monotonic()
    return SimpleNamespace(monotonic=lambda: began + 1000 * (time.monotonic() - began))


@plant
def session(scheduler):
    """The clock of one rank is faster, so a session is idle for too long there first."""
    session_controller.time = fast_clock()


@plant
def flush(scheduler):
    """The clock of one rank is faster, so a flush that waits for running requests gives up there first."""
    flush_wrapper.time = fast_clock()


@plant
def expiry(scheduler):
    """One rank drops a waiting request by its own clock."""
    process = scheduler.process_input_requests

    def process_and_expire(messages):
        process(messages)
        for request in [each for each in scheduler.waiting_queue if is_victim(each)]:
            scheduler.abort_request(AbortReq(rid=request.rid, abort_message="waiting timeout"))

    scheduler.process_input_requests = process_and_expire


@plant
def admission(scheduler):
    """One rank skips the admission of a request once."""
    base = scheduler.get_prefill_adder_class()
    skipped = []

    class Skips(base):
        def add_one_req(self, req, **kwargs):
            if is_victim(req) and not skipped:
                skipped.append(req)
                return AddReqResult.OTHER
            return super().add_one_req(req, **kwargs)

    scheduler.get_prefill_adder_class = lambda: Skips


@plant
def eviction(scheduler):
    """One rank reads a cached prefix once more before it evicts, so another page is the oldest there."""
    cache, keys = scheduler.tree_cache, []
    match, evict = cache.match_prefix, cache._evict_components

    def match_and_keep(params):
        if not keys:
            keys.append(params.key)
        return match(params)

    def touch_and_evict(*args, **kwargs):
        cache.tree_core.match_prefix(MatchPrefixParams(key=keys[0]))
        return evict(*args, **kwargs)

    cache.match_prefix, cache._evict_components = match_and_keep, touch_and_evict


@plant
def retraction(scheduler):
    """One rank retracts the oldest running request instead of the youngest."""
    original = ScheduleBatch._get_decode_retraction_order
    ScheduleBatch._get_decode_retraction_order = staticmethod(lambda reqs: original(reqs)[::-1])


@plant
def token(scheduler):
    """One rank computes another token, as floats that are added in another order may do."""
    run_batch, left = scheduler.run_batch, [1]

    def run_and_change(batch, *args, **kwargs):
        result = run_batch(batch, *args, **kwargs)
        for at, request in enumerate(batch.reqs):
            if left and is_victim(request) and batch.forward_mode.is_decode():
                left.clear()
                result.next_token_ids[at] = (int(result.next_token_ids[at]) + 1) % 1000
        return result

    scheduler.run_batch = run_and_change


@plant
def grammar(scheduler):
    """One rank takes a grammar when it is ready there, without waiting for the other."""
    manager = scheduler.grammar_manager
    gather = grammar_manager.torch.distributed.all_gather_object

    def gather_own(outputs, mine, group):
        gather(outputs, mine, group=group)
        outputs[:] = [mine] * len(outputs)

    distributed = SimpleNamespace(all_gather_object=gather_own)
    grammar_manager.torch = SimpleNamespace(distributed=distributed)
    assert manager.grammar_backend is not None


def compile_slowly(scheduler):
    """The other rank's grammars take two seconds longer."""
    backend = scheduler.grammar_manager.grammar_backend
    if get_parallel().tp_rank != ODD_RANK:
        dispatch = backend._init_value_dispatch

        def slow_dispatch(*args, **kwargs):
            time.sleep(2)
            return dispatch(*args, **kwargs)

        backend._init_value_dispatch = slow_dispatch
