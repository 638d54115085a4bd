"""The test kit: checks, fakes, machines, strategies, golden bytes and the judge of live streams, for your own parts.

Only strategies and machines need Hypothesis (the extra ``testing``); everything else runs with what the kit itself
installs, and nothing needs pytest.

- ``*_CHECKS``: plain functions over a part of yours; each raises ``ConformanceError`` with what was done, what was
  expected and what came. ``parts`` lists what each check asks of the part.
- ``EventLedger``, ``RULES``: what a stream's events add up to, and every rule that they can break; ``judge_stream``
  applies them to recorded frames.
- ``Fake*``, ``List*``, ``Scripted*``: clock, sinks, sources, device, network and a publisher with every fault as an
  attribute.
- ``*Machine``: Hypothesis state machines to subclass.
- ``strategies``: topologies, endpoints, configurations, event histories, workloads, network faults.
- ``golden``: bytes of every dialect and peer, with their reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names
from scheduler_components.testing.fakes import (
    FakeClock,
    FakeLoad,
    FakeParts,
    FakePool,
    FakeQueues,
    FakeRates,
    FakeRequest,
    Fault,
    FaultyNetwork,
    InstantDevice,
    ListEventSink,
    ListKvMetricsSink,
    ListLoadSink,
    ListMetricsSink,
    ListOutputSink,
    ScriptedEvents,
)
from scheduler_components.testing.ledger import RULES, EventLedger, Violation, Weight
from scheduler_components.testing.page_store_checks import PAGE_STORE_CHECKS
from scheduler_components.testing.parts import ChainHistory, ConformanceError, MetricReader, Trace
from scheduler_components.testing.prefix_cache_checks import PREFIX_CACHE_CHECKS
from scheduler_components.testing.scheduler_checks import SCHEDULER_CHECKS
from scheduler_components.testing.stream_judge import (
    Expectations,
    ReplayAnswer,
    StreamFacts,
    StreamRecord,
    StreamVerdict,
    judge_stream,
)

if TYPE_CHECKING:
    from scheduler_components.testing.machines import FollowerMachine, PageStoreMachine, PrefixCacheMachine
    from scheduler_components.testing.subscriber_checks import SUBSCRIBER_CHECKS
    from scheduler_components.testing.thread_ranks import ThreadSyncHub, hops_of, run_ranks
    from scheduler_components.testing.zmq_probe import ProbeOptions, probe_streams
    from scheduler_components.testing.zmq_publisher_checks import PUBLISHER_CHECKS
    from scheduler_components.testing.zmq_scripted_publisher import ScriptedPublisher, open_scripted_publisher

__all__ = [
    "ChainHistory",
    "ConformanceError",
    "EventLedger",
    "Expectations",
    "FakeClock",
    "FakeLoad",
    "FakeParts",
    "FakePool",
    "FakeQueues",
    "FakeRates",
    "FakeRequest",
    "Fault",
    "FaultyNetwork",
    "FollowerMachine",
    "InstantDevice",
    "ListEventSink",
    "ListKvMetricsSink",
    "ListLoadSink",
    "ListMetricsSink",
    "ListOutputSink",
    "PageStoreMachine",
    "PrefixCacheMachine",
    "ProbeOptions",
    "ReplayAnswer",
    "ScriptedEvents",
    "ScriptedPublisher",
    "StreamFacts",
    "StreamRecord",
    "StreamVerdict",
    "ThreadSyncHub",
    "Trace",
    "Violation",
    "Weight",
    "MetricReader",
    "PAGE_STORE_CHECKS",
    "PREFIX_CACHE_CHECKS",
    "PUBLISHER_CHECKS",
    "RULES",
    "SCHEDULER_CHECKS",
    "SUBSCRIBER_CHECKS",
    "hops_of",
    "judge_stream",
    "open_scripted_publisher",
    "probe_streams",
    "run_ranks",
]

__getattr__ = lazy_names(
    __name__,
    {
        "scheduler_components.testing.machines": "FollowerMachine PageStoreMachine PrefixCacheMachine",
        "scheduler_components.testing.subscriber_checks": "SUBSCRIBER_CHECKS",
        "scheduler_components.testing.thread_ranks": "ThreadSyncHub hops_of run_ranks",
        "scheduler_components.testing.zmq_probe": "ProbeOptions probe_streams",
        "scheduler_components.testing.zmq_publisher_checks": "PUBLISHER_CHECKS",
        "scheduler_components.testing.zmq_scripted_publisher": ("ScriptedPublisher open_scripted_publisher"),
    },
)
