"""Checks of every request receiver. Run each of ``RECEIVER_CHECKS`` on a receiver of your own.

A check takes a function that opens one receiver per rank of a replica, the leading one first, over a source of
``TextInputReader``'s messages: ``request:rid:rest``, ``abort:rid``, ``command:rest``. It runs each rank on its own
thread, because some relays are collectives, and adds messages at steps that only the leading rank knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

from scheduler_components.errors import ComponentError
from scheduler_components.request_receiver import InputSource, RequestReceiver
from scheduler_components.testing.check_trace import CheckTrace, checks_in
from scheduler_components.testing.fakes import ListInputSource
from scheduler_components.values import ForwardMode

__all__ = ["RECEIVER_CHECKS", "OpenReceivers"]

OpenReceivers = Callable[[InputSource], Sequence[RequestReceiver[str]]]

_Received = list[tuple[int, str]]
"""Each message with the step that followed it."""

_MODES = (ForwardMode.IDLE, ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.DECODE, ForwardMode.MIXED)


def check_all_ranks_receive_the_same_sequence(open_receivers: OpenReceivers) -> None:
    """Each rank receives the same messages in the same order before the same steps."""
    arrivals = {
        0: ["request:a", "command:one"],
        1: ["request:b", "request:c", "abort:a"],
        4: [f"request:{number}:{'x' * number}" for number in range(60)],
        5: ["abort:7", "abort:b", "command:two"],
        11: ["request:last"],
    }
    trace = CheckTrace("All ranks receive one sequence")
    leading, *others = _serve(trace, open_receivers, arrivals, num_steps=40)
    sent = [text for texts in arrivals.values() for text in texts]
    trace.expect(sent, [text for _, text in leading], "messages of the leading rank, in order of arrival")
    for number, received in enumerate(others, start=1):
        trace.expect(leading, received, f"steps and messages of rank {number}, equal to the leading rank's")


def check_messages_of_any_size_arrive_intact(open_receivers: OpenReceivers) -> None:
    """Messages of any length, and many messages in one step, reach each rank byte for byte."""
    sizes = (0, 1, 7, 8, 1_900, 1_999, 70_000, 600_000)
    arrivals = {step: [f"request:{size}:" + "y" * size] for step, size in enumerate(sizes)}
    arrivals[len(sizes)] = [f"command:{number}" for number in range(200)]
    trace = CheckTrace("Messages of every size arrive intact")
    expected = [text for texts in arrivals.values() for text in texts]
    for number, received in enumerate(_serve(trace, open_receivers, arrivals, num_steps=len(sizes) + 4)):
        found = [text for _, text in received]
        trace.expect(len(expected), len(found), f"messages that rank {number} received")
        wrong = [text[:20] for text, other in zip(found, expected, strict=True) if text != other]
        trace.expect([], wrong, f"messages of rank {number} that differ from the sent ones")


def check_blocked_input_waits_for_all(open_receivers: OpenReceivers) -> None:
    """While input is blocked, ranks receive only commands. After that the requests follow in order."""
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
    """A rank whose state differs from the leading rank's raises before it receives a further message."""
    source = ListInputSource([b"request:a"])
    trace = CheckTrace("A diverged rank is detected at the next receive")
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

    trace.note(f"receive with the last of {len(ranks)} ranks in a different state")
    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(receive, range(len(ranks))))
    trace.require(found[-1], "an error on the diverged rank", "it received messages")


def _serve(
    trace: CheckTrace, open_receivers: OpenReceivers, arrivals: dict[int, list[str]], *, num_steps: int
) -> list[_Received]:
    """Run all ranks, and return the messages of each. The digest of its messages is the state of a rank."""
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


RECEIVER_CHECKS: tuple[Callable[[OpenReceivers], None], ...] = checks_in(globals())
"""All checks of a request receiver. Ranks wait for each other, so give your receivers timeouts."""
