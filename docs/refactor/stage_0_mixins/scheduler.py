"""A scheduler made of mixins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from scheduler_components import RadixCache
from scheduler_components.metrics import RateMeter
from scheduler_components.values import SchedulerCounters
from serving_parts.batching import (
    Batch,
    Counters,
    Work,
    admit,
    advance,
    check_fits,
    next_tokens,
    release,
    retract,
)
from serving_parts.request import Output, Request
from serving_parts.surroundings import Surroundings

from .ambient import get_clock, get_parallel, get_settings, set_surroundings
from .kv_events_mixin import KvEventsMixin
from .load_mixin import LoadMixin
from .metrics_mixin import MetricsMixin
from .output_mixin import OutputMixin


class Scheduler(KvEventsMixin, LoadMixin, MetricsMixin, OutputMixin):
    """Serves requests in steps."""

    def __init__(self, send_output: Callable) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.totals = SchedulerCounters()
        self.rates = RateMeter(clock=get_clock())
        self.cache = RadixCache(
            page_size=get_settings().page_size,
            capacity_tokens=get_settings().kv_tokens,
            record=get_parallel().owns_kv_stream,
        )
        self.init_kv_events()
        self.init_load()
        self.init_metrics()
        self.init_output(send_output)

    @property
    def num_chunked_tokens_left(self) -> int:
        return sum(request.num_prefill_tokens_left for request in self.running)

    def submit(self, request: Request) -> None:
        check_fits(request, get_settings())
        request.num_cached_tokens = self.cache.match_prefix(request.token_ids[:-1]).num_tokens
        self.waiting.append(request)
        self.totals.num_requests_total += 1

    def abort(self, rid: str) -> bool:
        request = next((each for each in [*self.running, *self.waiting] if each.rid == rid), None)
        if request is None:
            return False
        if request in self.waiting:
            self.waiting.remove(request)
        self.running = [each for each in self.running if each is not request]
        release(self.cache, request)
        self.totals.num_aborted_requests_total += 1
        self.send_output(Output(rid, (), "abort"))
        return True

    def next_batch(self) -> Batch:
        """Advance all running requests, retract the latest if pages run out, then admit waiting ones in order."""
        counters = Counters(self.totals, self.rates)
        works: list[Work] = []
        staying = list(self.running)
        while len(works) < len(staying):
            work = advance(self.cache, staying[len(works)], get_settings())
            if work is not None:
                works.append(work)
                continue
            victim = staying.pop()
            retract(self.cache, victim, counters)
            self.waiting.appendleft(victim)
        has_room = len(staying) >= len(self.running)  # no admission in a step that retracts
        while has_room and len(self.waiting) and len(works) < get_settings().max_running_requests:
            work = admit(self.cache, self.waiting[0], get_settings(), counters)
            if work is None:
                break
            self.waiting.popleft()
            works.append(work)
        return Batch(tuple(works), [work.request for work in works])

    def step(self) -> None:
        batch = self.next_batch()
        self.running = batch.running
        self.process_batch_result(batch, next_tokens(batch, get_settings()))
        self.publish_kv_events()
        self.emit_metrics()

    def close(self) -> None:
        self.close_kv_events()


def open_scheduler(around: Surroundings) -> Scheduler:
    """Make the scheduler. It finds its facts in the globals."""
    set_surroundings(around)
    return Scheduler(around.outbox.send)
