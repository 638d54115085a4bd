"""A session accepts a scheduler that sends the right tokens, and names what a wrong one did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.testing import ConformanceError, next_token
from scheduler_components.testing.scheduler_session import SchedulerSession, SubmittedRequest, max_steps, unfinished
from scheduler_components.values import FinishReason, LoadSnapshot, OutputBatch, OutputDelta, TokenOutput


class OneTokenScheduler:
    """Generates one token of each request per step. ``change`` may change an output before it is sent."""

    def __init__(self, outputs: OutputSink, change: Callable[[OutputDelta], OutputDelta | None]) -> None:
        self.outputs, self.change = outputs, change
        self.requests: dict[str, tuple[list[int], int, int]] = {}  # tokens, number of prompt tokens, limit
        self.aborted: list[str] = []
        self.load = LoadSnapshot()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(self, rid: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        self.requests[rid] = ([*prompt], len(prompt), max_new_tokens)

    def abort(self, rid: str) -> object:
        self.aborted.append(rid)
        return None

    def step(self) -> object:
        deltas = []
        for rid, (tokens, num_prompt, limit) in list(self.requests.items()):
            done = len(tokens) - num_prompt
            if rid in self.aborted:
                deltas.append(OutputDelta(rid, done, done, FinishReason.ABORT, TokenOutput((), num_prompt)))
                del self.requests[rid]
                continue
            tokens.append(next_token(tokens))
            is_last = done + 1 == limit
            reason = FinishReason.LENGTH if is_last else None
            deltas.append(OutputDelta(rid, done, done + 1, reason, TokenOutput((tokens[-1],), num_prompt)))
            if is_last:
                del self.requests[rid]
        changed = [delta for each in deltas if (delta := self.change(each)) is not None]
        self.outputs.send(OutputBatch(0, tuple(changed)))
        return None

    def get_loads(self) -> LoadSnapshot:
        return self.load

    def block_hashes(self) -> Iterable[int]:
        return ()


def open_session(
    change: Callable[[OutputDelta], OutputDelta | None] = lambda delta: delta, *, is_strict: bool = True
) -> SchedulerSession[OneTokenScheduler]:
    def open_scheduler(events: KvEventSink, outputs: OutputSink) -> OneTokenScheduler:
        return OneTokenScheduler(outputs, change)

    return SchedulerSession.open("tokens come in order", open_scheduler, is_strict=is_strict)


WORKLOAD = [((1, 2, 3), 4), ((4, 5), 1), ((6,), 3)]


def run(session: SchedulerSession[OneTokenScheduler], *, abort_delay: int | None = None) -> None:
    for _ in session.serve(WORKLOAD, abort_delay=abort_delay):
        pass


def test_a_scheduler_that_sends_the_right_tokens_is_accepted() -> None:
    session = open_session()
    run(session)
    session.expect_all_finished()
    session.expect_nothing_held()
    assert {rid: len(request.token_ids) for rid, request in session.requests.items()} == {"r1": 4, "r2": 1, "r3": 3}


def test_every_second_request_is_aborted_after_the_delay() -> None:
    session = open_session()
    run(session, abort_delay=1)
    assert session.scheduler.aborted == ["r1", "r3"]
    session.expect_aborts_finished()
    assert session.requests["r1"].finish_reason == FinishReason.ABORT
    assert session.requests["r2"].finish_reason == FinishReason.LENGTH


def altered(delta: OutputDelta, *, rid: str | None = None, start: int | None = None, count: int | None = None,
            reason: FinishReason | None = None, tokens: tuple[int, ...] | None = None) -> OutputDelta:  # fmt: skip
    output = delta.output if tokens is None else TokenOutput(tokens, delta.output.num_prompt_tokens)
    return OutputDelta(
        delta.rid if rid is None else rid,
        delta.start if start is None else start,
        delta.num_output_tokens if count is None else count,
        delta.finish_reason if reason is None else reason,
        output,
    )


WRONG: dict[str, tuple[Callable[[OutputDelta], OutputDelta], str]] = {
    "an unknown request": (lambda delta: altered(delta, rid="r9"), "an output of a submitted request"),
    "a position too far": (lambda delta: altered(delta, start=delta.start + 1), "the position of the first new token"),
    "another token": (lambda delta: altered(delta, tokens=(7,)), "the tokens of r1 from 0 on"),
    "a wrong count": (lambda delta: altered(delta, count=9), "the number of tokens of r1"),
    "an end too early": (lambda delta: altered(delta, reason=FinishReason.LENGTH), "the end of r1 after 1 of 4 tokens"),
    "an abort that was not asked for": (
        lambda delta: altered(delta, reason=FinishReason.ABORT),
        "the end of r1 after 1 of 4 tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_output_fails_when_it_arrives_and_is_named(name: str) -> None:
    change, expected = WRONG[name]
    with pytest.raises(ConformanceError) as raised:
        run(open_session(change))
    assert expected in raised.value.expected
    assert raised.value.title == "tokens come in order"


def test_an_output_after_the_end_is_named() -> None:
    session = open_session()
    session.submit((1, 2), 1)
    session.step()
    session.outputs.send(OutputBatch(0, (OutputDelta("r1", 1, 1, None, TokenOutput((), 2)),)))
    with pytest.raises(ConformanceError, match="no output of r1 after its end"):
        session.receive_outputs()


def test_a_session_that_is_not_strict_records_what_came() -> None:
    session = open_session(lambda delta: altered(delta, tokens=(7,)), is_strict=False)
    run(session)
    assert session.requests["r1"].token_ids == [7, 7, 7, 7]


def test_a_scheduler_that_never_ends_fails_with_its_unfinished_requests() -> None:
    session = open_session(lambda delta: None, is_strict=False)
    session.scheduler.submit("other", (1,), 10_000)
    with pytest.raises(ConformanceError, match="work left: \\['r1', 'r2', 'r3'\\]"):
        run(session)
    with pytest.raises(ConformanceError, match="requests without an end"):
        session.expect_all_finished()


def test_an_abort_without_an_end_fails_after_two_steps() -> None:
    session = open_session(lambda delta: None)
    session.submit((1, 2), 9)
    session.abort("r1")
    session.step()
    session.expect_aborts_finished()
    session.step()
    with pytest.raises(ConformanceError, match="an end of r1 2 steps after its abort"):
        session.expect_aborts_finished()


def test_load_after_the_end_is_a_failure() -> None:
    session = open_session()
    session.scheduler.load = LoadSnapshot(num_used_tokens=4)
    with pytest.raises(ConformanceError, match=r"requests, .* tokens"):
        session.expect_nothing_held()


def test_the_next_tokens_end_at_the_limit() -> None:
    request = SubmittedRequest(rid="r1", prompt=(1, 2), max_new_tokens=3)
    first = next_token([1, 2])
    second = next_token([1, 2, first])
    assert request.next_tokens(2) == (first, second)
    request.token_ids += [first, second]
    assert len(request.next_tokens(5)) == 1
    assert unfinished([request]) == [request]
    request.finish_reason = FinishReason.LENGTH
    assert unfinished([request]) == []


def test_the_limit_of_steps_grows_with_the_work() -> None:
    assert max_steps([]) == 10
    assert max_steps([((1, 2, 3), 2), ((), 1)]) == 10 + 4 * 6
