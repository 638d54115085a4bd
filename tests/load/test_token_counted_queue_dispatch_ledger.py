"""A dispatcher's view is exact: the last report plus unreported requests equals the replica's plus those in flight."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, WorkCounters
from scheduler_components.load import DispatchLedger

SEND, TAKE_IN, REPORT, DELIVER, LOSE = range(5)

steps = st.lists(st.tuples(st.sampled_from([SEND, SEND, TAKE_IN, REPORT, DELIVER, LOSE]), st.integers(0, 1)))


@settings(deadline=None)
@given(steps)
def test_no_request_is_forgotten_or_counted_twice(actions: list[tuple[int, int]]) -> None:
    ledgers = [DispatchLedger(dispatcher="a"), DispatchLedger(dispatcher="b")]
    wires: list[list[tuple[int, int]]] = [[], []]
    work, held, reports = WorkCounters(), [0, 0], []
    seen_tokens = [0, 0]  # of each dispatcher, in the newest report delivered
    for action, who in actions:
        if action == SEND:
            wires[who].append((ledgers[who].issue_ticket(100), 100))
        elif action == TAKE_IN and wires[who]:
            ticket, tokens = wires[who].pop(0)
            work.on_request_received("ab"[who], ticket)
            held[who] += tokens
        elif action == REPORT:
            reports.append((work.dispatched_watermarks, tuple(held)))
        elif action == DELIVER and reports:
            watermarks, counted = reports.pop(0)
            for ledger in ledgers:
                ledger.on_load_report(watermarks)
            seen_tokens = list(counted)
        elif action == LOSE and reports:
            reports.pop(0)
        for index, ledger in enumerate(ledgers):
            on_the_way = sum(tokens for _, tokens in wires[index])
            assert seen_tokens[index] + ledger.unreported_tokens == held[index] + on_the_way


def test_a_repeated_or_late_report_changes_nothing() -> None:
    ledger = DispatchLedger(dispatcher="a")
    for _ in range(3):
        ledger.issue_ticket(10)
    ledger.on_load_report([("a", 2)])
    ledger.on_load_report([("a", 1), ("b", 99)])
    assert (ledger.unreported_requests, ledger.unreported_tokens) == (1, 10)


def test_a_request_that_could_not_be_sent_is_withdrawn_once() -> None:
    ledger = DispatchLedger(dispatcher="a")
    ticket = ledger.issue_ticket(10)
    ledger.cancel(ticket)
    ledger.cancel(ticket)
    assert ledger.unreported_tokens == 0


def test_the_requests_lost_by_a_restart_are_dropped_with_the_next_counted_request() -> None:
    ledger = DispatchLedger(dispatcher="a")
    for _ in range(5):
        ledger.issue_ticket(10)
    reborn = WorkCounters()
    ledger.on_load_report(reborn.dispatched_watermarks)
    assert ledger.unreported_tokens == 50
    reborn.on_request_received("a", ledger.issue_ticket(7))
    ledger.on_load_report(reborn.dispatched_watermarks)
    assert ledger.unreported_tokens == 0


@pytest.mark.parametrize("name", ["", "x" * 65, "naïve", "a\n", "\ud800"])
def test_a_name_that_does_not_fit_a_report_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="dispatcher"):
        DispatchLedger(dispatcher=name)
    work = WorkCounters()
    work.on_request_received(name, 1)
    assert (work.dispatched_watermarks, work.invalid_tickets) == ((), 1)
