"""The levels of keys are SGLang's own: both decide alike about every kind of header."""

from __future__ import annotations

from itertools import product

import pytest

from scheduler_engine.frontend.access import AccessPolicy, RouteAccess

sglang_auth = pytest.importorskip("sglang.srt.utils.auth", reason="needs sglang: make engines ENGINES=sglang")

pytestmark = pytest.mark.engine

KEY, ADMIN_KEY = "client-key", "admin-key"
SENT = (
    None,
    f"Bearer {KEY}",
    f"bearer {KEY}",
    f"BEARER {ADMIN_KEY}",
    f"Basic {KEY}",
    KEY,
    f"Bearer  {KEY}",
    "Bearer x",
)
PATHS = {RouteAccess.CLIENT: "/generate", RouteAccess.ADMIN: "/flush_cache", RouteAccess.PUBLIC: "/health"}


def test_both_decide_alike() -> None:
    levels = sglang_auth.AuthLevel
    for api_key, admin_api_key, sent, access, method in product(
        (None, KEY), (None, ADMIN_KEY), SENT, RouteAccess, ("GET", "POST", "OPTIONS")
    ):
        decision = sglang_auth.decide_request_auth(
            method=method,
            path=PATHS[access],
            authorization_header=sent,
            api_key=api_key,
            admin_api_key=admin_api_key,
            auth_level=levels.ADMIN_OPTIONAL if access is RouteAccess.ADMIN else levels.NORMAL,
        )
        policy = AccessPolicy(api_key=api_key, admin_api_key=admin_api_key)
        headers = [(b"host", b"localhost")]
        if sent is not None:
            headers.append((b"authorization", sent.encode()))
        refusal = policy.refusal(method, headers, access)
        assert (refusal is None) == decision.allowed, (api_key, admin_api_key, sent, access, method)
