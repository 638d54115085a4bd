"""ProxyConfig: the engines behind a proxy, and its limits."""

from __future__ import annotations

import attrs

from observability.kv_stream import parse_worker_url
from scheduler_components import ConfigError
from scheduler_components._internal.validators import integer_validator, number_validator
from scheduler_components.kv_events import CurveClientKeys

MAX_ENGINES = 256
"""Each has a thread that follows its streams, and is polled twice per ``poll_interval_s``."""

MAX_REQUESTS = 1024
ANSWER_TIMEOUT_S = 600.0
POLL_INTERVAL_S = 0.5

_positive = number_validator("is not a time span")


def _urls(given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_url(text) for text in given)


def _url(text: str) -> str:
    url = parse_worker_url(text)
    if url.userinfo:  # the proxy's status shows the URLs
        raise ConfigError("replica", url.host, "has a password in its URL", "give the engine's API key instead")
    return str(url).rstrip("/")


def _check_urls(_: object, __: object, urls: tuple[str, ...]) -> None:
    if not 0 < len(urls) <= MAX_ENGINES:
        raise ConfigError("replica", len(urls), "is not a number of replicas", f"give 1 to {MAX_ENGINES} URLs")
    repeated = next((url for url in urls if urls.count(url) > 1), None)
    if repeated is not None:
        raise ConfigError("replica", repeated, "is given twice", "give each replica once")


@attrs.frozen(kw_only=True)
class ProxyConfig:
    """The configuration of a proxy.

    Attributes:
        urls: of the engines.
        api_key: key that the engines require; None if they require none.
        stream_keys: CURVE keys of this client of the engines' streams; None for streams without authentication.
        max_requests: open requests; further ones get 503.
        max_pending_bytes: limit of the bodies of open requests in memory.
        max_answer_bytes: limit of the answers of engines in memory, beyond the first 64 KiB of each.
        max_attempts: how many replicas may receive one request, if the first ones fail before they answer.
        connect_timeout_s: longest time to connect to an engine.
        answer_timeout_s: longest silence of an engine that serves a request. OpenAI's clients wait as long.
        tokenize_timeout_s: longest time to get the tokens of a prompt. Without them the load alone decides.
        poll_interval_s: pause between two questions for readiness and load.
        poll_timeout_s: longest time of such an answer.
        max_failed_polls: an engine that has failed so many in a row is down. One that refuses a connection is down
            immediately.
        description_interval_s: pause between two readings of ``/server_info``, which may name other streams.
        retry_min_s, retry_max_s: the pause between two attempts to reach an engine that is down doubles between these.

    Raises:
        ConfigError: an invalid value. ``urls`` are called ``replica`` there, as the command does.
    """

    urls: tuple[str, ...] = attrs.field(converter=_urls, validator=_check_urls)
    api_key: str | None = attrs.field(default=None, repr=False)
    stream_keys: CurveClientKeys | None = None
    max_requests: int = attrs.field(default=MAX_REQUESTS, validator=integer_validator())
    max_pending_bytes: int = attrs.field(default=256 * 2**20, validator=integer_validator())
    max_answer_bytes: int = attrs.field(default=256 * 2**20, validator=integer_validator())
    max_attempts: int = attrs.field(default=3, validator=integer_validator())
    connect_timeout_s: float = attrs.field(default=2.0, validator=_positive)
    answer_timeout_s: float = attrs.field(default=ANSWER_TIMEOUT_S, validator=_positive)
    tokenize_timeout_s: float = attrs.field(default=5.0, validator=_positive)
    poll_interval_s: float = attrs.field(default=POLL_INTERVAL_S, validator=_positive)
    poll_timeout_s: float = attrs.field(default=1.0, validator=_positive)
    max_failed_polls: int = attrs.field(default=3, validator=integer_validator())
    description_interval_s: float = attrs.field(default=5.0, validator=_positive)
    retry_min_s: float = attrs.field(default=0.2, validator=_positive)
    retry_max_s: float = attrs.field(default=5.0, validator=_positive)

    def __attrs_post_init__(self) -> None:
        if self.retry_max_s < self.retry_min_s:
            problem = f"is shorter than retry_min_s={self.retry_min_s:g}"
            raise ConfigError("retry_max_s", self.retry_max_s, problem, "give a longer one")
