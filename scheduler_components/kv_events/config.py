"""What an operator types after ``--kv-events-config``: checked whole, in one place, before any socket opens.

``KVEventsConfig`` is the only spelling of the publisher's settings: names, defaults, ranges and meaning.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from msgspec import UNSET
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from scheduler_components.errors import ConfigError
from scheduler_components.kv_events.codec import DIALECTS
from scheduler_components.kv_events.endpoints import Endpoint, PortPlan
from scheduler_components.kv_events.replay import REPLAY_FRAMINGS

__all__ = ["AUTHS", "SEND_MODES", "SEQ_BASES", "KVEventsConfig", "parse_json_object", "spelling_hint"]

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

_EXAMPLE = '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'

_TYPE_NAMES = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "int_type": "an integer",
    "string_type": "a string",
}


def spelling_hint(name: str, known: tuple[str, ...]) -> str:
    """Return what to write for a misspelt ``name``, as the hint of a ConfigError."""
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "give one of " + ", ".join(known)


class KVEventsConfig(BaseModel):
    """Settings of KV-event publishing; the first seven are those of SGLang's module, names and defaults alike.

    Nothing is coerced: ``"5557"`` is no integer, and neither is ``true``. Endpoints have the three shapes of
    ``Endpoint`` for every publisher; a third-party publisher that needs another address takes it in ``options``.

    Attributes:
        publisher: ``null`` (none), ``zmq``, or the name of a registered publisher. Publishing sends prompt token ids
            over the network, so nobody gets it without asking: the default is ``null``. Other settings without this
            one publish nothing, as in SGLang, and a warning says so.
        endpoint: base address of the PUB sockets; stream i is at port + i. 5557 is where consumers look by default.
        replay_endpoint: base address of the replay ROUTER sockets, which always bind. No port is claimed unasked.
        buffer_steps: batches kept for replay: minutes of a busy scheduler. 0 keeps none, which replay does not allow.
        hwm: batches that libzmq may hold for one slow subscriber before it drops them; 100,000 as in the seed.
        max_queue_size: accepted batches that may wait to be sent; 100,000 as in the seed.
        topic: first frame of every message; empty as in the seed: a reader that was told of no topic hears it.
        dialect: ``array`` (the smallest form, which all measured readers take), ``map`` or ``vllm``.
        bind: whether the PUB sockets listen. None follows the host: wildcards, ipc and inproc bind, others connect.
        replay_framing: ``seed`` (all measured readers take it) or ``topic`` (as SGLang and vLLM answer today).
        seq_base: ``zero`` (as in the seed): plain consumers ignore a publisher that was started again until it has
            passed its old number. ``clock`` starts at wall-clock microseconds, with AllBlocksCleared: plain consumers
            see the restart, and numbers take 9 bytes. It starts above every earlier life for as long as the clock is
            not set back; with ``seq_floor_file``, also then.
        seq_floor_file: for ``clock`` alone: a small file that must survive restarts, where the stream keeps a floor
            for the numbers of its next life; stream i > 0 adds ``_dp{i}``. Without it nothing outlives the process.
        load_endpoint: base address of the load gauge's PUB sockets. No port is claimed unasked.
        buffer_bytes: bytes that batches kept for replay may take, whatever their number: 256 MiB holds 10,000
            batches of some 5,000 tokens each, and is small beside a scheduler process.
        send_mode: who sends where ``idle()`` is not called, as in vLLM and SGLang. ``background``: the publisher's
            thread, and ``publish()`` what the thread has not taken in 4 ms: some 2 us in the scheduler's step, 1 to
            4 ms until delivery. ``inline``: ``publish()`` before it returns: 40 to 300 us in the step, 0.15 ms until
            delivery. Users of an engine wait for its steps, and routers can wait some milliseconds.
        auth: ``none`` (everybody who reaches an address reads it, as in the seed) or ``required``: CURVE, and only
            clients whose key is allowed. SECURITY.md says how.
        secret_key_file: the publisher's key pair, made by ``scheduler-components keygen``; for ``required`` alone.
        client_keys_dir: directory of the allowed clients' public keys, read at start; for ``required`` alone.
        options: further keyword arguments of a third-party publisher; the kit's own take none.

    Raises:
        ConfigError: naming the setting, the value, what is wrong and what to write.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _config_error(error.errors(include_url=False)[0]) from None

    @classmethod
    def from_cli(cls, text: str) -> KVEventsConfig:
        """Read the JSON object that follows ``--kv-events-config``.

        Raises:
            ConfigError: not JSON, not an object, a key twice, an unknown key, or a bad value.
        """
        return cls(**parse_json_object(text, field="kv_events_config", example=_EXAMPLE))

    @classmethod
    def read(cls, config: str | KVEventsConfig) -> KVEventsConfig:
        """Return ``config``, read first where it is text; see ``from_cli``."""
        return config if isinstance(config, KVEventsConfig) else cls.from_cli(config)

    def changed(self, **settings: Any) -> KVEventsConfig:
        """Return this configuration with other ``settings``, checked anew; those that are ``msgspec.UNSET`` stay.

        Raises:
            ConfigError: what comes of it is not right.
        """
        present = dict(self)
        changes = {name: value for name, value in settings.items() if value is not UNSET}
        is_same = all(
            type(value) is type(present.get(name)) and value == present.get(name) for name, value in changes.items()
        )
        return self if is_same else KVEventsConfig(**(present | changes))

    def sglang_arguments(self) -> dict[str, Any]:
        """Return what SGLang's factory passes to a publisher, beside the rank, by name."""
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
            raise ConfigError("topic", self.topic, "has no UTF-8 form", "take out the lone surrogate") from None
        if "\0" in self.topic:
            raise ConfigError("topic", self.topic, "holds a NUL, where readers in C end it", "take it out")
        self._check_floor()
        if self.replay_endpoint is not None and self.buffer_steps == 0:
            raise ConfigError(
                "buffer_steps", 0, "leaves the replay endpoint nothing to answer with", "keep at least 1 batch"
            )
        if self.options and self.publisher in ("null", "zmq"):
            raise ConfigError("options", self.options, f"go to no publisher {self.publisher!r}", "take them out")
        plan = self.port_plan(1)
        plan.events.resolve_bind(self.bind)
        self._check_auth(plan)
        return self

    def _check_floor(self) -> None:
        name = self.seq_floor_file
        if name is None:
            return
        if self.seq_base != "clock":
            raise ConfigError("seq_floor_file", name, f"is not used by seq_base {self.seq_base!r}", 'say "clock" there')
        if "\0" in name or not name.isprintable() or not Path(name).name:
            raise ConfigError("seq_floor_file", name, "is not the path of a file", "give one, or take it out")

    def _check_auth(self, plan: PortPlan) -> None:
        """Keys and ``auth`` come together, so that nobody relies on a protection that is not there."""
        for field in ("secret_key_file", "client_keys_dir"):
            path = getattr(self, field)
            if self.auth == "required" and not path:
                raise ConfigError(field, path, 'is missing, and auth is "required"', "give its path")
            if self.auth == "none" and path is not None:
                raise ConfigError("auth", "none", f"leaves {field} without use", 'give "required", or take that out')
        endpoints = (("endpoint", plan.events), ("replay_endpoint", plan.replay))
        for field, endpoint in endpoints if self.auth == "required" else ():
            if endpoint is not None and endpoint.transport == "inproc":
                raise ConfigError(field, str(endpoint), "has no keys, and auth is required", "give tcp or ipc")

    def port_plan(self, stream_count: int) -> PortPlan:
        """Give every stream its endpoints.

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


def parse_json_object(text: str, *, field: str, example: str) -> dict[str, Any]:
    """Read the JSON object that a person wrote as the setting ``field``; ``example`` is one that would do.

    Raises:
        ConfigError: not JSON, not an object, or a key twice.
    """
    hint = f"give a JSON object, such as {example}"
    try:
        settings = json.loads(text, object_pairs_hook=_object_without_repeats)
    except ConfigError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(field, text, f"is not JSON ({error})", hint) from None
    if not isinstance(settings, dict):
        raise ConfigError(field, text, "is JSON, but not an object", hint)
    return settings


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of two equal keys; here the second is a mistake that would otherwise stay hidden."""
    settings: dict[str, Any] = {}
    for key, value in pairs:
        if key in settings:
            raise ConfigError(key, value, "is given twice", "keep one of the two")
        settings[key] = value
    return settings


def _config_error(details: ErrorDetails) -> ConfigError:
    """Say in one sentence of this kit's what pydantic found first."""
    raised = details.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):
        return raised
    field = str(details["loc"][0]) if details["loc"] else "kv_events_config"
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        hint = spelling_hint(field, tuple(KVEventsConfig.model_fields))
        return ConfigError(field, value, "is not a setting of KV events", hint)
    if kind in _TYPE_NAMES:
        return ConfigError(field, value, f"is not {_TYPE_NAMES[kind]}", f"give {_TYPE_NAMES[kind]}")
    bounds = details.get("ctx", {})
    if "ge" in bounds:
        return ConfigError(field, value, "is too small", f"give at least {bounds['ge']}")
    if "le" in bounds:
        return ConfigError(field, value, "is too large", f"give at most {bounds['le']}")
    return ConfigError(field, value, "does not fit", details["msg"])
