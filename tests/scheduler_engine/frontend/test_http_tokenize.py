"""``/tokenize``: the tokens of a prompt are those with which the generating routes serve it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kit.asgi import ask
from kit.served import Served

from scheduler_engine.engine.messages import unpack_tokens

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi you"}]},
]


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
    ask(served.app, path, json={**body, "max_tokens": 1})
    answer = ask(served.app, "/tokenize", json=question)
    [submitted] = served.replicas[0].submitted
    tokens = list(unpack_tokens(submitted.input_ids))
    assert answer.json() == {"count": len(tokens), "max_model_len": None, "tokens": tokens}


def test_an_empty_prompt_has_no_tokens(make_served: Callable[..., Served]) -> None:
    answer = ask(make_served().app, "/tokenize", json={"prompt": ""})
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
    answer = ask(make_served().app, "/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
