"""The HTTP client of one engine behind a proxy: its description, readiness, loads, tokens, and forwarded requests.

The proxy relies on what an engine answers for the choice of a replica only. Each answer has a limit of bytes and of
time, and its values are checked, so an engine that fails or lies costs its own requests.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import httpx
import msgspec

from observability.kv_stream import escape_unprintable
from observability.kv_stream.discovery import trusted_certificates
from observability.kv_stream.stream_stats import MAX_STREAMS
from scheduler_components import ComponentError
from scheduler_components.values import LoadSnapshot
from scheduler_engine.proxy.answer_memory import HeldAnswer
from scheduler_engine.proxy.config import ProxyConfig
from scheduler_engine.proxy.routing_fields import MAX_HASHED_TOKENS

_MAX_ANSWER_BYTES = 4 * 2**20
"""SGLang's ``/server_info`` with all flags and internal states has 20 KB."""

_TOKENS_BASE_BYTES = 256 * 2**10
_BYTES_PER_TOKEN = 12
"""Ten digits, a comma and a space. A prompt has at most one token per byte; a chat template adds a few thousand."""

_MAX_MODELS_BYTES = 2**20
"""Some 4,000 models and adapters. The proxy keeps them for each engine."""

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_MAX_SHOWN = 200

_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

T = TypeVar("T")


class ReplicaError(ComponentError):
    """An engine answered a question of the proxy with an error, or not in the expected form. The text names its URL."""


class EngineDownError(ReplicaError):
    """The engine cannot be reached, or its connection ended before it answered.

    Args:
        message: names the URL and the reason.
        is_refused: no connection was made, so nothing listens there.
    """

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        self.is_refused = is_refused
        super().__init__(message)


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[_Token]


class _Loads(msgspec.Struct, frozen=True):
    loads: Annotated[list[LoadSnapshot], msgspec.Meta(max_length=MAX_STREAMS)]


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[msgspec.Raw]


class _ModelInfo(msgspec.Struct, frozen=True):
    adapters: dict[str, msgspec.Raw] = {}


@dataclass(slots=True, kw_only=True, frozen=True)
class EngineClient:
    """Sends HTTP requests to one engine. ``open_engine_client`` creates it.

    Attributes:
        url: of the engine.
        http: the connections. Its headers have the engine's API key.
        poll_timeout_s: longest time of an answer to the proxy itself.
        tokenize_timeout_s: longest time to get the tokens of a prompt.
    """

    url: str
    http: httpx.AsyncClient
    poll_timeout_s: float
    tokenize_timeout_s: float

    async def server_info(self) -> Any:
        """Return ``/server_info`` as JSON. Raises ReplicaError."""
        return await self._decoded("/server_info", Any)

    async def adapters(self) -> frozenset[str] | None:
        """Return the names of the adapters that the engine serves; None for an engine that does not list them.

        Raises:
            ReplicaError: the engine does not answer, or with an error of its own.
        """
        status, body = await self._ask("GET", "/model_info")
        if httpx.codes.is_client_error(status):  # it has no such route
            return None
        if status != httpx.codes.OK:
            raise ReplicaError(f"{self.url}/model_info answers {status}")
        return frozenset(self._decode("/model_info", body, _ModelInfo).adapters)

    async def models(self) -> Mapping[str, msgspec.Raw]:
        """Return the objects of ``/v1/models`` by id, as JSON; none for an engine that does not list them.

        Raises:
            ReplicaError: the engine does not answer, or with an error of its own.
        """
        status, body = await self._ask("GET", "/v1/models", max_bytes=_MAX_MODELS_BYTES)
        if httpx.codes.is_client_error(status):  # it has no such route
            return {}
        if status != httpx.codes.OK:
            raise ReplicaError(f"{self.url}/v1/models answers {status}")
        listed = self._decode("/v1/models", body, _Models).data
        return {self._decode("/v1/models", bytes(each), _Model).id: each.copy() for each in listed}

    async def is_ready(self) -> bool:
        """Return whether the engine takes requests: ``/ready``, or ``/health`` of an engine without that route.

        Raises:
            ReplicaError: the engine does not answer.
        """
        status, _ = await self._ask("GET", "/ready")
        if status == httpx.codes.NOT_FOUND:
            status, _ = await self._ask("GET", "/health")
        return status == httpx.codes.OK

    async def loads(self) -> list[LoadSnapshot]:
        """Return the newest load of each DP rank. Raises ReplicaError."""
        return (await self._decoded("/v1/loads?include=core,lora", _Loads)).loads

    async def tokenize(self, body: bytes, held: HeldAnswer) -> Sequence[int]:
        """Return the first ``MAX_HASHED_TOKENS`` tokens of a prompt.

        Raises:
            ReplicaError: the engine does not say them, or has no ``/tokenize``.
            AnswerMemoryError: other answers fill the memory.
        """
        limit, timeout_s = _TOKENS_BASE_BYTES + _BYTES_PER_TOKEN * len(body), self.tokenize_timeout_s
        status, answer = await self._ask("POST", "/tokenize", body, timeout_s=timeout_s, max_bytes=limit, held=held)
        if status != httpx.codes.OK:
            raise ReplicaError(f"{self.url}/tokenize answers {status}")
        return array("I", self._decode("/tokenize", answer, _Tokens).tokens[:MAX_HASHED_TOKENS])

    @asynccontextmanager
    async def forward(
        self, method: str, path: str, *, body: bytes | bytearray, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Send a client's request, and yield the response, whose body is not read yet.

        Raises:
            EngineDownError: the connection failed or ended before the response headers.
            TimeoutError: the engine was silent for too long.
        """
        request = self.http.build_request(method, self.url + path, content=bytes(body), headers=headers)
        try:
            response = await self.http.send(request, stream=True)
        except (httpx.ConnectTimeout, httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise self._down(error) from error
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{self.url} did not answer in time") from error
        try:
            yield response
        finally:
            await response.aclose()

    async def read(self, response: httpx.Response, held: HeldAnswer, *, max_bytes: int) -> bytes:
        """Return the whole body of a forwarded response.

        Raises:
            AnswerMemoryError: other answers fill the memory.
            EngineDownError: the connection ended before it was complete.
            ReplicaError: it is too long.
            TimeoutError: as ``forward``.
        """
        body = bytearray()
        async with aclosing(self._chunks(response)) as chunks:
            async for chunk in chunks:
                body += chunk
                held.resize(len(body))
                if len(body) > max_bytes:
                    raise ReplicaError(f"{self.url}: an answer is over {max_bytes} bytes")
        return bytes(body)

    async def events(
        self, response: httpx.Response, held: HeldAnswer, *, max_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield the whole server-sent events of a forwarded response as they arrive, one or more at a time.

        A client must not receive half an event. One of more than ``max_bytes`` is yielded in parts.

        Raises:
            AnswerMemoryError, EngineDownError, TimeoutError: as ``read``.
        """
        text = b""
        async with aclosing(self._chunks(response)) as chunks:
            async for chunk in chunks:
                text += chunk
                held.resize(len(text))
                whole = len(text) if len(text) > max_bytes else _length_of_whole_events(text)
                if whole:
                    yield text[:whole]
                    text = text[whole:]
        if text:
            yield text

    async def _chunks(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in response.aiter_raw():
                yield chunk
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{self.url} did not answer in time") from error
        except httpx.HTTPError as error:
            raise self._down(error) from error

    def session_id(self, body: bytes) -> str:
        """Read the answer of ``/open_session``. Raises ReplicaError."""
        return self._decode("/open_session", body, str)

    async def _decoded(self, path: str, kind: type[T]) -> T:
        status, body = await self._ask("GET", path)
        if status != httpx.codes.OK:
            raise ReplicaError(f"{self.url}{path} answers {status}")
        return self._decode(path, body, kind)

    def _decode(self, path: str, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._unreadable(path, error) from error

    async def _ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        timeout_s: float | None = None,
        max_bytes: int = _MAX_ANSWER_BYTES,
        held: HeldAnswer | None = None,
    ) -> tuple[int, bytes]:
        """Return the status and the whole body of an answer to the proxy itself.

        Raises:
            AnswerMemoryError: ``held`` cannot grow.
            EngineDownError: there was none in time.
            ReplicaError: it is too long.
        """
        body, limit_s = bytearray(), self.poll_timeout_s if timeout_s is None else timeout_s
        headers = {"content-type": "application/json"} if content is not None else {}
        try:
            async with (
                asyncio.timeout(limit_s),
                self.http.stream(method, self.url + path, content=content, headers=headers) as answer,
            ):
                async for chunk in answer.aiter_raw():
                    body += chunk
                    if held is not None:
                        held.resize(len(body))
                    if len(body) > max_bytes:
                        raise ReplicaError(f"{self.url}{path} is over {max_bytes} bytes")
        except httpx.HTTPError as error:
            raise self._down(error) from error
        except TimeoutError as error:
            raise EngineDownError(f"{self.url}{path} took more than {limit_s:g} s") from error
        return answer.status_code, bytes(body)

    def _down(self, error: httpx.HTTPError) -> EngineDownError:
        reason = escape_unprintable(str(error) or type(error).__name__)[:_MAX_SHOWN]
        is_refused = isinstance(error, httpx.ConnectError)
        return EngineDownError(f"{self.url} does not answer: {reason}", is_refused=is_refused)

    def _unreadable(self, path: str, error: Exception) -> ReplicaError:
        reason = escape_unprintable(str(error))[:_MAX_SHOWN]
        return ReplicaError(f"{self.url}{path} cannot be read: {reason}")


def _length_of_whole_events(text: bytes) -> int:
    """Return the length of the whole server-sent events at the beginning of ``text``."""
    return max(text.rfind(end) + len(end) if end in text else 0 for end in _EVENT_ENDS)


@asynccontextmanager
async def open_engine_client(url: str, config: ProxyConfig) -> AsyncIterator[EngineClient]:
    """Open the client of the engine at a URL, which has no final slash."""
    headers = {"accept-encoding": "identity"}  # bodies are passed on as they are
    if config.api_key is not None:
        headers["authorization"] = f"Bearer {config.api_key}"
    timeout = httpx.Timeout(config.answer_timeout_s, connect=config.connect_timeout_s, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)  # the proxy limits its requests
    # Without the environment's proxy, which usually cannot reach an engine.
    async with httpx.AsyncClient(
        headers=headers,
        timeout=timeout,
        limits=limits,
        verify=trusted_certificates(),
        trust_env=False,
        follow_redirects=False,
    ) as http:
        yield EngineClient(
            url=url,
            http=http,
            poll_timeout_s=config.poll_timeout_s,
            tokenize_timeout_s=config.tokenize_timeout_s,
        )
