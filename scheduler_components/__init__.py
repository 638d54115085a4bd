"""Small parts that LLM-inference schedulers are composed of.

The components are here; what needs pyzmq, pydantic or torch is imported from its own module when it is used.
"""

from scheduler_components._version import __version__
from scheduler_components.cache.radix_cache import RadixCache
from scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from scheduler_components.load.queue import TokenCountedQueue
from scheduler_components.load_inquirer import LoadInquirer
from scheduler_components.metrics_emitter import MetricsEmitter
from scheduler_components.parallel_state import ParallelState

__all__ = [
    "LoadInquirer",
    "MetricsEmitter",
    "ParallelState",
    "RadixCache",
    "SchedulerKvEventsPublisher",
    "TokenCountedQueue",
    "__version__",
]
