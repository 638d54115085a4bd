"""Follow policies of tests against real sockets and servers."""

from __future__ import annotations

from observability.kv_stream import FollowPolicy

FREQUENT_PROBES = FollowPolicy(probe_interval_s=0.1)
"""A subscriber notices soon what its publisher lacks."""

SOON_AGAIN = FollowPolicy(answer_timeout_s=2.0, retry_min_s=0.05, retry_max_s=0.5, dead_after_s=60.0)
"""A reader of a log tries again soon, and waits for a broker that starts again."""
