"""Bodies and response fields of OpenAI's routes, without a server: defaults, refusals, usage and logprobs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scheduler_components import ConfigError
from scheduler_components.values import (
    CachedTokens,
    GrammarKey,
    OutputDelta,
    RequestHints,
    RequestTimeouts,
    TokenOutput,
)
from scheduler_engine.frontend.openai_format import (
    ChatBody,
    ChatLogprobs,
    CompletionBody,
    CompletionLogprobs,
    Usage,
    by_tier,
    stop_strings,
)
from scheduler_engine.frontend.text_frontend import TextDelta
from scheduler_engine.text.text_tokenizer import ChatMessage
from scheduler_engine.text.word_tokenizer import WordTokenizer

CODEC = WordTokenizer()
UNCACHED = CachedTokens()
TURN = [{"role": "user", "content": "why"}]


def completion(**fields: Any) -> CompletionBody:
    return msgspec.convert({"prompt": "one"} | fields, CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return msgspec.convert({"messages": TURN} | fields, ChatBody)


def test_a_completion_has_openais_defaults() -> None:
    params = completion().params()
    assert (params.max_new_tokens, params.default_new_tokens) == (None, 16)
    assert (params.sampling.temperature, params.sampling.top_p) == (1.0, 1.0)
    assert (params.sampling.top_k, params.sampling.min_p, params.sampling.logprobs) == (0, 0.0, None)
    assert (params.stops, params.stop_token_ids, params.ignore_eos, params.include_stop_str) == ((), (), False, False)
    assert (params.stream_interval, params.conversation, params.replica) == (0, None, None)
    assert completion().num_choices == 1


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"max_tokens": 3}, 3), ({"max_completion_tokens": 4}, 4), ({"max_tokens": 3, "max_completion_tokens": 4}, 4)],
)
def test_the_newer_name_of_the_limit_takes_precedence(fields: dict[str, int], limit: int) -> None:
    assert chat(**fields).params().max_new_tokens == limit


@pytest.mark.parametrize(
    ("fields", "replica"),
    [({"data_parallel_rank": 1}, 1), ({"routed_dp_rank": 0, "data_parallel_rank": 1}, 0), ({"routed_dp_rank": 2}, 2)],
)
def test_the_newer_name_of_the_replica_takes_precedence(fields: dict[str, int], replica: int) -> None:
    assert completion(**fields).params().replica == replica


def test_priority_and_user_are_hints_for_the_scheduling_policy() -> None:
    hints = completion(priority=3, user="ann").params().hints
    assert (hints.priority, hints.tenant) == (3, "ann")
    assert completion(timeout=3, queue_timeout=0.5).params().timeouts == RequestTimeouts(0.5, 3.0)
    assert completion().params().timeouts == RequestTimeouts()
    assert completion().params().hints == RequestHints()
    assert len(completion(user="u" * 1000).params().hints.tenant) == 128
    for wrong in (2**31, 1.5, "high"):
        with pytest.raises(msgspec.ValidationError, match="priority"):
            completion(priority=wrong)


@pytest.mark.parametrize(("given", "stops"), [(None, ()), ("end", ("end",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_strings_are_a_tuple(given: Any, stops: tuple[str, ...]) -> None:
    assert stop_strings(given) == stops


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", [""]),
        ("one two", ["one two"]),
        ([1, 2], [[1, 2]]),
        (["one", "two"], ["one", "two"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["one", [2]], ["one", [2]]),
    ],
)
def test_a_prompt_is_a_text_or_tokens_or_several(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", [["one", 2], [[1], 2]])
def test_a_token_next_to_a_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError, match="prompt=2: is a token in a list of prompts"):
        completion(prompt=prompt).prompts()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [2**32]},
        {"n": 0},
        {"top_k": -2},
        {"stop": ""},
        {"stop": "x" * 1025},
        {"stop_token_ids": [0] * 65},
        {"rid": ""},
        {"rid": "x" * 129},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_value_out_of_bounds_is_no_body(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        completion(**fields)


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_logprobs_of_a_chat_are_counted_only_where_asked_for(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).params().sampling.logprobs == logprobs


def test_the_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant"}, {"role": "user", "content": "c"}]
    assert chat(messages=messages).chat_messages() == [
        ChatMessage("user", "a b"), ChatMessage("assistant", ""), ChatMessage("user", "c"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "in_last", "in_each"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": True}, True, False),
        ({"continuous_usage_stats": True}, False, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
def test_usage_is_reported_where_asked_for(options: dict[str, bool] | None, in_last: bool, in_each: bool) -> None:
    found = completion(stream_options=options, return_cached_tokens_details=True).usage_options
    assert (found.in_last_event, found.in_each_event, found.by_tier) == (in_last, in_each, True)


def update(
    num_output: int, *, tokens: tuple[int, ...] = (), cached: CachedTokens = UNCACHED, **fields: Any
) -> TextDelta:
    output = TokenOutput(tokens, num_prompt_tokens=10, cached=cached, **fields)
    return TextDelta("", OutputDelta("r", num_output - len(tokens), num_output, None, output), None, None)


def test_a_prompt_of_several_outputs_counts_once_with_the_cached_tokens_of_its_first() -> None:
    usage = Usage()
    usage.count(0, 0, update(1, cached=CachedTokens(4, 2, 1)))
    usage.count(0, 1, update(2, cached=CachedTokens(8, 0, 0)))  # the first output has cached the prompt by now
    usage.count(0, 0, update(5))
    usage.count(1, 2, update(3))
    assert usage.to_json() == {
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 10,
            "total_tokens": 30,
            "prompt_tokens_details": {"cached_tokens": 7},
        }
    }


def test_cached_tokens_by_tier_are_in_sglangs_field() -> None:
    usage = Usage(by_tier=True)
    usage.count(0, 0, update(1, cached=CachedTokens(4, 2, 1)))
    usage.count(1, 1, update(1, cached=CachedTokens(0, 3, 0)))
    assert usage.to_json()["sglext"] == {"cached_tokens_details": {"device": 4, "host": 5, "storage": 1}}
    assert by_tier(CachedTokens(1, 2, 3)) == {"device": 1, "host": 2, "storage": 3}


def test_the_offsets_of_a_completion_go_on_between_its_updates() -> None:
    logprobs = CompletionLogprobs(CODEC, offset=5)
    first = logprobs.format(update(2, tokens=(3, 4), logprobs=(-0.5, -1.5)))
    second = logprobs.format(update(3, tokens=(5,), logprobs=(-0.1,), top_logprobs=(((5, -0.1), (6, -2.0)),)))
    texts = [CODEC.token_text(token) for token in (3, 4, 5)]
    assert first["tokens"] + second["tokens"] == texts
    offsets = [5, 5 + len(texts[0]), 5 + len(texts[0] + texts[1])]
    assert first["text_offset"] + second["text_offset"] == offsets
    assert first["top_logprobs"] == [None, None]
    assert second["top_logprobs"] == [{texts[2]: -0.1, CODEC.token_text(6): -2.0}]


def test_an_update_without_logprobs_has_none() -> None:
    assert ChatLogprobs(CODEC).format(update(0)) == {"content": []}
    assert CompletionLogprobs(CODEC).format(update(0))["tokens"] == []


def decoded(**fields: Any) -> ChatBody:
    return msgspec.json.decode(msgspec.json.encode({"messages": TURN} | fields), type=ChatBody)


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}
SCHEMA_TEXT = msgspec.json.encode(SCHEMA).decode()


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarKey("json_schema", '{"type": "object"}')),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            GrammarKey("json_schema", SCHEMA_TEXT),
        ),
        ({"json_schema": SCHEMA_TEXT}, GrammarKey("json_schema", SCHEMA_TEXT)),
        ({"regex": "[a-c]+"}, GrammarKey("regex", "[a-c]+")),
        ({"regex": "a", "response_format": {"type": "text"}}, GrammarKey("regex", "a")),
    ],
)
def test_a_response_format_is_a_grammar(fields: dict[str, Any], key: GrammarKey | None) -> None:
    """A schema keeps the order of its properties, in which a model writes them."""
    assert decoded(**fields).params().sampling.grammar_key == key


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "json_schema": "{}"}, "json_schema"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"json_schema": ""}, "json_schema"),
        ({"regex": "a" * 65_537}, "regex"),
    ],
)
def test_a_response_format_that_says_nothing_or_two_things_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        decoded(**fields).params()
    assert raised.value.field == field
    assert len(str(raised.value)) < 400
