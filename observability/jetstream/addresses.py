"""The names of a KV-event log in NATS: stream, subjects, buckets and keys.

A *log* is one worker's stream in JetStream. Each of the worker's KV-event streams has one subject in it.
"""

from __future__ import annotations

import re

import attrs

from scheduler_components import ConfigError
from scheduler_components._internal.validators import integer_validator

__all__ = ["LogAddress", "check_prefix"]

_TOKEN_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_NAME_BYTES = 80
"""Of a worker or topic. The server refuses stream names above 255 bytes, and a byte may take three characters."""


def _token_of(name: str) -> str:
    """Return ``name`` as one token of a subject, key or stream name: ``=`` and two digits for other bytes.

    The empty name becomes ``=``.
    """
    return "".join(chr(byte) if byte in _TOKEN_BYTES else f"={byte:02X}" for byte in name.encode()) or "="


def check_prefix(field: str, prefix: object) -> None:
    """Check that ``prefix`` can begin the names of subjects and buckets.

    Raises:
        ConfigError: it cannot; the error names ``field``.
    """
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise ConfigError(field, prefix, "cannot begin a name in NATS", "give letters, digits, - or _, 1 to 64")


def _is_prefix(_: object, attribute: attrs.Attribute[str], value: object) -> None:
    check_prefix(attribute.name, value)


def _is_name(_: object, attribute: attrs.Attribute[str], value: object) -> None:
    if (
        not isinstance(value, str)
        or len(value.encode()) > _MAX_NAME_BYTES
        or (attribute.name == "worker" and not value)
    ):
        hint = f"give a text of at most {_MAX_NAME_BYTES} bytes"
        raise ConfigError(attribute.name, value, "is not a name in a log", hint)


@attrs.frozen
class LogAddress:
    """The address of one KV-event stream in JetStream.

    Attributes:
        worker: any text that identifies the worker in the fleet, such as its URL.
        topic, rank: of the stream.
        prefix: of every name; one per fleet.

    Raises:
        ConfigError: a name is empty or too long, or the rank is below 0.
    """

    worker: str = attrs.field(validator=_is_name)
    rank: int = attrs.field(default=0, validator=integer_validator("is not a rank", at_least=0))
    topic: str = attrs.field(default="", validator=_is_name)
    prefix: str = attrs.field(default="kv-events", validator=_is_prefix)

    def __str__(self) -> str:
        return self.subject

    @property
    def log(self) -> str:
        """Name of the worker's stream in JetStream."""
        return f"{self.prefix}-log-{_token_of(self.worker)}"

    @property
    def wildcard_subject(self) -> str:
        """All subjects of the worker's stream."""
        return f"{self.prefix}.log.{_token_of(self.worker)}.>"

    @property
    def subject(self) -> str:
        """Subject of the messages."""
        return f"{self.prefix}.log.{self.pointer_key}"

    @property
    def heartbeat_subject(self) -> str:
        """Subject of the writer's heartbeats, which no stream stores."""
        return f"{self.prefix}.beat.{self.pointer_key}"

    @property
    def problem_subject(self) -> str:
        """Subject on which the writer says why it cannot store batches. No stream stores it."""
        return f"{self.heartbeat_subject}.problem"

    @property
    def snapshot_request_subject(self) -> str:
        """Subject on which readers ask the writer for another snapshot."""
        return f"{self.prefix}.wanted.{self.pointer_key}"

    @property
    def pointer_key(self) -> str:
        """Key of the snapshot pointer in its bucket."""
        return f"{_token_of(self.worker)}.{_token_of(self.topic)}.{self.rank}"

    @property
    def pointer_bucket(self) -> str:
        """Key-value bucket of the pointers of all workers."""
        return f"{self.prefix}-heads"

    @property
    def snapshot_bucket(self) -> str:
        """Object bucket of the snapshots of all workers."""
        return f"{self.prefix}-bases"

    def snapshot_object(self, slot: int) -> str:
        """Return the name of one of the two objects that hold a stream's snapshots in turn."""
        return f"{self.pointer_key}.{slot}"
