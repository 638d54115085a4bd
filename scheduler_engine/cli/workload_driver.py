"""Send a workload to the engine and count the outcomes: chats over HTTP as clients do, a trace into the frontend.

A trace has requests of a hundred thousand tokens. Parsing them as JSON would cost more than the engine does, so they
bypass HTTP, and only HTTP.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

import httpx
import msgspec

from scheduler_components import ConfigError
from scheduler_engine.cli.server_sent_events import event_data
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.device.workload import Chat, TraceRequest, prompt_tokens
from scheduler_engine.frontend.errors import (
    RankSilentError,
    RequestFailedError,
    RequestRefusedError,
    TooBusyError,
)
from scheduler_engine.frontend.frontend import Frontend, GenerateReqInput

_KEPT_REASONS = 8  # reasons contain numbers, so a trace of long prompts would produce thousands


@dataclass(slots=True, kw_only=True)
class OutcomeCount:
    """The number of requests with one outcome, and their first reasons."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        self.count += 1
        if len(self.reasons) < _KEPT_REASONS:
            self.reasons.append(reason)


@dataclass(slots=True)
class ChatTranscript:
    """The conversation so far.

    Attributes:
        token_ids: prompts and answers; u32.
        answers: positions of each answer in ``token_ids``.
    """

    token_ids: array[int]
    answers: list[range] = field(default_factory=list)

    def add_answer(self, output_ids: Iterable[int]) -> None:
        """Append the answer to the last prompt."""
        start = len(self.token_ids)
        self.token_ids.extend(output_ids)
        self.answers.append(range(start, len(self.token_ids)))


@dataclass(slots=True, kw_only=True)
class WorkloadCounters:
    """The counters of a running driver. Every sent request ends as finished, refused or failed.

    Attributes:
        total: requests to send; None while unknown.
        sent, finished: requests.
        refused: requests that the scheduler can never serve.
        failed: requests with any other outcome that is not an answer.
        prompt_tokens, cached_tokens, output_tokens: tokens of finished requests.
        first_token_s: seconds from sending to the first token, of streamed requests.
    """

    total: int | None = None
    sent: int = 0
    finished: int = 0
    refused: OutcomeCount = field(default_factory=OutcomeCount)
    failed: OutcomeCount = field(default_factory=OutcomeCount)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return self.finished + self.refused.count + self.failed.count

    @property
    def hit_rate(self) -> float:
        """Cached / prompt tokens of finished requests, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def finish(self, *, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Count one answered request."""
        self.finished += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.output_tokens += output_tokens


@dataclass(slots=True)
class ScheduleLag:
    """The delay of sending relative to a trace. Sending is late if the engine is slower than the trace requires.

    Attributes:
        due_s: time of the next request, on the driver's clock; None after the last.
        max_s: largest delay of a request, in real seconds.
    """

    due_s: float | None = None
    max_s: float = 0.0

    def lag_s(self, now_s: float) -> float:
        """Return how long the next request has been due; 0 while sending is on time."""
        return 0.0 if self.due_s is None else max(0.0, now_s - self.due_s)


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least ``share`` (0 to 1) of ``values`` do not exceed; 0 for no values."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)] if ordered else 0.0


_STREAM_EVERY_CHATS = 4  # every fourth chat streams and the others request whole answers, as clients do
_MAX_OPEN_TRACE_REQUESTS = 512  # each keeps its prompt, up to half a megabyte


class _RefusedError(Exception):
    """The engine will never serve this request."""


class _UnexpectedAnswerError(Exception):
    """The engine answered with something other than tokens."""


class _MetaInfo(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class _Answer(msgspec.Struct, frozen=True):
    output_ids: list[int]
    meta_info: _MetaInfo


_decode_answer = msgspec.json.Decoder(_Answer).decode


@dataclass(slots=True, kw_only=True)
class ChatDriver:
    """Send generated chats to ``/generate``.

    Attributes:
        url: URL of the engine.
        speed: divides the workload's time.
        counters: outcomes of the requests.
        api_key: key of the engine; None for none.
        clock: monotonic seconds.
        chats: transcripts of the chats.
    """

    url: str
    speed: float
    counters: WorkloadCounters
    api_key: str | None = None
    clock: Callable[[], float] = time.monotonic
    chats: list[ChatTranscript] = field(default_factory=list)

    async def run(self, chats: Iterable[Chat]) -> None:
        """Start each chat at its time, and wait until all have ended."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        # No timeout, because a queue may be long.
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=None) as client:
            async with asyncio.TaskGroup() as playing:
                start_s = self.clock()
                for number, chat in enumerate(chats):
                    await asyncio.sleep(start_s + chat.start_s / self.speed - self.clock())
                    playing.create_task(self._play(client, chat, stream=number % _STREAM_EVERY_CHATS == 0))

    async def _play(self, client: httpx.AsyncClient, chat: Chat, *, stream: bool) -> None:
        served = ChatTranscript(array("I", chat.system_ids))
        self.chats.append(served)
        for turn in chat.turns:
            await asyncio.sleep(turn.think_s / self.speed)
            served.token_ids.extend(turn.message_ids)
            body = msgspec.json.encode(
                {
                    "input_ids": served.token_ids.tolist(),
                    "sampling_params": {"max_new_tokens": turn.output_tokens, "ignore_eos": True, "temperature": 0.0},
                    "conversation": chat.chat_id,
                    "stream": stream,
                }
            )
            self.counters.sent += 1
            try:
                served.add_answer(await self._ask(client, body))
            except _RefusedError as error:
                self.counters.refused.add(f"{chat.chat_id}: {error}")
                return
            except (httpx.HTTPError, msgspec.DecodeError, _UnexpectedAnswerError) as error:
                self.counters.failed.add(f"{chat.chat_id}: {str(error) or type(error).__name__}")
                return  # the chat cannot continue without this answer

    async def _ask(self, client: httpx.AsyncClient, body: bytes) -> list[int]:
        """Send one request and return the tokens of its answer, streamed or whole."""
        sent_s = self.clock()
        output_ids: list[int] = []
        async with client.stream("POST", "/generate", content=body) as response:
            if response.status_code == httpx.codes.BAD_REQUEST:
                raise _RefusedError((await response.aread()).decode())
            if response.status_code != httpx.codes.OK:
                raise _UnexpectedAnswerError(f"{response.status_code} {(await response.aread()).decode()}")
            async for answer in _answers(response):
                if not output_ids and answer.meta_info.completion_tokens == 1:  # a whole answer has no first token
                    self.counters.first_token_s.append(self.clock() - sent_s)
                output_ids += answer.output_ids
                counts = answer.meta_info
        self.counters.finish(
            prompt_tokens=counts.prompt_tokens, cached_tokens=counts.cached_tokens, output_tokens=len(output_ids)
        )
        return output_ids


async def _answers(response: httpx.Response) -> AsyncIterator[_Answer]:
    """Yield the answer of a JSON body, or the answers of an event stream, at least one."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        yield _decode_answer(await response.aread())
        return
    async for data in event_data(response):
        yield _decode_answer(data)


@dataclass(slots=True, kw_only=True)
class TraceDriver:
    """Replay a trace against the frontend.

    Attributes:
        frontend: the engine's frontend.
        speed: divides the trace's time.
        counters: outcomes of the requests.
        clock: monotonic seconds.
        lag: delay of sending.
    """

    frontend: Frontend
    speed: float
    counters: WorkloadCounters
    clock: Callable[[], float] = time.monotonic
    lag: ScheduleLag = field(default_factory=ScheduleLag)

    async def run(self, requests: Iterable[TraceRequest]) -> None:
        """Send each request at its time, and wait until all have ended.

        Raises:
            ConfigError: a line of the trace has become wrong since its check. All sent requests have ended.
        """
        bad_line: ConfigError | None = None
        async with asyncio.TaskGroup() as sending:
            try:
                await self._send_all(requests, sending)
            except ConfigError as error:  # raised here, it would become an exception group
                bad_line = error
        if bad_line is not None:
            raise bad_line

    async def _send_all(self, requests: Iterable[TraceRequest], sending: asyncio.TaskGroup) -> None:
        places = asyncio.Semaphore(_MAX_OPEN_TRACE_REQUESTS)
        start_s = self.clock()
        for request in requests:
            due_s = self.lag.due_s = start_s + request.arrival_s / self.speed
            await asyncio.sleep(due_s - self.clock())
            await places.acquire()
            self.lag.max_s = max(self.lag.max_s, self.clock() - due_s)
            sending.create_task(self._send(request)).add_done_callback(lambda _: places.release())
        self.lag.due_s = None

    async def _send(self, request: TraceRequest) -> None:
        counters, sent_s = self.counters, self.clock()
        counters.sent += 1
        limits = SamplingLimits(max_new_tokens=request.output_length, ignore_eos=True)
        generate = GenerateReqInput(input_ids=prompt_tokens(request), limits=limits, conversation=request.conversation)
        try:
            async with self.frontend.open_request(generate) as deltas:
                async for delta in deltas:
                    if not delta.start:
                        counters.first_token_s.append(self.clock() - sent_s)
        except RequestRefusedError as error:
            counters.refused.add(f"request {request.index}: {error}")
            return
        except (TooBusyError, RequestFailedError, RankSilentError) as error:  # TooBusyError: other clients' requests
            counters.failed.add(f"request {request.index}: {error}")
            return
        counters.finish(
            prompt_tokens=delta.output.num_prompt_tokens,
            cached_tokens=delta.output.num_cached_tokens,
            output_tokens=delta.num_output_tokens,
        )
