"""Decide from the head of an HTTP request whether it may reach a handler: where it comes from, and which key it has.

A browser sends requests to any address on behalf of any page. A page of another origin must therefore not pause or
flush an engine on loopback, although the connection comes from this machine. Three headers, which a page cannot set,
reveal such a request:

- ``Host``: a page can let its own DNS name point to this machine (DNS rebinding). Its requests then look like those of
  the server's own pages, but they carry the name. An IP address in ``Host`` cannot come from DNS.
- ``Origin`` names the page. Browsers send it with each POST, and with each request that lets a page read the answer.
- ``Sec-Fetch-Site`` says the same in one word, also for a GET without ``Origin``, such as an image. Browsers send it to
  loopback addresses and over TLS only. A control request by GET from a browser without this header is refused.

Other clients send none of the last two headers. The levels of keys are SGLang's (0.5.23, ``srt/utils/auth.py``).
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

import attrs
import msgspec

from scheduler_components import ConfigError

ANY_HOST = "*"
"""In ``AccessPolicy.allowed_hosts``: accept any Host header."""

_MAX_SHOWN = 80
_OWN_SITES = {b"same-origin", b"none"}  # none: a user typed the address or opened a bookmark
_SAFE_METHODS = ("GET", "HEAD")

Headers = Sequence[tuple[bytes, bytes]]
"""Headers of an ASGI request: names in lower case."""


class RouteAccess(enum.Enum):
    """Who may call a route.

    PUBLIC: probes and metrics, without a key. CLIENT: with the API key, if there is one. ADMIN: control requests,
    with the admin key if there is one, otherwise as CLIENT.
    """

    PUBLIC = "public"
    CLIENT = "client"
    ADMIN = "admin"


class AccessRefusal(msgspec.Struct, frozen=True):
    """Why a request is refused: the status code and one sentence for the client."""

    status_code: int
    message: str


def is_loopback(host: str) -> bool:
    """Return whether a host name or IP address means this machine only."""
    name = host.lower().rstrip(".")
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _host_names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.strip().lower().rstrip(".") for name in names)


def _check_key(_: AccessPolicy, attribute: attrs.Attribute[str | None], value: str | None) -> None:
    if value is not None and not (value and value.isascii() and value.isprintable() and " " not in value):
        hint = "give a key of printable ASCII characters without spaces"
        raise ConfigError(attribute.name, "(not shown)", "is not an API key", hint)


@attrs.frozen(kw_only=True)
class AccessPolicy:
    """Who may call the routes of a server.

    Attributes:
        allowed_hosts: host names that clients may use. Loopback names and all IP addresses need no entry. ``ANY_HOST``
            accepts any.
        api_key: key of all routes but public ones; None requires none.
        admin_api_key: key of control requests. Without it they need the API key.

    Raises:
        ConfigError: a key is empty, or has a character that cannot be part of a header.
    """

    allowed_hosts: frozenset[str] = attrs.field(default=frozenset(), converter=_host_names)
    api_key: str | None = attrs.field(default=None, repr=False, validator=_check_key)
    admin_api_key: str | None = attrs.field(default=None, repr=False, validator=_check_key)

    def refusal(self, method: str, headers: Headers, access: RouteAccess) -> AccessRefusal | None:
        """Return why the request is refused; None lets it pass.

        Args:
            method: HTTP method.
            headers: all headers of the request.
            access: who may call its route.
        """
        origin = self._foreign_host(headers) or _foreign_origin(headers) or _unnamed_browser(method, headers, access)
        return origin or self._missing_key(method, headers, access)

    def exposure_warning(self, bound_host: str) -> str | None:
        """Return a warning if a server at this address is open to other machines; None if it is not."""
        if self.api_key is not None or is_loopback(bound_host):
            return None
        may = "send requests" if self.admin_api_key is not None else "send requests, and pause or flush the engine"
        return f"the HTTP server listens at {bound_host} without --api-key: every host that reaches it can {may}"

    def _foreign_host(self, headers: Headers) -> AccessRefusal | None:
        if ANY_HOST in self.allowed_hosts:
            return None
        for value in _values(headers, b"host"):
            name = _host_name(value)
            if not (is_loopback(name) or _is_address(name) or name in self.allowed_hosts):
                shown = name[:_MAX_SHOWN]
                hint = "use its IP address, or start the server with --allowed-host and this name"
                return AccessRefusal(403, f"host: {shown!r} is not a name of this server; {hint}")
        return None

    def _missing_key(self, method: str, headers: Headers, access: RouteAccess) -> AccessRefusal | None:
        if access is RouteAccess.PUBLIC or method == "OPTIONS":
            return None
        expected, name = self.api_key, "API key"
        if access is RouteAccess.ADMIN and self.admin_api_key is not None:
            expected, name = self.admin_api_key, "admin API key"
        if expected is None or _has_key(headers, expected):
            return None
        return AccessRefusal(401, f"authorization: is not the {name} of this server; send 'Authorization: Bearer KEY'")


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for each, value in headers if each == name]


def _host_name(value: bytes) -> str:
    """Return the name in a Host header, in lower case, without port, brackets and final dot."""
    text = value.decode("latin-1").strip().lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    return name.rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _foreign_origin(headers: Headers) -> AccessRefusal | None:
    """Refuse a request that a page of another origin sent."""
    hosts = _values(headers, b"host")
    is_foreign = any(value.strip().lower() not in _OWN_SITES for value in _values(headers, b"sec-fetch-site"))
    is_foreign |= any(not _is_own_origin(value, hosts) for value in _values(headers, b"origin"))
    if not is_foreign:
        return None
    return AccessRefusal(403, "origin: a page of another origin sent the request; open this server's address directly")


def _is_own_origin(origin: bytes, hosts: Sequence[bytes]) -> bool:
    """Return whether an Origin header names the requested host and port. TLS may end in front of this server."""
    scheme, separator, authority = origin.decode("latin-1").strip().lower().partition("://")
    if not separator or scheme not in ("http", "https"):
        return False  # ``null``: a sandboxed page, a file, or a redirect
    own = {_authority(host.decode("latin-1").strip().lower(), scheme) for host in hosts}
    return None not in own and own == {_authority(authority, scheme)}


def _authority(text: str, scheme: str) -> tuple[str | None, int | None] | None:
    """Return host and port; None if the text is no authority."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        return None
    default = 443 if scheme == "https" else 80
    return parts.hostname, default if port is None else port


def _unnamed_browser(method: str, headers: Headers, access: RouteAccess) -> AccessRefusal | None:
    """Refuse a control request by GET from a browser that does not say which page it comes from."""
    if access is not RouteAccess.ADMIN or method not in _SAFE_METHODS or _values(headers, b"sec-fetch-site"):
        return None
    if not any(value.lstrip().startswith(b"Mozilla/") for value in _values(headers, b"user-agent")):
        return None
    return AccessRefusal(403, "sec-fetch-site: is missing, so any page may have sent this; use POST, or another client")


def _has_key(headers: Headers, expected: str) -> bool:
    """Compare the bearer token in a time that does not depend on where it differs."""
    values = _values(headers, b"authorization")
    if len(values) != 1:
        return False
    scheme, _, token = values[0].partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token, expected.encode())
