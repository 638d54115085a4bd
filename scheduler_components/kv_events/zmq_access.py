"""Who may connect to a stream: CURVE encryption, and an allow-list of client keys.

libzmq asks one handler a context (ZAP, its RFC 27) about every handshake. The handler is pyzmq's
``ThreadAuthenticator``; it answers from a set of keys that was read and checked before any socket opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import attrs
import zmq
from zmq.auth.thread import ThreadAuthenticator

from scheduler_components.errors import ConfigError
from scheduler_components.kv_events.zmq_keys import PUBLIC_SUFFIX, KeyPair, read_key_pair, read_public_key

__all__ = ["ClientKeys", "StreamAccess", "apply_client_keys"]

_DOMAIN = "scheduler-components"
"""libzmq refuses everybody on a socket with a ZAP domain when no handler answers: the stream fails closed."""


@attrs.frozen(kw_only=True)
class StreamAccess:
    """The publisher's half: its own keys, and the clients that it lets in.

    Attributes:
        keys: of the publisher.
        allowed: public keys of the clients, as Z85 text.
    """

    keys: KeyPair
    allowed: frozenset[bytes]

    @classmethod
    def read(cls, secret_key_file: str, client_keys_dir: str) -> StreamAccess:
        """Read and check all key files.

        Raises:
            ConfigError: one of them cannot be used, the directory holds no key, or anybody may add one to it.
        """
        keys = read_key_pair(secret_key_file, field="secret_key_file")
        return cls(keys=keys, allowed=_read_allowed(client_keys_dir, field="client_keys_dir"))

    def open_gate(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Start to answer for ``context``, before any of its sockets binds; ``stop()`` it before the context ends."""
        gate = ThreadAuthenticator(context)
        gate.configure_curve_callback(_DOMAIN, self)
        try:
            gate.start()
        except RuntimeError:
            # No thread is left: what it would have closed is closed here, or the context would wait for it for ever.
            half_open = gate.thread.pipe
            gate.stop()
            half_open.close()
            raise
        return gate

    def callback(self, domain: str, key: bytes) -> bool:
        """The authenticator's question: may this client in?"""
        return domain == _DOMAIN and key in self.allowed

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket``, not yet bound, refuse every peer without CURVE and an allowed key."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _read_allowed(directory: str, *, field: str) -> frozenset[bytes]:
    try:
        mode = os.stat(directory).st_mode  # noqa: PTH116 - as in zmq_keys
        files = sorted(Path(directory).glob(f"*{PUBLIC_SUFFIX}"))
    except (OSError, ValueError) as error:
        mend = "give the directory of the clients' public keys"
        raise ConfigError(field, directory, f"cannot be read ({error})", mend) from error
    if mode & stat.S_IWOTH:
        raise ConfigError(field, directory, "may be written to by anybody", "run chmod o-w on it")
    if not files:
        mend = f"put the public key ({PUBLIC_SUFFIX} file) of each client there"
        raise ConfigError(field, directory, "holds no key: nobody could connect", mend)
    return frozenset(read_public_key(file, field=field) for file in files)


@attrs.frozen(kw_only=True)
class ClientKeys:
    """The subscriber's half: its own keys, and the publisher that it insists on.

    Attributes:
        keys: of the subscriber; the public one must be among the publisher's clients.
        publisher: the publisher's public key, as Z85 text.
    """

    keys: KeyPair
    publisher: bytes

    @classmethod
    def read(cls, secret_key_file: str, publisher_key_file: str) -> ClientKeys:
        """Read and check both files.

        Raises:
            ConfigError: one of them cannot be used.
        """
        return cls(
            keys=read_key_pair(secret_key_file, field="secret_key_file"),
            publisher=read_public_key(publisher_key_file, field="publisher_key_file"),
        )


def apply_client_keys(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Make ``socket`` (SUB or DEALER, not yet connected) speak CURVE, to the publisher of ``keys`` alone."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.publisher)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.keys.secret)
