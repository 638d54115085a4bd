"""What every intake must do, whatever brings its input to the other ranks: run each of ``RECEIVER_CHECKS`` on yours.

A check takes a function that opens one intake per rank of a replica, the leading one first, over a source of messages
like those of ``TextInputReader``: ``request:rid:rest``, ``abort:rid``, ``command:rest``. It runs each on a thread of
its
own, since some relays are meetings, and gives the leading rank messages at moments that the others know nothing of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

from scheduler_components.errors import ComponentError
from scheduler_components.request_receiver import InputSource
from scheduler_components.testing.check_trace import CheckTrace
from scheduler_components.testing.fakes import ListInputSource
from scheduler_components.testing.interfaces import ReceivingRank
from scheduler_components.values import ForwardMode

__all__ = ["RECEIVER_CHECKS", "OpenReceivers"]

OpenReceivers = Callable[[InputSource], Sequence[ReceivingRank]]

_Received = list[tuple[int, str]]
"""The step before which each message was received, and the message."""

_MODES = (ForwardMode.IDLE, ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.DECODE, ForwardMode.MIXED)


def check_all_ranks_receive_the_same_sequence(open_receivers: OpenReceivers) -> None:
    """Whatever comes when, each rank receives the same messages in one order, before the same steps."""
    arrivals = {
        0: ["request:a", "command:one"],
        1: ["request:b", "request:c", "abort:a"],
        4: [f"request:{number}:{'x' * number}" for number in range(60)],
        5: ["abort:7", "abort:b", "command:two"],
        11: ["request:last"],
    }
    trace = CheckTrace("All ranks receive one sequence")
    leading, *others = _serve(trace, open_receivers, arrivals, num_steps=40)
    came = [text for texts in arrivals.values() for text in texts]
    trace.expect(came, [text for _, text in leading], "messages of the leading rank, in the order in which they came")
    for number, received in enumerate(others, start=1):
        trace.expect(leading, received, f"steps and messages of rank {number}, as of the leading one")


def check_messages_of_any_size_arrive_intact(open_receivers: OpenReceivers) -> None:
    """Messages of any length, none and many at once reach each rank byte for byte."""
    sizes = (0, 1, 7, 8, 1_900, 1_999, 70_000, 600_000)
    arrivals = {step: [f"request:{size}:" + "y" * size] for step, size in enumerate(sizes)}
    arrivals[len(sizes)] = [f"command:{number}" for number in range(200)]
    trace = CheckTrace("Messages of every size come whole")
    expected = [text for texts in arrivals.values() for text in texts]
    for number, received in enumerate(_serve(trace, open_receivers, arrivals, num_steps=len(sizes) + 4)):
        found = [text for _, text in received]
        trace.expect(len(expected), len(found), f"messages that rank {number} received")
        wrong = [text[:20] for text, other in zip(found, expected, strict=True) if text != other]
        trace.expect([], wrong, f"messages of rank {number} that are not those that came")


def check_blocked_input_waits_for_all(open_receivers: OpenReceivers) -> None:
    """While input is blocked no rank receives a request, and all receive commands; then the requests come in order."""
    arrivals = {
        0: ["block:", "request:a", "command:while"],
        3: ["request:b", "abort:a"],
        6: ["unblock:", "request:c"],
    }
    trace = CheckTrace("Blocked input waits on all ranks")
    for number, received in enumerate(_serve(trace, open_receivers, arrivals, num_steps=12)):
        found = [text for _, text in received]
        trace.expect(["command:while", "request:b", "request:c"], found, f"messages of rank {number}")


def check_diverged_rank_is_detected(open_receivers: OpenReceivers) -> None:
    """A rank whose state is not the leading one's is not given a further message: it, or all of them, raise."""
    source = ListInputSource([b"request:a"])
    trace = CheckTrace("A rank in another state is found at the next receive")
    ranks = trace.call("open", lambda: list(open_receivers(source)))
    if len(ranks) < 2:
        return

    def receive(number: int) -> bool:
        try:
            for step in range(3):
                ranks[number].receive(step, 1 if number == len(ranks) - 1 else 0, ForwardMode.IDLE)
        except ComponentError:
            return True
        finally:
            ranks[number].close()
        return False

    trace.note(f"receive with the last of {len(ranks)} ranks in another state")
    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(receive, range(len(ranks))))
    trace.require(found[-1], "an error of the rank that differs", "it was given messages")


def _serve(
    trace: CheckTrace, open_receivers: OpenReceivers, arrivals: dict[int, list[str]], *, num_steps: int
) -> list[_Received]:
    """Run all ranks; returns what each received. Its state is what it received, and is told with each receive."""
    source = ListInputSource()
    ranks = trace.call("open", lambda: list(open_receivers(source)))

    def run(number: int) -> _Received:
        received: _Received = []
        digest = 0
        try:
            for step in range(num_steps):
                if not number:
                    source.frames += [text.encode() for text in arrivals.get(step, ())]
                mode = _MODES[step % len(_MODES)]
                for text in ranks[number].receive(step, digest, mode):
                    received.append((step, text))
                    digest = crc32(text.encode(), digest)
            return received
        finally:
            ranks[number].close()

    def run_all() -> list[_Received]:
        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(run, range(len(ranks))))

    return trace.call(f"{num_steps} steps of {len(ranks)} ranks", run_all)


RECEIVER_CHECKS: tuple[Callable[[OpenReceivers], None], ...] = (
    check_all_ranks_receive_the_same_sequence,
    check_messages_of_any_size_arrive_intact,
    check_blocked_input_waits_for_all,
    check_diverged_rank_is_detected,
)
"""Each takes what opens one intake per rank, the leading one first. Ranks wait for each other: bound their waits."""
