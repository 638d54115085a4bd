"""A session with one scheduler under check: submit requests, step, and compare each output with the expected tokens.

``scheduler_checks`` and ``quiesce_checks`` drive schedulers with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.testing.check_trace import CheckTrace
from scheduler_components.testing.fake_device import next_token
from scheduler_components.testing.fakes import ListEventSink, ListOutputSink
from scheduler_components.testing.interfaces import ServingScheduler, Workload
from scheduler_components.values import FinishReason, OutputDelta

__all__ = ["SchedulerSession", "SubmittedRequest", "max_steps", "unfinished"]

S = TypeVar("S", bound=ServingScheduler)

_MAX_ABORT_STEPS = 2  # An abort ends a request in the next step, or in the one after it if steps overlap.


@dataclass(slots=True, kw_only=True)
class SubmittedRequest:
    """A request and the outputs that the scheduler has sent for it.

    Attributes:
        aborted_at: number of steps before its abort; None without one.
        token_ids: the generated tokens.
    """

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    aborted_at: int | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def next_tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Return the next tokens that the scheduler must send, at most ``num_tokens``."""
        tokens = [*self.prompt, *self.token_ids]
        num_known = len(tokens)
        for _ in range(min(num_tokens, self.max_new_tokens - len(self.token_ids))):
            tokens.append(next_token(tokens))
        return tuple(tokens[num_known:])


class _OutputLog(ListOutputSink):
    """Keeps all outputs, and returns each of them once."""

    def __init__(self) -> None:
        super().__init__()
        self._num_popped = 0

    def pop_new_deltas(self) -> list[OutputDelta]:
        batches = self.batches[self._num_popped :]
        self._num_popped += len(batches)
        return [delta for batch in batches for delta in batch.deltas]


@dataclass(slots=True, kw_only=True)
class SchedulerSession(Generic[S]):
    """One scheduler with its sinks and its requests.

    Attributes:
        is_strict: verify each output when it arrives.
        requests: by id, in order of arrival.
    """

    trace: CheckTrace
    scheduler: S
    events: ListEventSink
    outputs: _OutputLog
    is_strict: bool
    requests: dict[str, SubmittedRequest] = field(default_factory=dict)
    num_steps: int = 0
    _rid_prefix: str = field(default="r", init=False)

    @classmethod
    def open(
        cls,
        title: str,
        open_scheduler: Callable[[KvEventSink, OutputSink], S],
        *,
        is_strict: bool = False,
        rid_prefix: str = "r",
    ) -> SchedulerSession[S]:
        """Open a scheduler over two new sinks.

        Args:
            title: the promise that the check verifies.
            open_scheduler: opens it.
            is_strict: verify each output when it arrives.
            rid_prefix: one letter, the first of each request id.
        """
        trace, events, outputs = CheckTrace(title), ListEventSink(), _OutputLog()
        scheduler = trace.call("opened a scheduler", lambda: open_scheduler(events, outputs))
        session = cls(trace=trace, scheduler=scheduler, events=events, outputs=outputs, is_strict=is_strict)
        session._rid_prefix = rid_prefix
        return session

    def serve(self, workload: Workload, *, abort_delay: int | None = None) -> Iterator[None]:
        """Submit one request before each of the first steps, then step until no work is left; yield after each step.

        With ``abort_delay``, abort every second request that many steps after its arrival.
        """
        submitted = [(request.prompt, request.max_new_tokens) for request in self.requests.values()]
        limit = max_steps([*submitted, *workload])
        num_calls = len(workload) + (abort_delay or 0)
        for number in range(limit):
            if number < len(workload):
                self.submit(*workload[number])
            if abort_delay is not None and (number - abort_delay) % 2 == 0 and abort_delay <= number < num_calls:
                self.abort(f"{self._rid_prefix}{number - abort_delay + 1}")
            if self.scheduler.has_work:
                self.step()
            elif number >= num_calls:
                return
            yield
        self.trace.require(
            not self.scheduler.has_work, f"no work left after {limit} steps", f"work left: {self.unfinished_rids}"
        )

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> SubmittedRequest:
        rid = f"{self._rid_prefix}{len(self.requests) + 1}"
        request = SubmittedRequest(rid=rid, prompt=tuple(prompt), max_new_tokens=max_new_tokens)
        self.requests[rid] = request
        self.trace.call(
            f"submitted {len(prompt)} tokens, {max_new_tokens} to generate, as {rid}",
            lambda: self.scheduler.submit(rid, request.prompt, max_new_tokens),
        )
        return request

    def abort(self, rid: str) -> None:
        request = self.requests.get(rid)
        if request is not None and request.finish_reason is None:
            request.aborted_at = self.num_steps
        self.trace.call(f"aborted {rid}", lambda: self.scheduler.abort(rid))

    def step(self) -> None:
        self.trace.call(f"step {self.num_steps}", self.scheduler.step)
        self.num_steps += 1
        self.receive_outputs()

    def receive_outputs(self) -> None:
        """Record the outputs since the last call."""
        for delta in self.outputs.pop_new_deltas():
            request = self.requests.get(delta.rid)
            if self.is_strict:
                self._verify(request, delta)
            if request is not None:
                request.token_ids += delta.output.token_ids
                request.finish_reason = request.finish_reason or delta.finish_reason

    def _verify(self, request: SubmittedRequest | None, delta: OutputDelta) -> None:
        """Compare one output with the tokens and the end that must come next."""
        trace, tokens, rid = self.trace, delta.output.token_ids, delta.rid
        trace.note(f"{rid} received {len(tokens)} tokens from {delta.start} on, end: {delta.finish_reason}")
        if request is None:
            raise trace.failure("an output of a submitted request", rid)
        trace.expect(None, request.finish_reason, f"no output of {rid} after its end, which was")
        num_tokens = len(request.token_ids)
        trace.expect(num_tokens, delta.start, f"the position of the first new token of {rid}")
        trace.expect(request.next_tokens(len(tokens)), tokens, f"the tokens of {rid} from {num_tokens} on")
        num_prompt_tokens = delta.output.num_prompt_tokens or len(
            request.prompt
        )  # 0: the scheduler does not report it.
        trace.expect(len(request.prompt), num_prompt_tokens, f"the number of prompt tokens of {rid}")
        num_tokens += len(tokens)
        trace.expect(num_tokens, delta.num_output_tokens, f"the number of tokens of {rid}")
        is_complete = num_tokens == request.max_new_tokens
        if is_complete and delta.finish_reason is not None:
            trace.expect(str(FinishReason.LENGTH), str(delta.finish_reason), f"the end of {rid}, which has all tokens")
        elif delta.finish_reason is not None:
            expected = None if request.aborted_at is None else str(FinishReason.ABORT)
            progress = f"{num_tokens} of {request.max_new_tokens} tokens"
            trace.expect(expected, str(delta.finish_reason), f"the end of {rid} after {progress}")

    def expect_aborts_finished(self) -> None:
        """Fail if a request has not ended in time after its abort."""
        for request in self.requests.values():
            if request.finish_reason is None and request.aborted_at is not None:
                age = self.num_steps - request.aborted_at
                self.trace.require(
                    age < _MAX_ABORT_STEPS, f"an end of {request.rid} {_MAX_ABORT_STEPS} steps after its abort", "none"
                )

    def expect_all_finished(self) -> None:
        """Fail if a request has no end."""
        self.trace.expect([], self.unfinished_rids, "requests without an end")

    def expect_nothing_held(self) -> None:
        """Fail if the load counts requests or tokens after all work has ended."""
        load = self.scheduler.get_loads()
        left = (load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens, load.num_pending_tokens)
        self.trace.expect((0, 0, 0, 0), left, "(running, waiting) requests, (used, pending) tokens")

    @property
    def unfinished_rids(self) -> list[str]:
        return [request.rid for request in unfinished(self.requests.values())]


def unfinished(requests: Iterable[SubmittedRequest]) -> list[SubmittedRequest]:
    """Return the requests that have not ended."""
    return [request for request in requests if request.finish_reason is None]


def max_steps(workload: Sequence[tuple[tuple[int, ...], int]]) -> int:
    """Return the steps that suffice for any scheduler: one token per step, four times over because of retractions."""
    return 10 + 4 * sum(len(prompt) + new_tokens for prompt, new_tokens in workload)
