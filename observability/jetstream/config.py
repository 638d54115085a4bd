"""The value of ``--jetstream``: where the broker is, and how much it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from observability.jetstream.addresses import check_prefix
from scheduler_components import ConfigError
from scheduler_components.kv_events.config import JsonSettings

__all__ = ["JetStreamConfig"]

_SCHEMES = ("nats", "tls", "ws", "wss")
_MAX_REPLICAS = 5


def _split(servers: object) -> object:
    """Split one URL, or several separated by commas; leave anything else as it is, a list as a tuple."""
    if isinstance(servers, str):
        return tuple(part.strip() for part in servers.split(","))
    return tuple(servers) if isinstance(servers, list) else servers


class JetStreamConfig(JsonSettings):
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

    text_name = "jetstream"
    example = '{"servers": "nats://HOST:4222", "replicas": 3}'

    servers: Annotated[tuple[str, ...], BeforeValidator(_split)]
    prefix: str = "kv-events"
    replicas: Annotated[int, Field(ge=1)] = 1
    max_msgs: Annotated[int, Field(ge=16)] = 65_536
    max_bytes: Annotated[int, Field(ge=65_536)] = 256 * 1024 * 1024
    max_age_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3_600.0
    credentials_file: str | None = None

    def __init__(self, /, **settings: Any) -> None:  # for type checkers: values are checked here
        super().__init__(**settings)

    @classmethod
    def from_cli(cls, text: str) -> Self:
        """Parse a URL, several URLs separated by commas, or a JSON object of settings.

        Raises:
            ConfigError: the text is none of them, or has an unknown setting or a bad value.
        """
        return super().from_cli(text) if text.lstrip().startswith("{") else cls(servers=text)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for url in self.servers or ("",):
            try:
                parts = urlsplit(url)
                is_valid = parts.scheme in _SCHEMES and bool(parts.hostname) and (parts.port or 1) > 0
            except ValueError:
                is_valid = False
            if not is_valid:
                raise ConfigError("servers", url, "is not a NATS server", "give a URL such as nats://127.0.0.1:4222")
        check_prefix("prefix", self.prefix)
        if self.replicas > _MAX_REPLICAS:
            hint = f"give 1 to {_MAX_REPLICAS}; 3 survives the loss of one server"
            raise ConfigError("replicas", self.replicas, "is above the limit of JetStream", hint)
        if self.credentials_file is not None and not Path(self.credentials_file).is_file():
            problem, hint = "is not a file", "give the path of a user's .creds file"
            raise ConfigError("credentials_file", self.credentials_file, problem, hint)
        return self
