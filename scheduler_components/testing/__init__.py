"""The test kit for parts that you write: checks, state machines, fakes, stream verification and golden bytes.

Start with ``interfaces``: it lists what each check asks of the part that it checks. ``strategies`` and ``machines``
need Hypothesis (the extra ``testing``). Everything else runs with the kit's own requirements, and nothing needs pytest.

- Checks: ``*_CHECKS`` are tuples of plain functions. Each takes a part, or a function that opens one, and raises
  ``ConformanceError`` with the steps, the expectation and the finding.
- Machines: ``*Machine`` are Hypothesis state machines. Subclass one and override one method. ``strategies`` generates
  workloads, events, histories and network faults.
- Fakes: ``fakes`` has sources and sinks, ``fake_device`` a device and a model, ``faulty_network`` a network.
  ``VirtualClock`` moves when you set it. ``ScriptedPublisher`` is a publisher on real sockets whose faults are
  attributes. ``run_ranks`` runs ranks on threads.
- Verification: ``rules`` is the table of the rules of KV events. ``EventLedger`` applies events and reports the rules
  that they break. ``stream_verifier`` verifies recorded frames, and ``zmq_stream_probe`` records them. ``PoolVerifier``
  compares a stream with the pool itself. ``torch_greedy_text_verifier`` compares greedy text with that of
  transformers' ``generate``.
- Golden bytes: ``golden`` has the bytes of each dialect and of each measured peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports
from scheduler_components._internal.virtual_clock import VirtualClock
from scheduler_components.testing.agreement_checks import AGREEMENT_CHECKS
from scheduler_components.testing.batcher_checks import BATCHER_CHECKS
from scheduler_components.testing.check_trace import CheckTrace, ConformanceError
from scheduler_components.testing.control_checks import PROFILER_CHECKS, STATE_HOLDER_CHECKS
from scheduler_components.testing.endpoint_checks import ENDPOINT_CHECKS, EndpointPromises
from scheduler_components.testing.event_ledger import EventLedger
from scheduler_components.testing.fake_device import PagedModel, next_token
from scheduler_components.testing.fakes import FakePool, FakeQueues, ListEventSink, ListOutputSink
from scheduler_components.testing.page_store_checks import IN_PLACE_STORE_CHECKS, PAGE_STORE_CHECKS
from scheduler_components.testing.policy_checks import POLICY_CHECKS, PolicyPromises, PolicyRequest
from scheduler_components.testing.pool_verifier import PoolVerifier
from scheduler_components.testing.prefix_cache_checks import BLOCK_TABLE_CACHE_CHECKS, PREFIX_CACHE_CHECKS
from scheduler_components.testing.quiesce_checks import QUIESCE_CHECKS
from scheduler_components.testing.recorder_checks import RECORDER_CHECKS
from scheduler_components.testing.scheduler_checks import POOL_INVARIANT_CHECKS, POOL_STREAM_CHECKS, SCHEDULER_CHECKS
from scheduler_components.testing.topology_checks import TOPOLOGY_CHECKS
from scheduler_components.testing.topology_space import Topology, TopologyRank, make_topology, topologies

if TYPE_CHECKING:
    from scheduler_components.testing.machines import (
        BatcherComparisonMachine,
        FollowerMachine,
        PageStoreMachine,
        PrefixCacheMachine,
        RecorderMachine,
    )
    from scheduler_components.testing.subscriber_checks import SUBSCRIBER_CHECKS
    from scheduler_components.testing.thread_ranks import ThreadRanks, run_ranks
    from scheduler_components.testing.thread_request_receiver_checks import RECEIVER_CHECKS
    from scheduler_components.testing.torch_ranks import TorchRanks
    from scheduler_components.testing.zmq_publisher_checks import PUBLISHER_CHECKS
    from scheduler_components.testing.zmq_scripted_publisher import ScriptedPublisher

__all__ = [
    # checks
    "AGREEMENT_CHECKS",
    "BATCHER_CHECKS",
    "BLOCK_TABLE_CACHE_CHECKS",
    "ENDPOINT_CHECKS",
    "IN_PLACE_STORE_CHECKS",
    "PAGE_STORE_CHECKS",
    "POLICY_CHECKS",
    "POOL_INVARIANT_CHECKS",
    "POOL_STREAM_CHECKS",
    "PREFIX_CACHE_CHECKS",
    "PROFILER_CHECKS",
    "PUBLISHER_CHECKS",
    "QUIESCE_CHECKS",
    "RECEIVER_CHECKS",
    "RECORDER_CHECKS",
    "SCHEDULER_CHECKS",
    "STATE_HOLDER_CHECKS",
    "SUBSCRIBER_CHECKS",
    "TOPOLOGY_CHECKS",
    "CheckTrace",
    "ConformanceError",
    "EndpointPromises",
    "PolicyPromises",
    "PolicyRequest",
    # topologies
    "Topology",
    "TopologyRank",
    "make_topology",
    "topologies",
    # machines
    "BatcherComparisonMachine",
    "FollowerMachine",
    "PageStoreMachine",
    "PrefixCacheMachine",
    "RecorderMachine",
    # fakes
    "VirtualClock",
    "FakePool",
    "FakeQueues",
    "ListEventSink",
    "ListOutputSink",
    "PagedModel",
    "ScriptedPublisher",
    "ThreadRanks",
    "TorchRanks",
    "next_token",
    "run_ranks",
    # verification
    "EventLedger",
    "PoolVerifier",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.testing.machines": (
            "BatcherComparisonMachine FollowerMachine PageStoreMachine PrefixCacheMachine RecorderMachine"
        ),
        "scheduler_components.testing.subscriber_checks": "SUBSCRIBER_CHECKS",
        "scheduler_components.testing.thread_request_receiver_checks": "RECEIVER_CHECKS",
        "scheduler_components.testing.thread_ranks": "ThreadRanks run_ranks",
        "scheduler_components.testing.torch_ranks": "TorchRanks",
        "scheduler_components.testing.zmq_publisher_checks": "PUBLISHER_CHECKS",
        "scheduler_components.testing.zmq_scripted_publisher": "ScriptedPublisher",
    },
)
