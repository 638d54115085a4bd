"""CURVE keys: create, read and check key files, admit clients to a stream, and authenticate a subscriber.

The files are ZeroMQ certificates, which ``zmq.auth``, CZMQ and others read. ``NAME.key_secret`` holds both keys of a
pair and stays where it was created. ``NAME.key`` holds the public key and is distributed.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import zmq
import zmq.auth

from scheduler_components.errors import ConfigError, StartError

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

    from scheduler_components.kv_events.config import KVEventsConfig

__all__ = [
    "PUBLIC_SUFFIX",
    "SECRET_SUFFIX",
    "CurveKeyPair",
    "read_key_pair",
    "read_public_key",
    "write_key_pair",
    "CurveClientKeys",
    "CurveServerKeys",
    "apply_curve_client_keys",
]

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"  # noqa: S105 - a suffix, no password

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_KEY_TEXT = re.compile(rb"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""A 32-byte key in Z85, the text form that libzmq accepts."""

_MAX_KEY_FILE_BYTES = 64 * 1024
_MAKE_KEYS = "give a file that 'scheduler-components keygen' made"


@attrs.frozen
class CurveKeyPair:
    """Both keys of one party, as Z85 text of 40 bytes. ``repr`` omits the secret one."""

    public: bytes
    secret: bytes = attrs.field(repr=False)


def write_key_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """Create a key pair. Return the public file and the secret file, which only its owner can read.

    Args:
        directory: created with private permissions if it is absent.
        name: of the party, for example ``"router-1"``.

    Raises:
        ConfigError: the name is not a valid file name, or already has keys, which are never overwritten.
        StartError: the system refused to write.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError("name", name, "does not fit the name of a key file", "give letters, digits, '-', '_' and '.'")
    public, secret = zmq.curve_keypair()
    public_file, secret_file = (directory / f"{name}{suffix}" for suffix in (PUBLIC_SUFFIX, SECRET_SUFFIX))
    written: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, keys, mode in (
            (secret_file, {"public-key": public, "secret-key": secret}, 0o600),
            (public_file, {"public-key": public}, 0o644),
        ):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            written.append(path)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write("metadata\ncurve\n")
                file.writelines(f'    {label} = "{key.decode()}"\n' for label, key in keys.items())
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            hint = "choose another name, or move the old keys away first"
            raise ConfigError("name", name, f"has keys in {directory} already", hint) from error
        problem = f"cannot write keys ({error.strerror})"
        raise StartError(str(directory), problem, "give a directory that you can write to") from error
    return public_file, secret_file


def read_key_pair(path: str | Path, *, field: str) -> CurveKeyPair:
    """Read a secret file.

    Raises:
        ConfigError: with the setting ``field``: the file cannot be read, other users can read or replace it, or it
            holds no pair.
    """
    public, secret = _read(path, field=field, is_secret=True)
    if secret is None:
        raise ConfigError(field, str(path), "holds no secret key", f"give the file that ends in {SECRET_SUFFIX}")
    if not _is_key(secret) or zmq.curve_public(secret) != public:
        raise ConfigError(field, str(path), "holds keys that are not a pair", _MAKE_KEYS)
    return CurveKeyPair(public, secret)


def read_public_key(path: str | Path, *, field: str) -> bytes:
    """Read the public key of another party, as Z85 text.

    Raises:
        ConfigError: with the setting ``field``: the file cannot be read, or it holds no key.
    """
    public, secret = _read(path, field=field, is_secret=False)
    if secret is not None:
        hint = f"give the file that ends in {PUBLIC_SUFFIX}, and keep the other one where it was made"
        raise ConfigError(field, str(path), "holds another party's secret key", hint)
    return public


def _read(path: str | Path, *, field: str, is_secret: bool) -> tuple[bytes, bytes | None]:
    try:
        found = os.stat(path)  # noqa: PTH116 - a user's text may contain a NUL, which the except below reports
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_KEY_FILE_BYTES:
            raise ConfigError(field, str(path), "is not a key file", _MAKE_KEYS)
        if is_secret and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(field, str(path), "can be read by other users", "run chmod 600 on it")
        if is_secret:
            _refuse_writable_by_others(path, found, field=field)
            _refuse_writable_by_others(Path(path).resolve().parent, field=field, may_be_sticky=True)
        public, secret = zmq.auth.load_certificate(path)
    except OSError as error:
        raise ConfigError(field, str(path), f"cannot be read ({error.strerror})", _MAKE_KEYS) from error
    except ConfigError:
        raise
    except (ValueError, IndexError) as error:
        raise ConfigError(field, str(path), "holds no public key", _MAKE_KEYS) from error
    if not _is_key(public):
        raise ConfigError(field, str(path), "holds no valid public key", _MAKE_KEYS)
    return public, secret


def _refuse_writable_by_others(
    path: str | Path, found: os.stat_result | None = None, *, field: str, may_be_sticky: bool = False
) -> None:
    """Refuse a path that other users can write to, because they could admit themselves or impersonate the stream.

    Root always can. In a sticky directory no user can replace another user's file, but every user can add one.
    """
    found = found or os.stat(path)  # noqa: PTH116 - as in _read
    if found.st_uid not in (0, os.geteuid()):
        hint = "give it to the user that this process runs as"
        raise ConfigError(field, str(path), f"belongs to another user ({found.st_uid}), who can write to it", hint)
    is_sticky = may_be_sticky and found.st_mode & stat.S_ISVTX
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        raise ConfigError(field, str(path), "can be written by other users", "run chmod go-w on it")


def _is_key(text: bytes) -> bool:
    if not _KEY_TEXT.fullmatch(text):
        return False
    try:
        zmq.curve_public(text)  # the only function of libzmq that decodes a key and reports an invalid one
    except zmq.ZMQError:
        return False
    return True


# Admission to a stream: CURVE encryption and an allow-list of client keys.
#
# libzmq sends every handshake to one handler per context (ZAP, its RFC 27). The handler is pyzmq's
# ``ThreadAuthenticator``. It decides by a set of keys that was read and checked before any socket opened.

_DOMAIN = "scheduler-components"
"""libzmq refuses every client of a socket with a ZAP domain if no handler answers, so the stream fails closed."""


@attrs.frozen(kw_only=True)
class CurveServerKeys:
    """The publisher's own keys, and those of the clients that it admits.

    Attributes:
        keys: of the publisher.
        allowed: public keys of the clients, as Z85 text.
    """

    keys: CurveKeyPair
    allowed: frozenset[bytes]

    @classmethod
    def read(cls, secret_key_file: str, client_keys_dir: str) -> CurveServerKeys:
        """Read and check all key files.

        Raises:
            ConfigError: a file cannot be used, the directory holds no key, or other users can add or change one.
        """
        keys = read_key_pair(secret_key_file, field="secret_key_file")
        return cls(keys=keys, allowed=_read_allowed(client_keys_dir, field="client_keys_dir"))

    @classmethod
    def of(cls, config: KVEventsConfig) -> CurveServerKeys | None:
        """Read the key files of a configuration; None if every client may connect.

        Raises:
            ConfigError: see ``read``.
        """
        if config.secret_key_file is None or config.client_keys_dir is None:
            return None  # the configuration rejects one without the other
        return cls.read(config.secret_key_file, config.client_keys_dir)

    def start_authenticator(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Start the handler of ``context`` before any of its sockets binds.

        Call ``stop()`` on the handler before the context ends.
        """
        # Imported here, because it imports asyncio, and each rank of an engine would pay for that.
        from zmq.auth.thread import ThreadAuthenticator

        gate = ThreadAuthenticator(context)
        gate.configure_curve_callback(_DOMAIN, self)
        try:
            gate.start()
        except RuntimeError:
            # No thread is available. Close the pipe that the thread would have closed; the context would wait for it
            # forever.
            half_open = gate.thread.pipe
            gate.stop()
            half_open.close()
            raise
        return gate

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client may connect. Called by the authenticator."""
        return domain == _DOMAIN and key in self.allowed

    def apply_server_keys(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket``, before it binds, refuse every peer without CURVE and an allowed key."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _read_allowed(directory: str, *, field: str) -> frozenset[bytes]:
    try:
        _refuse_writable_by_others(directory, field=field)
        files = sorted(Path(directory).glob(f"*{PUBLIC_SUFFIX}"))
        for file in files:
            _refuse_writable_by_others(file, field=field)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        hint = "give the directory of the clients' public keys"
        raise ConfigError(field, directory, f"cannot be read ({error})", hint) from error
    if not files:
        hint = f"put the public key ({PUBLIC_SUFFIX} file) of each client there"
        raise ConfigError(field, directory, "holds no key, so no client could connect", hint)
    return frozenset(read_public_key(file, field=field) for file in files)


@attrs.frozen(kw_only=True)
class CurveClientKeys:
    """A subscriber's own keys, and the key of the only publisher that it accepts.

    Attributes:
        keys: of the subscriber; the public one must be among the publisher's clients.
        publisher: the publisher's public key, as Z85 text.
    """

    keys: CurveKeyPair
    publisher: bytes

    @classmethod
    def read(cls, secret_key_file: str, publisher_key_file: str) -> CurveClientKeys:
        """Read and check both files.

        Raises:
            ConfigError: a file cannot be used.
        """
        return cls(
            keys=read_key_pair(secret_key_file, field="secret_key_file"),
            publisher=read_public_key(publisher_key_file, field="publisher_key_file"),
        )


def apply_curve_client_keys(socket: zmq.Socket[bytes], keys: CurveClientKeys) -> None:
    """Make ``socket`` (SUB or DEALER, not yet connected) use CURVE and accept only the publisher of ``keys``."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.publisher)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.keys.secret)
