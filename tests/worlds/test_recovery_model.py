"""The delivery contract on a faulty network, several subscribers together.

Properties:
- after every step, no subscriber is ``LIVE`` with a wrong view, and none distrusts an honest publisher;
- once the faults stop, every view equals the publisher's state within two probe intervals plus the replay.

Broken variants of each core show that the properties catch them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kit import broken_stream_cores
from kit.searches import num_examples

from worlds.recovery_model import RecoverySimulation, Steps

INDEX = st.integers(0, 2)
FAULTS = ("none", "none", "none", "lose", "repeat")
TRACES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["store", "store", "remove"]), st.integers(0, 5), st.integers(1, 3), st.booleans()),
        st.just(("send",)),
        st.just(("send",)),
        st.tuples(st.just("deliver"), INDEX, st.integers(1, 4), st.sampled_from([*FAULTS, "reorder"])),
        st.tuples(st.just("serve"), INDEX, st.integers(1, 8), st.sampled_from([*FAULTS, "cut", "garble", "alter"])),
        st.tuples(st.just("wait"), st.sampled_from([1, 5, 21])),
        st.tuples(st.sampled_from(["connect", "connect", "disconnect", "deliver_late"]), INDEX),
        st.tuples(st.just("send_other_topic"), INDEX, st.integers(-2, 2)),
        st.tuples(st.just("forge"), INDEX, st.integers(0, 3), st.sampled_from([1, 20])),
        st.sampled_from([("clear",), ("poison",), ("restart", False), ("restart", True)]),
    ),
    max_size=40,
)
WINDOWS = st.integers(1, 5)
SEQ_BASES = st.sampled_from(["zero", "clock"])

# A publisher that showed the extension and fell silent was once followed by the plain rules, which miss a restart
# behind a proxy.
SILENT_AFTER_RESTART = [
    ("store", 0, 1, False), ("wait", 21), ("restart", True), ("serve", 0, 1, "none"), ("store", 0, 1, False),
    ("store", 0, 1, False), ("wait", 21), ("wait", 21),
]  # fmt: skip
# The replay buffer passes the end of an answer whose last batch waits for a slow client.
OVERTAKEN_AT_THE_END = [
    ("store", 3, 1, False), ("send",), ("deliver", 0, 1, "lose"), ("wait", 21), ("serve", 0, 3, "none"),
    *[("store", 4, 1, False), ("send",)] * 8, ("serve", 0, 3, "none"),
]  # fmt: skip
# A gap comes while a status is open, and the replay buffer has passed its position when the answer comes.
GAP_BEHIND_A_STATUS = [
    *[("store", 0, 1, False)] * 2, ("forge", 0, 2, 1), *[("store", 0, 1, False)] * 5, ("send",), ("wait", 21),
    *[("store", 0, 1, False)] * 2, ("deliver", 0, 2, "none"),
]  # fmt: skip
# The same, with a forged batch that is contiguous.
FORGED_BEHIND_A_STATUS = [*GAP_BEHIND_A_STATUS[:2], ("forge", 0, 0, 1), *GAP_BEHIND_A_STATUS[2:]]
# The status that proves the view before a forged batch opens the request that exposes it.
FORGED_SINCE_THE_STATUS = [
    ("wait", 21), ("forge", 0, 0, 1), ("forge", 0, 2, 1), *[("store", 0, 1, False)] * 8, ("deliver", 0, 2, "none"),
]  # fmt: skip
# A gap finds no credit, and the missing batches come before there is some: nothing is missing any more, but one
# request must follow.
GAP_FILLED_BEFORE_CREDIT = [
    *[
        ("store", 4, 1, False), ("store", 5, 1, False), ("send",), ("deliver", 0, 1, "lose"),
        ("deliver", 0, 1, "none"), ("serve", 0, 9, "none"),
    ] * 3,
    *[("store", 4, 1, False), ("store", 5, 1, False), ("send",), ("deliver", 0, 1, "reorder")],
    *[("deliver", 0, 1, "none"), ("forge", 0, -1, 1), ("deliver", 0, 1, "none")],
]  # fmt: skip

# The last batches of an incremental answer are lost. That once counted as batches of another publisher.
LOST_AT_THE_END_OF_AN_ANSWER = [
    ("store", 4, 1, False), ("store", 5, 1, False), ("send",), ("deliver", 0, 1, "lose"), ("deliver", 0, 1, "none"),
    ("serve", 0, 1, "none"), ("serve", 0, 2, "lose"), ("serve", 0, 1, "none"),
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(600)
@given(trace=TRACES, window=WINDOWS, seq_base=SEQ_BASES)
@example(trace=SILENT_AFTER_RESTART, window=1, seq_base="zero")
@example(trace=OVERTAKEN_AT_THE_END, window=3, seq_base="zero")
@example(trace=GAP_BEHIND_A_STATUS, window=1, seq_base="zero")
@example(trace=FORGED_BEHIND_A_STATUS, window=1, seq_base="zero")
@example(trace=FORGED_SINCE_THE_STATUS, window=1, seq_base="zero")
@example(trace=GAP_FILLED_BEFORE_CREDIT, window=3, seq_base="zero")
@example(trace=LOST_AT_THE_END_OF_AN_ANSWER, window=4, seq_base="zero")
@settings(max_examples=num_examples(10), deadline=None, suppress_health_check=list(HealthCheck))
def test_no_wrong_view_is_live_and_every_view_converges(trace: Steps, window: int, seq_base: str) -> None:
    RecoverySimulation(window=window, seq_base=seq_base).run(trace)


# --- mutants ---

Mutate = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[Any] = []


def caught_by(
    mutate: Mutate, *trace: tuple, window: int = 2, seq_base: str = "zero", is_searched: bool = False
) -> None:
    """Register a mutant with a trace that exposes it.

    Args:
        mutate: breaks one rule.
        trace: passes with the unchanged cores.
        window: size of the publisher's replay buffer.
        seq_base: first sequence number of an epoch.
        is_searched: ``make soak`` checks that random traces expose the mutant too. They rarely expose the others.
    """
    MUTANTS.append(pytest.param(mutate, list(trace), window, seq_base, is_searched, id=mutate.__name__))


FOUR_MORE = [
    step for block in range(2, 6) for step in (("store", block, 1, False), ("remove", block - 2, 1, False), ("send",))
]
REJOIN_AFTER_THE_BUFFER_MOVED = [("disconnect", 0), *FOUR_MORE, ("connect", 0)]

caught_by(
    broken_stream_cores.digest_is_not_compared,
    *[("store", 3, 1, False), ("send",), ("store", 4, 1, False), ("send",), ("restart", True)],
    *[("store", 5, 1, False), ("send",), ("wait", 21), ("serve", 0, 1, "none"), ("serve", 0, 9, "none")],
    *[("deliver", 0, 2, "none"), ("remove", 5, 1, False), ("send",), ("store", 2, 1, False), ("send",)],
)
caught_by(
    broken_stream_cores.neither_epoch_nor_digest_compared, ("store", 0, 1, False), ("forge", 0, 0, 1), is_searched=True
)
caught_by(
    broken_stream_cores.status_compared_with_the_digest_at_answer_time,
    ("wait", 21),
    ("store", 3, 1, False),
    ("send",),
    ("deliver", 0, 1, "none"),
    ("serve", 0, 1, "none"),
)
caught_by(broken_stream_cores.epoch_not_compared_in_a_status, ("wait", 21), ("restart", True), ("serve", 0, 1, "none"))


ALTERED_LAST_BATCH = [
    *[("store", 3, 1, False), ("send",), ("deliver", 0, 1, "lose"), ("wait", 21), ("serve", 0, 1, "none")],
    *[("serve", 0, 1, "none"), ("serve", 0, 1, "alter"), ("serve", 0, 1, "none")],
]
caught_by(broken_stream_cores.end_not_checked, *ALTERED_LAST_BATCH)
caught_by(
    broken_stream_cores.holes_inside_an_answer_accepted,
    *[("store", 3, 1, False), ("store", 4, 1, False), ("send",), ("deliver", 0, 1, "lose"), ("deliver", 0, 1, "none")],
    *[("serve", 0, 1, "none"), ("serve", 0, 1, "lose"), ("serve", 0, 9, "none")],
)
caught_by(
    broken_stream_cores.holes_in_the_chunks_accepted,
    *REJOIN_AFTER_THE_BUFFER_MOVED,
    ("serve", 0, 1, "none"),
    ("serve", 0, 1, "lose"),
    ("serve", 0, 9, "none"),
)
caught_by(
    broken_stream_cores.snapshot_is_not_folded, *[("store", 0, 1, False)] * 2, ("forge", 0, 0, 1), is_searched=True
)
caught_by(broken_stream_cores.buffer_is_off_by_one, *REJOIN_AFTER_THE_BUFFER_MOVED)
caught_by(
    broken_stream_cores.plain_snapshot_without_its_clear,
    ("store", 0, 1, False),
    ("send",),
    ("wait", 21),
    *[("store", 0, 1, False)] * 2,
    is_searched=True,
)
caught_by(
    broken_stream_cores.requests_without_a_credit,
    ("forge", 0, 3, 40),
    *[step for _ in range(9) for step in (("deliver", 0, 9, "none"), ("serve", 0, 9, "none"))],
)


ONE_LOST_OF_TWO = [
    *[("store", 4, 1, False), ("store", 5, 1, False), ("send",), ("deliver", 0, 1, "lose")],
    *[("deliver", 0, 1, "none"), ("serve", 0, 9, "none")],
]
caught_by(broken_stream_cores.gap_without_credit_forgotten, *ONE_LOST_OF_TWO * 6)
caught_by(broken_stream_cores.topic_not_compared, ("send_other_topic", 2, 0), is_searched=True)
caught_by(broken_stream_cores.future_frame_kept, ("forge", 0, 1, 1), is_searched=True)
caught_by(broken_stream_cores.duplicate_applied, ("store", 0, 1, False), ("wait", 21), is_searched=True)
caught_by(broken_stream_cores.future_frame_causes_no_request, ("forge", 0, 0, 1), is_searched=True)
caught_by(
    broken_stream_cores.snapshot_applied_without_clear,
    *[("store", 0, 1, False)] * 2,
    ("restart", False),
    is_searched=True,
)
caught_by(
    broken_stream_cores.truncated_answer_accepted_as_complete, ("restart", True), seq_base="clock", is_searched=True
)
caught_by(
    broken_stream_cores.lost_chunks_not_counted,
    *REJOIN_AFTER_THE_BUFFER_MOVED,
    ("serve", 0, 1, "none"),
    ("serve", 0, 1, "lose"),
    ("serve", 0, 9, "none"),
)
caught_by(
    broken_stream_cores.answers_to_older_requests_accepted,
    *[
        *REJOIN_AFTER_THE_BUFFER_MOVED,
        ("serve", 0, 1, "none"),
        ("wait", 12),
        ("remove", 4, 1, False),
        *[("store", 0, 1, False), ("send",)] * 3,
    ],
    *[("serve", 0, 1, "none"), ("deliver_late", 0), ("serve", 0, 9, "none")],
)
caught_by(broken_stream_cores.retry_never, ("disconnect", 1), ("connect", 1), ("serve", 1, 8, "lose"), is_searched=True)
caught_by(broken_stream_cores.probe_never, ("forge", 0, 0, 1), is_searched=True)
caught_by(broken_stream_cores.plain_payload_not_compared, ("restart", True), ("clear",), is_searched=True)


@pytest.mark.broken_variants
@pytest.mark.soak
@pytest.mark.parametrize(("mutate", "trace", "window", "seq_base", "is_searched"), MUTANTS)
def test_a_broken_core_is_caught(
    mutate: Mutate,
    trace: Steps,
    window: int,
    seq_base: str,
    is_searched: bool,
    soaking: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RecoverySimulation(window=window, seq_base=seq_base).run(trace)
    mutate(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        RecoverySimulation(window=window, seq_base=seq_base).run(trace)

    @given(trace=TRACES, window=WINDOWS, seq_base=SEQ_BASES)
    @settings(
        max_examples=1_500, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    def holds(trace: Steps, window: int, seq_base: str) -> None:
        RecoverySimulation(window=window, seq_base=seq_base).run(trace)

    if soaking and is_searched:
        with pytest.raises((AssertionError, LookupError)):
            holds()
