"""CURVE key files: made, read and checked.

The files are ZeroMQ certificates, which ``zmq.auth``, CZMQ and others read: ``NAME.key_secret`` holds both keys of a
pair and stays where it was made, ``NAME.key`` holds the public one and is handed out.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import attrs
import zmq
import zmq.auth

from scheduler_components.errors import ConfigError, StartError

__all__ = ["PUBLIC_SUFFIX", "SECRET_SUFFIX", "KeyPair", "read_key_pair", "read_public_key", "write_key_pair"]

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"  # noqa: S105 - a suffix, no password

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_KEY_TEXT = re.compile(rb"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""A key of 32 bytes in Z85, the text that libzmq takes."""

_MAX_KEY_FILE_BYTES = 64 * 1024
_MAKE_KEYS = "give a file that 'scheduler-components keygen' made"


@attrs.frozen
class KeyPair:
    """Both keys of one party, as Z85 text of 40 bytes; the secret one is not shown in logs."""

    public: bytes
    secret: bytes = attrs.field(repr=False)


def write_key_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a new pair and return the public file and the secret one, which its owner alone may read.

    Args:
        directory: made, private, where it is not there.
        name: of the party, for example ``"router-1"``.

    Raises:
        ConfigError: the name is none for a file, or has keys already: they are never overwritten.
        StartError: the system refused to write.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError("name", name, "is no name for a key file", "give letters, digits, '-', '_' and '.'")
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
            mend = "choose another name, or move the old keys away first"
            raise ConfigError("name", name, f"has keys in {directory} already", mend) from error
        problem = f"cannot write keys ({error.strerror})"
        raise StartError(str(directory), problem, "give a directory that you can write to") from error
    return public_file, secret_file


def read_key_pair(path: str | Path, *, field: str) -> KeyPair:
    """Read a secret file.

    Raises:
        ConfigError: naming the setting ``field``: it cannot be read, others may read it, or it holds no pair.
    """
    public, secret = _read(path, field=field, is_secret=True)
    if secret is None:
        raise ConfigError(field, str(path), "holds no secret key", f"give the file that ends in {SECRET_SUFFIX}")
    if not _is_key(secret) or zmq.curve_public(secret) != public:
        raise ConfigError(field, str(path), "holds keys that are not a pair", _MAKE_KEYS)
    return KeyPair(public, secret)


def read_public_key(path: str | Path, *, field: str) -> bytes:
    """Read the public key of another party, as Z85 text.

    Raises:
        ConfigError: naming the setting ``field``: it cannot be read, or it holds no key.
    """
    public, secret = _read(path, field=field, is_secret=False)
    if secret is not None:
        mend = f"give the file that ends in {PUBLIC_SUFFIX}, and keep the other one where it was made"
        raise ConfigError(field, str(path), "holds another party's secret key", mend)
    return public


def _read(path: str | Path, *, field: str, is_secret: bool) -> tuple[bytes, bytes | None]:
    try:
        found = os.stat(path)  # noqa: PTH116 - a text from a person may hold a NUL, which the except below names
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_KEY_FILE_BYTES:
            raise ConfigError(field, str(path), "is not a key file", _MAKE_KEYS)
        if is_secret and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(field, str(path), "may be read by others than its owner", "run chmod 600 on it")
        public, secret = zmq.auth.load_certificate(path)
    except OSError as error:
        raise ConfigError(field, str(path), f"cannot be read ({error.strerror})", _MAKE_KEYS) from error
    except ConfigError:
        raise
    except (ValueError, IndexError) as error:
        raise ConfigError(field, str(path), "holds no public key", _MAKE_KEYS) from error
    if not _is_key(public):
        raise ConfigError(field, str(path), "holds a public key that is none", _MAKE_KEYS)
    return public, secret


def _is_key(text: bytes) -> bool:
    if not _KEY_TEXT.fullmatch(text):
        return False
    try:
        zmq.curve_public(text)  # the one function of libzmq that decodes a key and says when it cannot
    except zmq.ZMQError:
        return False
    return True
