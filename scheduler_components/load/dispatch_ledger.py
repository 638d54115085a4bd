"""A dispatcher's memory of what it has sent to one replica and no report counts yet. Pure: no clock, no sockets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_components.errors import ConfigError

__all__ = ["MAX_NAME_CHARACTERS", "DispatchLedger", "is_dispatcher_name"]

MAX_NAME_CHARACTERS = 64
"""Every load report carries the names of its dispatchers."""


def is_dispatcher_name(name: str) -> bool:
    """Say whether ``name`` can stand in a load report: 1 to 64 printable ASCII characters."""
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name.isascii() and name.isprintable()


@dataclass(slots=True, kw_only=True)
class DispatchLedger:
    """Numbers the requests sent to one replica and forgets each when a report counts it.

    The replica's load, as its dispatcher should see it, is the last report plus ``unreported_tokens``: no request is
    counted twice, and none in flight is forgotten, however late reports are. A replica that restarts has lost what
    was in flight to it; its entries leave with the first report that counts a later ticket.

    Attributes:
        dispatcher: this dispatcher's name, unique among those that send to the replica, and new for each of its
            lives, for tickets begin at 1 again.
        unreported_tokens: input tokens of the requests that are not counted yet.

    Raises:
        ConfigError: the name cannot stand in a load report.
    """

    dispatcher: str
    unreported_tokens: int = field(default=0, init=False)
    _last_ticket: int = field(default=0, init=False, repr=False)
    _unreported: OrderedDict[int, int] = field(default_factory=OrderedDict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not is_dispatcher_name(self.dispatcher):
            raise ConfigError(
                "dispatcher",
                self.dispatcher,
                "cannot stand in a load report",
                f"give 1 to {MAX_NAME_CHARACTERS} printable ASCII characters",
            )

    @property
    def unreported_requests(self) -> int:
        """Requests that were sent and are not counted by any report yet."""
        return len(self._unreported)

    def dispatched(self, num_tokens: int) -> int:
        """Note a request that is about to be sent; returns the ticket to send with it. Send in order of tickets."""
        self._last_ticket += 1
        self._unreported[self._last_ticket] = num_tokens
        self.unreported_tokens += num_tokens
        return self._last_ticket

    def withdraw(self, ticket: int) -> None:
        """Forget a request that could not be sent. For a ticket that is counted already nothing is left to do."""
        self.unreported_tokens -= self._unreported.pop(ticket, 0)

    def reported(self, watermarks: Iterable[tuple[str, int]]) -> None:
        """Take in ``LoadSnapshot.dispatched_watermarks`` of a report; other dispatchers' pairs are skipped."""
        for dispatcher, ticket in watermarks:
            if dispatcher == self.dispatcher:
                self._forget_up_to(ticket)

    def _forget_up_to(self, ticket: int) -> None:
        unreported = self._unreported
        while unreported and next(iter(unreported)) <= ticket:
            self.unreported_tokens -= unreported.popitem(last=False)[1]
