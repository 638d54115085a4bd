"""``/tokenize``: the tokens of a prompt are those with which the generating routes serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from kit.served import Served

from scheduler_engine.engine.messages import unpack_tokens

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi you"}]},
]


def post(served: Served, *requests: tuple[str, Any]) -> list[httpx.Response]:
    async def scenario() -> list[httpx.Response]:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return [await client.post(path, json=body) for path, body in requests]

    return asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize(
    ("path", "body", "question"),
    [
        ("/v1/completions", {"prompt": "a b\nc"}, {"prompt": "a b\nc"}),
        ("/generate", {"text": "a b"}, {"prompt": "a b", "add_special_tokens": True}),
        ("/v1/chat/completions", {"messages": MESSAGES}, {"messages": MESSAGES, "model": "any"}),
    ],
)
def test_a_prompt_has_the_tokens_with_which_it_is_served(
    path: str, body: dict[str, object], question: dict[str, object], make_served: Callable[..., Served]
) -> None:
    served = make_served()
    _, answer = post(served, (path, {**body, "max_tokens": 1}), ("/tokenize", question))
    [submitted] = served.replicas[0].submitted
    tokens = list(unpack_tokens(submitted.input_ids))
    assert answer.json() == {"count": len(tokens), "max_model_len": None, "tokens": tokens}


def test_an_empty_prompt_has_no_tokens(make_served: Callable[..., Served]) -> None:
    [answer] = post(make_served(), ("/tokenize", {"prompt": ""}))
    assert (answer.status_code, answer.json()["tokens"]) == (200, [])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.content.type"),
        ({"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "a", "return_token_strs": True}, "return_token_strs"),
    ],
)
def test_what_would_have_other_tokens_is_refused(
    body: dict[str, object], field: str, make_served: Callable[..., Served]
) -> None:
    [answer] = post(make_served(), ("/tokenize", body))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
