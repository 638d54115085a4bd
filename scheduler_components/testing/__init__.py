"""The test kit for parts of your own: checks, state machines, strategies, fakes, golden bytes, the judge of streams.

Only strategies and machines need Hypothesis (the extra ``testing``); everything else runs with what the kit itself
installs, and nothing needs pytest. Read ``parts`` first: what is asked of a part of yours, and how a check fails.

- checks: ``*_CHECKS`` are tuples of plain functions over a part of yours. Each raises ``ConformanceError`` with its
  ``Trace``: what was done, what was expected and what came.
- machines: ``*Machine`` are Hypothesis state machines to subclass; ``strategies`` make what they and you feed to parts.
- fakes: clock, sources, sinks, device and network with plain attributes; ``ScriptedPublisher`` is a publisher on real
  sockets whose every fault is an attribute; ``run_ranks`` runs agreeing ranks on threads.
- judge: ``RULES`` are the rules that a live stream is judged by, ``SPECIFICATION`` all. ``EventLedger`` applies events
  and reports the rules that they break, ``stream_judge`` does it for recorded frames, ``probe_streams`` records them.
  ``PoolJudge`` compares a stream with what the pool really holds; ``GenerateJudge`` compares greedy text with that of
  transformers' ``generate`` (needs torch and transformers).
- golden: bytes of every dialect and peer, with their reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names
from scheduler_components.testing import golden, parts, stream_judge
from scheduler_components.testing.control_checks import PROFILER_CHECKS, STATE_HOLDER_CHECKS
from scheduler_components.testing.fakes import (
    ChainHistory,
    FakeClock,
    FakeLoad,
    FakePool,
    FakeQueues,
    FakeRequest,
    Fault,
    FaultyNetwork,
    InstantDevice,
    ListEventSink,
    ListInput,
    ListOutputSink,
    ListRefusals,
    ListSink,
    PagedModel,
    ScriptedEvents,
    TextReader,
)
from scheduler_components.testing.ledger import EventLedger
from scheduler_components.testing.page_store_checks import IN_PLACE_STORE_CHECKS, PAGE_STORE_CHECKS
from scheduler_components.testing.parts import ConformanceError, Trace
from scheduler_components.testing.pool_judge import PoolDifference, PoolJudge
from scheduler_components.testing.prefix_cache_checks import PREFIX_CACHE_CHECKS
from scheduler_components.testing.recorder_checks import RECORDER_CHECKS
from scheduler_components.testing.rest_checks import REST_CHECKS
from scheduler_components.testing.rules import RULES, SPECIFICATION, Rule, Violation, Weight
from scheduler_components.testing.scheduler_checks import AUDIT_CHECKS, POOL_CHECKS, SCHEDULER_CHECKS

if TYPE_CHECKING:
    from scheduler_components.testing import strategies
    from scheduler_components.testing.machines import (
        FollowerMachine,
        PageStoreMachine,
        PrefixCacheMachine,
        RecorderMachine,
    )
    from scheduler_components.testing.subscriber_checks import SUBSCRIBER_CHECKS
    from scheduler_components.testing.thread_intake_checks import INTAKE_CHECKS
    from scheduler_components.testing.thread_ranks import ThreadSyncHub, run_ranks
    from scheduler_components.testing.torch_generate import GeneratedText, GenerateJudge, NearTie
    from scheduler_components.testing.zmq_probe import ProbeOptions, probe_streams
    from scheduler_components.testing.zmq_publisher_checks import PUBLISHER_CHECKS
    from scheduler_components.testing.zmq_scripted_publisher import ScriptedPublisher

__all__ = [
    # checks
    "AUDIT_CHECKS",
    "INTAKE_CHECKS",
    "IN_PLACE_STORE_CHECKS",
    "PAGE_STORE_CHECKS",
    "POOL_CHECKS",
    "PREFIX_CACHE_CHECKS",
    "PROFILER_CHECKS",
    "STATE_HOLDER_CHECKS",
    "PUBLISHER_CHECKS",
    "RECORDER_CHECKS",
    "REST_CHECKS",
    "SCHEDULER_CHECKS",
    "SUBSCRIBER_CHECKS",
    "ConformanceError",
    "Trace",
    "parts",
    # machines
    "FollowerMachine",
    "PageStoreMachine",
    "PrefixCacheMachine",
    "RecorderMachine",
    "strategies",
    # fakes
    "ChainHistory",
    "FakeClock",
    "FakeLoad",
    "FakePool",
    "FakeQueues",
    "FakeRequest",
    "Fault",
    "FaultyNetwork",
    "InstantDevice",
    "ListEventSink",
    "ListInput",
    "ListOutputSink",
    "ListRefusals",
    "ListSink",
    "PagedModel",
    "ScriptedEvents",
    "ScriptedPublisher",
    "TextReader",
    "ThreadSyncHub",
    "run_ranks",
    # judge
    "RULES",
    "SPECIFICATION",
    "EventLedger",
    "GenerateJudge",
    "GeneratedText",
    "NearTie",
    "PoolDifference",
    "PoolJudge",
    "ProbeOptions",
    "Rule",
    "Violation",
    "Weight",
    "probe_streams",
    "stream_judge",
    # golden
    "golden",
]

__getattr__ = lazy_names(
    __name__,
    {
        "scheduler_components.testing.machines": "FollowerMachine PageStoreMachine PrefixCacheMachine RecorderMachine",
        "scheduler_components.testing.strategies": "strategies",
        "scheduler_components.testing.subscriber_checks": "SUBSCRIBER_CHECKS",
        "scheduler_components.testing.thread_intake_checks": "INTAKE_CHECKS",
        "scheduler_components.testing.thread_ranks": "ThreadSyncHub run_ranks",
        "scheduler_components.testing.torch_generate": "GenerateJudge GeneratedText NearTie",
        "scheduler_components.testing.zmq_probe": "ProbeOptions probe_streams",
        "scheduler_components.testing.zmq_publisher_checks": "PUBLISHER_CHECKS",
        "scheduler_components.testing.zmq_scripted_publisher": "ScriptedPublisher",
    },
)
