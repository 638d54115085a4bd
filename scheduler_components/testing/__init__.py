"""The test kit for parts of your own: checks, state machines, strategies, fakes, golden bytes, the judge of streams.

Only strategies and machines need Hypothesis (the extra ``testing``); everything else runs with what the kit itself
installs, and nothing needs pytest. Read ``interfaces`` first: what is asked of a part of yours, and how a check fails.

- checks: ``*_CHECKS`` are tuples of plain functions over a part of yours. Each raises ``ConformanceError`` with its
  ``CheckTrace``: what was done, what was expected and what came.
- machines: ``*Machine`` are Hypothesis state machines to subclass; ``strategies`` make what they and you feed to parts.
- fakes: clock, sources, sinks, device and network with plain attributes; ``ScriptedPublisher`` is a publisher on real
  sockets whose every fault is an attribute; ``run_ranks`` runs agreeing ranks on threads.
- judge: ``RULES`` are the rules that a live stream is judged by, ``SPECIFICATION`` all. ``EventLedger`` applies events
  and reports the rules that they break, ``stream_verifier`` does it for recorded frames, ``probe_streams`` records
  them.
  ``PoolVerifier`` compares a stream with what the pool really holds; ``GreedyTextVerifier`` compares greedy text with
  that of
  transformers' ``generate`` (needs torch and transformers).
- golden: bytes of every dialect and peer, with their reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components.testing import golden, interfaces, stream_verifier
from scheduler_components.testing.control_checks import PROFILER_CHECKS, STATE_HOLDER_CHECKS
from scheduler_components.testing.event_ledger import EventLedger
from scheduler_components.testing.fakes import (
    ChainEventGenerator,
    FakeClock,
    FakeLoad,
    FakePool,
    FakeQueues,
    FakeRequest,
    Fault,
    FaultyNetwork,
    InstantDevice,
    ListEventSink,
    ListInputSource,
    ListOutputSink,
    ListRefusalSink,
    ListSink,
    PagedModel,
    ScriptedEventSource,
    TextInputReader,
)
from scheduler_components.testing.interfaces import CheckTrace, ConformanceError
from scheduler_components.testing.page_store_checks import IN_PLACE_STORE_CHECKS, PAGE_STORE_CHECKS
from scheduler_components.testing.pool_verifier import PoolDifference, PoolVerifier
from scheduler_components.testing.prefix_cache_checks import PREFIX_CACHE_CHECKS
from scheduler_components.testing.quiesce_checks import QUIESCE_CHECKS
from scheduler_components.testing.recorder_checks import RECORDER_CHECKS
from scheduler_components.testing.rules import RULES, SPECIFICATION, Rule, RuleSeverity, Violation
from scheduler_components.testing.scheduler_checks import POOL_INVARIANT_CHECKS, POOL_STREAM_CHECKS, SCHEDULER_CHECKS

if TYPE_CHECKING:
    from scheduler_components.testing import strategies
    from scheduler_components.testing.machines import (
        FollowerMachine,
        PageStoreMachine,
        PrefixCacheMachine,
        RecorderMachine,
    )
    from scheduler_components.testing.subscriber_checks import SUBSCRIBER_CHECKS
    from scheduler_components.testing.thread_ranks import ThreadSyncHub, run_ranks
    from scheduler_components.testing.thread_request_receiver_checks import RECEIVER_CHECKS
    from scheduler_components.testing.torch_greedy_text_verifier import GeneratedText, GreedyTextVerifier, NearTie
    from scheduler_components.testing.zmq_publisher_checks import PUBLISHER_CHECKS
    from scheduler_components.testing.zmq_scripted_publisher import ScriptedPublisher
    from scheduler_components.testing.zmq_stream_probe import ProbeOptions, probe_streams

__all__ = [
    # checks
    "POOL_INVARIANT_CHECKS",
    "RECEIVER_CHECKS",
    "IN_PLACE_STORE_CHECKS",
    "PAGE_STORE_CHECKS",
    "POOL_STREAM_CHECKS",
    "PREFIX_CACHE_CHECKS",
    "PROFILER_CHECKS",
    "STATE_HOLDER_CHECKS",
    "PUBLISHER_CHECKS",
    "RECORDER_CHECKS",
    "QUIESCE_CHECKS",
    "SCHEDULER_CHECKS",
    "SUBSCRIBER_CHECKS",
    "ConformanceError",
    "CheckTrace",
    "interfaces",
    # machines
    "FollowerMachine",
    "PageStoreMachine",
    "PrefixCacheMachine",
    "RecorderMachine",
    "strategies",
    # fakes
    "ChainEventGenerator",
    "FakeClock",
    "FakeLoad",
    "FakePool",
    "FakeQueues",
    "FakeRequest",
    "Fault",
    "FaultyNetwork",
    "InstantDevice",
    "ListEventSink",
    "ListInputSource",
    "ListOutputSink",
    "ListRefusalSink",
    "ListSink",
    "PagedModel",
    "ScriptedEventSource",
    "ScriptedPublisher",
    "TextInputReader",
    "ThreadSyncHub",
    "run_ranks",
    # judge
    "RULES",
    "SPECIFICATION",
    "EventLedger",
    "GreedyTextVerifier",
    "GeneratedText",
    "NearTie",
    "PoolDifference",
    "PoolVerifier",
    "ProbeOptions",
    "Rule",
    "Violation",
    "RuleSeverity",
    "probe_streams",
    "stream_verifier",
    # golden
    "golden",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.testing.machines": "FollowerMachine PageStoreMachine PrefixCacheMachine RecorderMachine",
        "scheduler_components.testing.strategies": "strategies",
        "scheduler_components.testing.subscriber_checks": "SUBSCRIBER_CHECKS",
        "scheduler_components.testing.thread_request_receiver_checks": "RECEIVER_CHECKS",
        "scheduler_components.testing.thread_ranks": "ThreadSyncHub run_ranks",
        "scheduler_components.testing.torch_greedy_text_verifier": "GreedyTextVerifier GeneratedText NearTie",
        "scheduler_components.testing.zmq_stream_probe": "ProbeOptions probe_streams",
        "scheduler_components.testing.zmq_publisher_checks": "PUBLISHER_CHECKS",
        "scheduler_components.testing.zmq_scripted_publisher": "ScriptedPublisher",
    },
)
