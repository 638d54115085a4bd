"""What openai's client and a plain one ask of an engine with grammars, and what must come."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from kit.imported_later import ImportedLater
from scheduler_engine.engine.engine import Engine

jsonschema_rs = ImportedLater("jsonschema_rs", reason="schemathesis brings it")
openai = ImportedLater("openai", reason="needs openai: pip install scheduler-components[dev]")
httpx2 = ImportedLater("httpx2", reason="openai 3 brings it")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": "Describe a person as JSON with name and age."}],
    "max_tokens": 150,
    "seed": 3,
}


def format_of(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


async def expect_person(client: Any, **fields: Any) -> None:
    answer = await client.chat.completions.create(**ASKED, response_format=format_of(PERSON), **fields)
    for choice in answer.choices:
        assert choice.finish_reason == "stop", choice
        jsonschema_rs.validate(PERSON, json.loads(choice.message.content))


async def expect_structured_output(app: object, engine: Engine) -> None:
    """Greedy and sampled answers in one batch, a stream, the other routes, errors, and the counts of the leader."""
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as plain:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=plain, max_retries=0)
        await _expect_all_kinds(client, plain)
    grammars = engine.stats.read()[0].grammars
    assert grammars is not None
    assert (grammars.compiled, grammars.failed, grammars.waiting) == (2, 2, 0)
    assert grammars.cache_hits + grammars.joined >= 6


async def _expect_all_kinds(client: Any, plain: Any) -> None:
    await asyncio.gather(expect_person(client, temperature=0), expect_person(client, temperature=1.0, n=2))
    stream = await client.chat.completions.create(**ASKED, response_format=format_of(PERSON), stream=True)
    events = [event async for event in stream]
    assert len(events) > 5
    jsonschema_rs.validate(PERSON, json.loads("".join(event.choices[0].delta.content or "" for event in events)))

    expression = "(a|b){4,8} end"
    completed = await client.completions.create(
        model="any", prompt="one", max_tokens=40, extra_body={"regex": expression}
    )
    assert re.fullmatch(expression, completed.choices[0].text)
    asked = {"text": "one", "sampling_params": {"regex": expression, "max_new_tokens": 40}}
    native = (await plain.post("/generate", json=asked)).json()
    assert re.fullmatch(expression, native["text"])

    for fields, reason in (
        ({"response_format": format_of({"type": "strin"})}, "json_schema: Invalid type: strin"),
        ({"extra_body": {"regex": "("}}, "regex: .*unclosed group"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            await client.chat.completions.create(**ASKED, **fields)
        with pytest.raises(openai.BadRequestError, match=reason):
            await client.chat.completions.create(**ASKED, **fields, stream=True)
