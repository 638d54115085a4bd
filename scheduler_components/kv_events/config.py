"""KVEventsConfig: the JSON after ``--kv-events-config``, validated completely before any socket opens.

``KVEventsConfig`` is the only declaration of the publisher's settings: names, defaults, ranges and meaning.
``JsonSettings`` is what all settings that are written as JSON have in common.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, cast

from msgspec import UNSET
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from scheduler_components.errors import ConfigError
from scheduler_components.kv_events.codec import DIALECTS
from scheduler_components.kv_events.endpoints import Endpoint, PortPlan
from scheduler_components.kv_events.replay import REPLAY_FRAMINGS

__all__ = ["AUTHS", "SEND_MODES", "SEQ_BASES", "JsonSettings", "KVEventsConfig", "parse_json_object", "spelling_hint"]

SEQ_BASES = ("zero", "clock")
SEND_MODES = ("background", "inline")
AUTHS = ("none", "required")

_MAX_COUNT = 2**31 - 1
"""libzmq keeps high-water marks in a C int; no machine holds this many batches either."""

_Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]

_CHOICES = {
    "dialect": DIALECTS,
    "replay_framing": REPLAY_FRAMINGS,
    "seq_base": SEQ_BASES,
    "send_mode": SEND_MODES,
    "auth": AUTHS,
}

_TYPE_NAMES = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "int_type": "an integer",
    "model_type": "an object",
    "string_type": "a string",
    "float_type": "a number",
    "finite_number": "a finite number",
}

_BOUNDS = (
    ("ge", "is too small", "at least"),
    ("gt", "is too small", "more than"),
    ("le", "is too large", "at most"),
)


def spelling_hint(name: str, known: tuple[str, ...]) -> str:
    """Return the hint of a ConfigError for a misspelt ``name``."""
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "give one of " + ", ".join(known)


def parse_json_object(text: str | bytes | bytearray, *, field: str, example: str) -> dict[str, Any]:
    """Parse the JSON object that a user wrote as the setting ``field``. ``example`` is a valid one, for the hint.

    Raises:
        ConfigError: not UTF-8, not JSON, not an object, or a repeated key.
    """
    hint = f"give a JSON object, such as {example}"
    try:
        plain = text if isinstance(text, str) else bytes(text).decode()
        settings = json.loads(plain, object_pairs_hook=_object_without_repeats)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 ({error.reason} at byte {error.start})"
        raise ConfigError(field, text, problem, hint) from None
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(field, text, f"is not JSON ({error})", hint) from None
    if not isinstance(settings, dict):
        raise ConfigError(field, text, "is JSON, but not an object", hint)
    return settings


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject a repeated key. JSON would silently keep the last of two equal keys."""
    settings: dict[str, Any] = {}
    for key, value in pairs:
        if key in settings:
            raise ConfigError(key, value, "is given twice", "keep one of the two")
        settings[key] = value
    return settings


class JsonSettings(BaseModel):
    """Settings that an operator writes as a JSON object. The only way in which the kit reads settings from text.

    Values are not coerced: ``"5557"`` is no integer, and neither is ``true``. An unknown key is an error, and so is a
    repeated one. Every error of a subclass is a ConfigError with the setting, the value, the problem and a hint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    text_name: ClassVar[str]
    """Name of the option, key or variable that has the text."""

    example: ClassVar[str]

    def __init__(self, /, **settings: Any) -> None:
        with self._as_config_error():
            super().__init__(**settings)

    @classmethod
    def from_cli(cls, text: str) -> Self:
        """Parse the JSON object that an operator wrote.

        Raises:
            ConfigError: not JSON, not an object, a repeated key, an unknown key, or an invalid value.
        """
        return cls(**parse_json_object(text, field=cls.text_name, example=cls.example))

    @classmethod
    def read(cls, config: str | Mapping[str, object] | Self) -> Self:
        """Return the settings that ``config`` is: the JSON of ``from_cli``, settings by name, or itself.

        Raises:
            ConfigError: as ``from_cli``.
        """
        if isinstance(config, Mapping):
            return cls.model_validate({str(name): value for name, value in config.items()})
        return config if isinstance(config, cls) else cls.from_cli(cast("str", config))

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """As pydantic's, with a ConfigError for an invalid setting."""
        with cls._as_config_error():
            return super().model_validate(obj, **how)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **how: Any) -> Self:
        """As pydantic's, with a ConfigError for an invalid setting or text. A repeated key is invalid, too."""
        return cls.model_validate(parse_json_object(json_data, field=cls.text_name, example=cls.example), **how)

    def changed(self, **settings: Any) -> Self:
        """Return these with other ``settings``, validated again. Settings that are ``msgspec.UNSET`` stay.

        Raises:
            ConfigError: the new settings are invalid.
        """
        present = dict(self)
        changes = {name: value for name, value in settings.items() if value is not UNSET}
        is_same = all(
            type(value) is type(present.get(name)) and value == present.get(name) for name, value in changes.items()
        )
        return self if is_same else type(self)(**(present | changes))

    @classmethod
    @contextmanager
    def _as_config_error(cls) -> Iterator[None]:
        """Raise the first error of pydantic as a ConfigError."""
        try:
            yield
        except ValidationError as error:
            raise cls._config_error(error.errors(include_url=False)[0]) from None

    @classmethod
    def _config_error(cls, details: ErrorDetails) -> ConfigError:
        bounds = details.get("ctx", {})
        if isinstance(raised := bounds.get("error"), ConfigError):
            return raised
        field = str(details["loc"][0]) if details["loc"] else cls.text_name
        kind, value = details["type"], details["input"]
        if kind == "extra_forbidden":
            hint = spelling_hint(field, tuple(cls.model_fields))
            return ConfigError(field, value, f"is not a setting of {cls.text_name}", hint)
        if kind == "missing":
            return ConfigError(field, None, "is missing", f"give it, as in {cls.example}")
        if kind == "literal_error":
            return ConfigError(field, value, "is not known", f"give {bounds['expected']}")
        if kind in _TYPE_NAMES:
            return ConfigError(field, value, f"is not {_TYPE_NAMES[kind]}", f"give {_TYPE_NAMES[kind]}")
        for bound, problem, hint in _BOUNDS:
            if bound in bounds:
                return ConfigError(field, value, problem, f"give {hint} {bounds[bound]}")
        return ConfigError(field, value, "does not fit", details["msg"])


class KVEventsConfig(JsonSettings):
    """Settings of KV-event publishing. The first seven have the names and defaults of SGLang's module.

    Endpoints have the three forms of ``Endpoint`` for every publisher; a third-party publisher that needs another
    address takes it in ``options``.

    Attributes:
        publisher: ``null`` (none), ``zmq``, or the name of a registered publisher. Publishing sends prompt token ids
            over the network, so the default is ``null``. Other settings without this one publish nothing, as in SGLang,
            and log a warning.
        endpoint: base address of the PUB sockets; stream i is at port + i. Consumers expect 5557 by default.
        replay_endpoint: base address of the replay ROUTER sockets, which always bind. None opens no port.
        buffer_steps: batches kept for replay: minutes of a busy scheduler. 0 keeps none and excludes replay.
        hwm: batches that libzmq queues for one slow subscriber before it drops them; 100,000 as in SGLang's seed.
        max_queue_size: accepted batches that may wait to be sent; 100,000 as in the seed.
        topic: first frame of every message; empty as in the seed, so that a reader without a topic receives it.
        dialect: ``array`` (the smallest form, which all measured readers accept), ``map`` or ``vllm``.
        bind: whether the PUB sockets bind. None decides by the host: wildcards, ipc and inproc bind, others connect.
        replay_framing: ``seed`` (all measured readers accept it) or ``topic`` (as SGLang and vLLM answer at present).
        seq_base: ``zero`` (as in the seed): after a restart, plain consumers ignore the publisher until its numbers
            pass the old ones. ``clock`` starts at wall-clock microseconds, with AllBlocksCleared: plain consumers see
            the restart, and numbers take 9 bytes. It starts above every earlier epoch as long as the clock is not set
            back; with ``seq_floor_file``, also then.
        seq_floor_file: only for ``clock``: a small file that must survive restarts, in which the stream keeps a lower
            bound for the numbers of its next epoch; stream i > 0 adds ``_dp{i}``. None keeps no file.
        load_endpoint: base address of the load gauge's PUB sockets. None opens no port.
        buffer_bytes: maximum bytes of the batches kept for replay: 256 MiB holds 10,000 batches of some 5,000 tokens
            each, which is small compared with a scheduler process.
        send_mode: who sends if ``idle()`` is not called, as in vLLM and SGLang. ``background``: the publisher's thread,
            and ``publish()`` when twelve batches wait or one has waited for 4 ms. It costs some 2 us in the step if the
            thread gets the GIL, and delivery takes 1 to 4 ms. ``inline``: ``publish()`` before it returns. It costs 40
            to 300 us in the step, and delivery takes 0.15 ms. The default favours the step, because an engine's users
            wait for it while routers can wait some milliseconds.
        auth: ``none`` (anyone who reaches an address can read it, as in the seed) or ``required``: CURVE, and only
            clients whose key is allowed. See SECURITY.md.
        secret_key_file: the publisher's key pair, created by ``scheduler-components keygen``; only for ``required``.
        client_keys_dir: directory of the allowed clients' public keys, read at start; only for ``required``.
        options: further keyword arguments of a third-party publisher; the kit's own take none.

    Raises:
        ConfigError: with the setting, the value, the problem and a hint.
    """

    text_name = "kv_events_config"
    example = '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, Field(ge=0, le=_MAX_COUNT)] = 10_000
    hwm: _Count = 100_000
    max_queue_size: _Count = 100_000
    topic: str = ""
    dialect: str = "array"
    bind: bool | None = None
    replay_framing: str = "seed"
    seq_base: str = "zero"
    seq_floor_file: str | None = None
    load_endpoint: str | None = None
    buffer_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)] = 256 * 1024 * 1024
    send_mode: str = "background"
    auth: str = "none"
    secret_key_file: str | None = None
    client_keys_dir: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, /, **settings: Any) -> None:  # for type checkers: values are checked here
        super().__init__(**settings)

    def sglang_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that SGLang's factory passes to a publisher in addition to the rank."""
        return {
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self.buffer_steps,
            "hwm": self.hwm,
            "max_queue_size": self.max_queue_size,
            "topic": self.topic,
        }

    @model_validator(mode="after")
    def _check(self) -> KVEventsConfig:
        if not self.publisher:
            raise ConfigError("publisher", "", "is empty", "give null, zmq or the name of a registered publisher")
        for field, known in _CHOICES.items():
            value = getattr(self, field)
            if value not in known:
                raise ConfigError(field, value, "is not known", spelling_hint(value, known))
        try:
            self.topic.encode()
        except UnicodeEncodeError:
            raise ConfigError("topic", self.topic, "cannot be encoded as UTF-8", "remove the lone surrogate") from None
        if "\0" in self.topic:
            raise ConfigError("topic", self.topic, "contains a NUL, which ends it for readers in C", "remove it")
        self._check_floor()
        if self.replay_endpoint is not None and self.buffer_steps == 0:
            raise ConfigError("buffer_steps", 0, "keeps no batches for the replay endpoint", "keep at least 1 batch")
        if self.options and self.publisher in ("null", "zmq"):
            raise ConfigError(
                "options", self.options, f"are not accepted by the publisher {self.publisher!r}", "remove them"
            )
        plan = self.port_plan(1)
        plan.events.resolve_bind(self.bind)
        self._check_auth(plan)
        return self

    def _check_floor(self) -> None:
        name = self.seq_floor_file
        if name is None:
            return
        if self.seq_base != "clock":
            raise ConfigError(
                "seq_floor_file", name, f"is not used with seq_base {self.seq_base!r}", 'give seq_base "clock"'
            )
        if "\0" in name or not name.isprintable() or not Path(name).name:
            raise ConfigError("seq_floor_file", name, "is not the path of a file", "give one, or remove it")

    def _check_auth(self, plan: PortPlan) -> None:
        """Require keys and ``auth`` together, so that no operator relies on a protection that is not active."""
        for field in ("secret_key_file", "client_keys_dir"):
            path = getattr(self, field)
            if self.auth == "required" and not path:
                raise ConfigError(field, path, 'is missing, and auth is "required"', "give its path")
            if self.auth == "none" and path is not None:
                raise ConfigError("auth", "none", f"does not use {field}", f'give "required", or remove {field}')
        endpoints = (("endpoint", plan.events), ("replay_endpoint", plan.replay))
        for field, endpoint in endpoints if self.auth == "required" else ():
            if endpoint is not None and endpoint.transport == "inproc":
                raise ConfigError(field, str(endpoint), "has no keys, and auth is required", "give tcp or ipc")

    def port_plan(self, stream_count: int) -> PortPlan:
        """Return the endpoints of all streams.

        Raises:
            ConfigError: a range passes port 65535, or two ranges overlap.
        """
        return PortPlan(
            events=Endpoint.parse(self.endpoint, field="endpoint"),
            replay=_optional_endpoint("replay_endpoint", self.replay_endpoint),
            load=_optional_endpoint("load_endpoint", self.load_endpoint),
            stream_count=stream_count,
        )


def _optional_endpoint(field: str, text: str | None) -> Endpoint | None:
    return None if text is None else Endpoint.parse(text, field=field)
