"""No page of another origin sends a control request, and each client of today still does."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_engine.frontend.access import ANY_HOST, AccessPolicy, Headers, RouteAccess, is_loopback

CLIENT, ADMIN, PUBLIC = RouteAccess.CLIENT, RouteAccess.ADMIN, RouteAccess.PUBLIC
BROWSER = b"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0 Safari/537.36"
POLICY = AccessPolicy(allowed_hosts=["engine.example"])


def head(**headers: str) -> Headers:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]


class Place(NamedTuple):
    """Where a browser sends a request: the text of the host, and whether browsers trust it enough for Sec-Fetch."""

    host: str
    is_trustworthy: bool


PLACES = (
    Place("127.0.0.1", True),
    Place("localhost", True),
    Place("[::1]", True),
    Place("0.0.0.0", False),
    Place("10.1.2.3", False),
    Place("engine.example", False),
)
PORT = 30_000


def page_request(place: Place, page: str, how: str) -> tuple[str, Headers]:
    """Method and headers of a request that a page sends to the engine, as the Fetch standard says.

    Args:
        place: the engine.
        page: origin of the page; ``null`` for a sandboxed one.
        how: image, form, fetch (no-cors, POST), navigation or rebinding.
    """
    if how == "rebinding":  # the page's own name points to the engine
        name = page.partition("://")[2]
        return "GET", [(b"host", name.encode()), (b"user-agent", BROWSER)]
    headers = [(b"host", f"{place.host}:{PORT}".encode()), (b"user-agent", BROWSER)]
    own = f"http://{place.host}:{PORT}"
    site = "same-origin" if page == own else "same-site" if page.startswith(f"http://{place.host}") else "cross-site"
    if place.is_trustworthy:
        headers.append((b"sec-fetch-site", site.encode()))
    if how in ("image", "navigation"):
        return "GET", headers
    return "POST", [*headers, (b"origin", page.encode())]


pages = st.sampled_from(
    ("http://evil.example", "https://evil.example:8443", "http://127.0.0.1:9", "http://localhost:9", "null")
)


@given(st.sampled_from(PLACES), pages, st.sampled_from(("image", "form", "fetch", "navigation", "rebinding")))
def test_no_page_of_another_origin_sends_a_control_request(place: Place, page: str, how: str) -> None:
    if how == "rebinding" and page != "http://evil.example":
        page = "http://rebound.example:30000"
    method, headers = page_request(place, page, how)
    assert POLICY.refusal(method, headers, ADMIN) is not None
    if place.is_trustworthy or method == "POST" or how == "rebinding":
        assert POLICY.refusal(method, headers, CLIENT) is not None
        assert POLICY.refusal(method, headers, PUBLIC) is not None


@given(
    st.sampled_from([place.host for place in PLACES]),
    st.sampled_from(("", f":{PORT}")),
    st.sampled_from(("GET", "HEAD", "POST", "PUT")),
    st.sampled_from(("curl/8.5.0", "python-requests/2.32", "OpenAI/Python 3.54.0", "")),
    st.sampled_from(RouteAccess),
)
def test_every_client_that_is_no_browser_passes(
    host: str, port: str, method: str, agent: str, access: RouteAccess
) -> None:
    assert POLICY.refusal(method, head(host=host + port, user_agent=agent), access) is None
    assert POLICY.refusal(method, head(user_agent=agent), access) is None, "HTTP/1.0 has no Host"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_server_s_own_pages_pass(place: Place, scheme: str) -> None:
    """TLS may end in front of the server, which then sees another scheme than the browser."""
    own = f"{scheme}://{place.host.upper()}:{PORT}"
    headers = head(host=f"{place.host}:{PORT}", origin=own, sec_fetch_site="same-origin", user_agent=BROWSER.decode())
    assert POLICY.refusal("POST", headers, ADMIN) is None
    assert POLICY.refusal("GET", headers, CLIENT) is None


def test_a_user_s_own_address_bar_passes() -> None:
    headers = head(host="127.0.0.1:30000", sec_fetch_site="none", user_agent=BROWSER.decode())
    assert POLICY.refusal("GET", headers, CLIENT) is None
    assert POLICY.refusal("GET", headers, ADMIN) is None


@pytest.mark.parametrize(
    "headers",
    [
        head(host="evil.example:30000"),
        head(host="evil.localhost.example"),
        head(host="127.0.0.1.nip.example"),
        head(host="user@127.0.0.1"),
        head(host=""),
        head(host="[evil.example]:1"),
        [*head(host="localhost"), *head(host="evil.example")],
    ],
)
def test_a_host_that_is_not_this_server_is_refused(headers: Headers) -> None:
    refusal = POLICY.refusal("GET", headers, PUBLIC)
    assert refusal is not None and refusal.status_code == 403 and "--allowed-host" in refusal.message


@pytest.mark.parametrize(
    "origin",
    ["http://127.0.0.1:30001", "http://localhost:30000", "null", "", "file://", "http://127.0.0.1:x", "http://"],
)
def test_an_origin_other_than_the_host_is_refused(origin: str) -> None:
    headers = head(host="127.0.0.1:30000", origin=origin)
    assert POLICY.refusal("POST", headers, CLIENT) is not None
    assert POLICY.refusal("POST", head(origin=origin), CLIENT) is not None


@pytest.mark.parametrize(
    "origin",
    ["http://engine.example", "http://engine.example:80", "https://engine.example:443", "https://engine.example"],
)
def test_default_ports_may_be_left_out(origin: str) -> None:
    assert POLICY.refusal("POST", head(host="engine.example", origin=origin), CLIENT) is None


def test_any_host_may_be_allowed_and_origins_still_count() -> None:
    policy = AccessPolicy(allowed_hosts=[ANY_HOST])
    assert policy.refusal("GET", head(host="whatever.example"), ADMIN) is None
    assert policy.refusal("POST", head(host="whatever.example", origin="http://evil.example"), ADMIN) is not None
    assert policy.refusal("POST", head(host="a:b", origin="http://c:d"), ADMIN) is not None, "neither has a port"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("LocalHost.", True), ("a.localhost", True),
     ("0.0.0.0", False), ("10.0.0.1", False), ("localhost.example", False), ("", False)],
)  # fmt: skip
def test_loopback_names(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


# --- keys: the table of SGLang 0.5.23's decide_request_auth ---

KEYS = (None, "client-key", "admin-key", "wrong")


@given(
    st.sampled_from((None, "client-key")),
    st.sampled_from((None, "admin-key")),
    st.sampled_from(KEYS),
    st.sampled_from(RouteAccess),
    st.sampled_from(("GET", "POST", "OPTIONS")),
)
def test_keys_open_what_they_open_in_sglang(
    api_key: str | None, admin_api_key: str | None, sent: str | None, access: RouteAccess, method: str
) -> None:
    policy = AccessPolicy(api_key=api_key, admin_api_key=admin_api_key)
    headers = head(host="localhost") if sent is None else head(host="localhost", authorization=f"Bearer {sent}")
    if access is PUBLIC or method == "OPTIONS":
        needed = None
    elif access is ADMIN and admin_api_key is not None:
        needed = admin_api_key
    else:
        needed = api_key
    refusal = policy.refusal(method, headers, access)
    assert (refusal is None) == (needed is None or sent == needed)
    assert refusal is None or refusal.status_code == 401


@pytest.mark.parametrize(
    "value", ["client-key", "Basic client-key", "Bearer", "Bearer  client-key", "Bearer client-key ", "Bearer client"]
)
def test_a_malformed_authorization_is_refused(value: str) -> None:
    policy = AccessPolicy(api_key="client-key")
    assert policy.refusal("GET", head(authorization=value), CLIENT) is not None
    assert policy.refusal("GET", head(authorization="bEARER client-key"), CLIENT) is None
    twice = [*head(authorization="Bearer client-key"), *head(authorization="Bearer client-key")]
    assert policy.refusal("GET", twice, CLIENT) is not None
    assert policy.refusal("GET", [(b"authorization", b"Bearer \xff\xfe")], CLIENT) is not None


@pytest.mark.parametrize("key", ["", "two words", "line\n", "naïve"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key") as raised:
        AccessPolicy(api_key=key)
    assert not key or key not in str(raised.value)


def test_a_policy_does_not_show_its_keys() -> None:
    assert "secret" not in repr(AccessPolicy(api_key="secret", admin_api_key="secret"))


def test_a_server_that_other_machines_reach_without_a_key_is_warned_about() -> None:
    warning = AccessPolicy().exposure_warning("0.0.0.0")
    assert warning is not None and "without --api-key" in warning and "flush" in warning
    warning = AccessPolicy(admin_api_key="key").exposure_warning("10.0.0.1")
    assert warning is not None and "flush" not in warning
    assert AccessPolicy().exposure_warning("127.0.0.1") is None
    assert AccessPolicy(api_key="key").exposure_warning("::") is None
