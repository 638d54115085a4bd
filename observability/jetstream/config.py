"""The value of ``--jetstream``: where the broker is, and how much it keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs

from observability.jetstream.addresses import check_prefix
from scheduler_components import ConfigError
from scheduler_components._internal.validators import integer_validator, number_validator

__all__ = ["JetStreamConfig"]

_SCHEMES = ("nats", "tls", "ws", "wss")
_MAX_REPLICAS = 5


def _servers(value: object) -> tuple[str, ...]:
    """Split one URL, or several separated by commas; or return a list of URLs as a tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return tuple(value) if isinstance(value, Iterable) else (str(value),)


def _are_servers(_: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    for url in value or ("",):
        try:
            parts = urlsplit(url if isinstance(url, str) else "")
            is_valid = parts.scheme in _SCHEMES and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ConfigError(attribute.name, url, "is not a NATS server", "give a URL such as nats://127.0.0.1:4222")


def _is_prefix(_: object, attribute: attrs.Attribute[str], value: object) -> None:
    check_prefix(attribute.name, value)


def _is_replicas(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    integer_validator("is not a number of copies")(_, attribute, value)
    if isinstance(value, int) and value > _MAX_REPLICAS:
        hint = f"give 1 to {_MAX_REPLICAS}; 3 survives the loss of one server"
        raise ConfigError(attribute.name, value, "is above the limit of JetStream", hint)


def _is_file(_: object, attribute: attrs.Attribute[str | None], value: object) -> None:
    if value is not None and not (isinstance(value, str) and Path(value).is_file()):
        raise ConfigError(attribute.name, value, "is not a file", "give the path of a user's .creds file")


@attrs.frozen(kw_only=True)
class JetStreamConfig:
    """Where the broker is and how much it keeps.

    The limits of a log bound the broker's disk, and the messages that a late reader must read after the snapshot. The
    writer stores a new snapshot when half of any limit is used, so that the broker only drops messages that the
    snapshot covers.

    Attributes:
        servers: URLs, tried in any order; they may contain user and password.
        prefix: of all names in the broker; one per fleet.
        replicas: copies of each log and bucket: 1 needs one server, 3 survive the loss of one of three.
        max_msgs: batches that the broker keeps per stream: half a minute of a busy scheduler (2,000 per second).
        max_bytes: bytes that it keeps per worker: ``max_msgs`` batches of 4 KiB, some 1,000 tokens each.
        max_age_s: seconds that it keeps data of a stopped worker: long enough for a restart, and short enough that no
            cleanup is needed.
        credentials_file: of a user with a JWT, in the format of the broker's own tools.

    Raises:
        ConfigError: a setting is invalid; the error names the setting, the value and a valid form.
    """

    servers: tuple[str, ...] = attrs.field(converter=_servers, validator=_are_servers)
    prefix: str = attrs.field(default="kv-events", validator=_is_prefix)
    replicas: int = attrs.field(default=1, validator=_is_replicas)
    max_msgs: int = attrs.field(default=65_536, validator=integer_validator("is too few for a window", at_least=16))
    max_bytes: int = attrs.field(
        default=256 * 1024 * 1024, validator=integer_validator("is too small", at_least=65_536)
    )
    max_age_s: float = attrs.field(default=3_600.0, validator=number_validator())
    credentials_file: str | None = attrs.field(default=None, validator=_is_file)

    @classmethod
    def from_cli(cls, text: str) -> JetStreamConfig:
        """Parse a URL, several URLs separated by commas, or a JSON object of settings.

        Raises:
            ConfigError: the text is none of them, or has an unknown setting or a bad value.
        """
        if not text.lstrip().startswith("{"):
            return cls(servers=text)
        hint = 'give nats://HOST:4222, or {"servers": "nats://HOST:4222", "replicas": 3}'
        try:
            settings: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError("jetstream", text, f"is not JSON: {error}", hint) from None
        known = tuple(field.name for field in attrs.fields(cls))
        for name in settings:
            if name not in known:
                raise ConfigError(
                    name, settings[name], "is not a setting of jetstream", f"give one of {', '.join(known)}"
                )
        if "servers" not in settings:
            raise ConfigError("servers", None, "is missing", hint)
        return cls(**settings)
