"""Every port of one engine: the plan that publishers bind by and ``/server_info`` advertises."""

from __future__ import annotations

from itertools import combinations

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.kv_events.endpoint import Endpoint

__all__ = ["PortPlan"]


@attrs.frozen(kw_only=True)
class PortPlan:
    """The event, replay and load endpoints of all streams of an engine; refused as a whole when they do not fit.

    Stream ``i`` has each base endpoint offset by ``i``. tcp ranges may not share a port whatever their hosts are:
    ``0.0.0.0``, a name and an address can mean one interface, and a plan that is right on one machine and wrong on
    the next is no plan. Port 0 takes part in no overlap, for the system hands out each port once.

    Attributes:
        events: base of the PUB sockets.
        replay: base of the replay ROUTER sockets; None without replay.
        load: base of the load gauge's PUB sockets; None without it.
        stream_count: number of streams (``ParallelState.kv_stream_count``).

    Raises:
        ConfigError: a range passes port 65535, or two ranges share an address. The field is the setting's name in
            ``KVEventsConfig``.
    """

    events: Endpoint
    replay: Endpoint | None = None
    load: Endpoint | None = None
    stream_count: int = 1

    def __attrs_post_init__(self) -> None:
        if type(self.stream_count) is not int or self.stream_count < 1:
            raise ConfigError(
                "stream_count", self.stream_count, "is not a number of streams", "give an integer of at least 1"
            )
        ranges = self._ranges()
        for field, base in ranges:
            base.offset(self.stream_count - 1, field=field)
        for (field, base), (other_field, other) in combinations(ranges, 2):
            self._check_apart(field, base, other_field, other)

    def _ranges(self) -> list[tuple[str, Endpoint]]:
        named = [("endpoint", self.events), ("replay_endpoint", self.replay), ("load_endpoint", self.load)]
        return [(field, base) for field, base in named if base is not None]

    def _check_apart(self, field: str, base: Endpoint, other_field: str, other: Endpoint) -> None:
        if base.transport != other.transport:
            return
        if base.port is None or other.port is None:
            shared = {base.offset(i).path for i in range(self.stream_count)}
            if shared.isdisjoint(other.offset(i).path for i in range(self.stream_count)):
                return
            mend = "give the two paths that differ in more than the suffix _dp"
        elif base.port == 0 or other.port == 0 or abs(base.port - other.port) >= self.stream_count:
            return
        else:
            mend = f"give the two ports that are at least {self.stream_count} apart"
        streams = f"{self.stream_count} stream" + ("s" if self.stream_count > 1 else "")
        raise ConfigError(other_field, str(other), f"overlaps {field}={str(base)!r} with {streams}", mend)

    def event_endpoint(self, index: int) -> Endpoint:
        """Give the PUB endpoint of stream ``index``, 0 to ``stream_count - 1``; ConfigError outside."""
        return self._at(index, self.events)

    def replay_endpoint(self, index: int) -> Endpoint | None:
        """Give the replay endpoint of stream ``index``; None without replay."""
        return None if self.replay is None else self._at(index, self.replay)

    def load_endpoint(self, index: int) -> Endpoint | None:
        """Give the load gauge's endpoint of stream ``index``; None without it."""
        return None if self.load is None else self._at(index, self.load)

    def _at(self, index: int, base: Endpoint) -> Endpoint:
        if type(index) is not int or not 0 <= index < self.stream_count:
            raise ConfigError("index", index, "is not a stream of this plan", f"give 0 to {self.stream_count - 1}")
        return base.offset(index)
