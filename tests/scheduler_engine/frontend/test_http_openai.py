"""The routes of OpenAI's API, used by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kit.imported_later import ImportedLater

from scheduler_components.values import TraceParent
from scheduler_engine.text.text_tokenizer import ChatMessage
from scheduler_engine.text.word_tokenizer import WordTokenizer

openai = ImportedLater("openai", reason="needs openai: pip install scheduler-components[dev]")
httpx2 = ImportedLater("httpx2", reason="openai 3 brings it")

CODEC = WordTokenizer()


@asynccontextmanager
async def openai_client(served: Any) -> AsyncIterator[Any]:
    """A client that retries nothing. All its requests have ended when it is closed."""
    transport = httpx2.ASGITransport(app=served.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://engine") as http:
        yield openai.AsyncOpenAI(base_url="http://engine/v1", api_key="none", http_client=http, max_retries=0)
    assert served.frontend.num_open_requests == 0 or all(each.aborted for each in served.replicas if each.submitted)


async def test_a_completion_is_the_text_of_the_tokens_with_its_usage(make_served: Callable[..., Any]) -> None:
    served = make_served()
    async with openai_client(served) as client:
        answer = await client.completions.create(
            model="any", prompt="one two three", max_tokens=5, extra_body={"rid": "mine"}
        )
        (choice,) = answer.choices
        assert choice.text == CODEC.decode(served.expected_tokens("mine", 3, 5))
        assert choice.finish_reason == "length"
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)
        assert usage.prompt_tokens_details.cached_tokens == 0
        assert (answer.model, answer.id) == ("simulated", "mine")


@pytest.mark.parametrize(("is_chat", "prefix"), [(False, "cmpl-"), (True, "chatcmpl-")])
async def test_the_id_of_a_response_is_the_id_of_its_request(
    make_served: Callable[..., Any], is_chat: bool, prefix: str
) -> None:
    """An abort, a log line or the next turn of a session names the request by it."""
    served = make_served()
    async with openai_client(served) as client:
        answers = [
            await (
                client.chat.completions.create(model="any", messages=[{"role": "user", "content": "one"}], max_tokens=2)
                if is_chat
                else client.completions.create(model="any", prompt="one", max_tokens=2)
            )
            for _ in range(2)
        ]
        ids = [answer.id for answer in answers]
        assert [command.rid for command in served.replicas[0].submitted] == ids
        assert len(set(ids)) == 2
        assert all(each.startswith(prefix) for each in ids)


async def test_a_stream_adds_up_to_the_response_and_ends_with_usage(make_served: Callable[..., Any]) -> None:
    served = make_served()
    async with openai_client(served) as client:
        stream = await client.completions.create(
            model="any",
            prompt="one two three",
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"rid": "mine"},
        )
        events = [event async for event in stream]
        assert "".join(event.choices[0].text for event in events[:-1]) == CODEC.decode(
            served.expected_tokens("mine", 3, 5)
        )
        assert [event.choices[0].finish_reason for event in events[:-1]] == [None, None, None, None, "length"]
        assert events[-1].choices == [] and events[-1].usage.completion_tokens == 5
        assert all(event.usage is None for event in events[:-1])
        assert len({event.id for event in events}) == 1


async def test_usage_may_be_reported_in_every_event(make_served: Callable[..., Any]) -> None:
    async with openai_client(make_served()) as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = await client.completions.create(
            model="any", prompt="one", max_tokens=3, stream=True, stream_options=options
        )
        assert [event.usage.completion_tokens async for event in stream] == [1, 2, 3, 3]


async def test_the_next_turn_of_a_chat_finds_its_prefix_with_the_answer_in_it(make_served: Callable[..., Any]) -> None:
    served = make_served()
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "what is the capital"}]
    async with openai_client(served) as client:
        first = await client.chat.completions.create(model="any", messages=messages, max_completion_tokens=17)
        (choice,) = first.choices
        assert choice.message.role == "assistant" and choice.finish_reason == "length"
        assert len(choice.message.content.split()) == 17
        further = [*messages, choice.message.model_dump(include={"role", "content"})]
        further.append({"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "why"}]})
        second = await client.chat.completions.create(model="any", messages=further, max_tokens=1)
        # All full pages of the first turn; its last token has no KV.
        num_known = first.usage.total_tokens - 1
        assert second.usage.prompt_tokens_details.cached_tokens == num_known // 4 * 4
        assert served.replicas[0].submitted[1].input_ids.startswith(served.replicas[0].submitted[0].input_ids)


async def test_a_streamed_chat_has_its_role_in_one_event(make_served: Callable[..., Any]) -> None:
    async with openai_client(make_served()) as client:
        stream = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hello"}], max_tokens=3, stream=True
        )
        deltas = [event.choices[0].delta async for event in stream]
        assert [delta.role for delta in deltas] == ["assistant", None, None]
        assert len("".join(delta.content for delta in deltas).split()) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_and_the_request(make_served: Callable[..., Any], stream: bool) -> None:
    served = make_served()
    words = CODEC.decode(served.expected_tokens("mine", 1, 4000)).split()
    stop = f"{words[7]} {words[8][:2]}"  # ends within a token
    async with openai_client(served) as client:
        asked = {"model": "any", "prompt": "one", "max_tokens": 4000, "stop": [stop, "never"]}
        answer = await client.completions.create(**asked, stream=stream, extra_body={"rid": "mine"})
        choices = [event.choices[0] async for event in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == "".join(f" {word}" for word in words[:7]) + " "
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].matched_stop == stop
    assert served.replicas[0].aborted == ["mine"]
    assert served.scheduler.num_steps < 100


async def test_a_stop_string_can_be_kept(make_served: Callable[..., Any]) -> None:
    served = make_served()
    words = CODEC.decode(served.expected_tokens("mine", 1, 9)).split()
    async with openai_client(served) as client:
        extra = {"rid": "mine", "include_stop_str_in_output": True}
        answer = await client.completions.create(
            model="any", prompt="one", max_tokens=9, stop=words[3], extra_body=extra
        )
        assert answer.choices[0].text.split() == words[:4]


async def test_a_stop_token_is_not_part_of_the_text(make_served: Callable[..., Any]) -> None:
    served = make_served()
    tokens = served.expected_tokens("mine", 1, 9)
    async with openai_client(served) as client:
        extra = {"rid": "mine", "stop_token_ids": [tokens[4]]}
        answer = await client.completions.create(model="any", prompt="one", max_tokens=9, extra_body=extra)
        (choice,) = answer.choices
        assert choice.text == CODEC.decode(tokens[:4])
        assert (choice.finish_reason, choice.matched_stop) == ("stop", tokens[4])
        assert answer.usage.completion_tokens == 5


async def test_several_prompts_with_several_outputs_are_in_order(make_served: Callable[..., Any]) -> None:
    """All outputs of a prompt are on one rank; its prompt counts once."""
    served = make_served(num_replicas=2)
    async with openai_client(served) as client:
        answer = await client.completions.create(
            model="any", prompt=["one two", "three four five"], n=3, max_tokens=4, seed=7, extra_body={"rid": "r"}
        )
        assert [choice.index for choice in answer.choices] == list(range(6))
        lengths = [2, 2, 2, 3, 3, 3]
        rids = ["r", "r-1", "r-2", "r-3", "r-4", "r-5"]
        for choice, rid, length in zip(answer.choices, rids, lengths, strict=True):
            assert choice.text == CODEC.decode(served.expected_tokens(rid, length, 4))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)
    by_replica = [[command.rid for command in replica.submitted] for replica in served.replicas]
    assert sorted(by_replica) == [["r", "r-1", "r-2"], ["r-3", "r-4", "r-5"]]
    seeds = [command.sampling.seed for replica in served.replicas for command in replica.submitted]
    assert seeds == [7, 8, 9, 7, 8, 9]


async def test_sampling_parameters_reach_the_scheduler(make_served: Callable[..., Any]) -> None:
    served = make_served()
    async with openai_client(served) as client:
        extra = {"top_k": 5, "min_p": 0.25, "ignore_eos": True}
        asked = {"model": "any", "prompt": "one", "max_tokens": 1}
        await client.completions.create(**asked, temperature=0.5, top_p=0.75, seed=3, logprobs=2, extra_body=extra)
        await client.completions.create(**asked)
        await client.completions.create(**asked, temperature=0, extra_body={"top_k": -1})
    first, second, third = (command.sampling for command in served.replicas[0].submitted)
    assert (first.temperature, first.top_p, first.top_k, first.min_p, first.seed) == (0.5, 0.75, 5, 0.25, 3)
    assert first.logprobs == 2 and served.replicas[0].submitted[0].limits.ignore_eos
    assert (second.temperature, second.logprobs) == (1.0, None)
    assert third.is_greedy and third.top_k == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_completion_match_its_tokens(make_served: Callable[..., Any], stream: bool) -> None:
    served = make_served()
    async with openai_client(served) as client:
        answer = await client.completions.create(
            model="any", prompt="one", max_tokens=3, logprobs=1, stream=stream, extra_body={"rid": "mine"}
        )
        reported = [event.choices[0].logprobs async for event in answer] if stream else [answer.choices[0].logprobs]
        words = [CODEC.decode([token]) for token in served.expected_tokens("mine", 1, 3)]
        assert [token for each in reported for token in each.tokens] == words
        assert [value for each in reported for value in each.token_logprobs] == [0.0, 0.0, 0.0]
        assert [top for each in reported for top in each.top_logprobs] == [{word: 0.0} for word in words]
        offsets = [0, len(words[0]), len(words[0]) + len(words[1])]
        assert [offset for each in reported for offset in each.text_offset] == offsets


async def test_logprobs_of_a_chat_match_its_tokens(make_served: Callable[..., Any]) -> None:
    served = make_served()
    messages = [{"role": "user", "content": "hello"}]
    num_prompt_tokens = len(CODEC.encode_chat([ChatMessage("user", "hello")]))
    async with openai_client(served) as client:
        answer = await client.chat.completions.create(
            model="any", messages=messages, max_tokens=2, logprobs=True, top_logprobs=1, extra_body={"rid": "mine"}
        )
        words = [CODEC.decode([token]) for token in served.expected_tokens("mine", num_prompt_tokens, 2)]
        content = answer.choices[0].logprobs.content
        assert [(each.token, each.logprob, bytes(each.bytes).decode()) for each in content] == [
            (word, 0.0, word) for word in words
        ]
        assert [[top.token for top in each.top_logprobs] for each in content] == [[word] for word in words]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_puts_the_prompt_before_each_output(make_served: Callable[..., Any], stream: bool) -> None:
    async with openai_client(make_served()) as client:
        answer = await client.completions.create(
            model="any", prompt="one  two", n=2, max_tokens=2, echo=True, stream=stream
        )
        texts = ["", ""]
        if stream:
            async for event in answer:
                texts[event.choices[0].index] += event.choices[0].text
        else:
            texts = [choice.text for choice in answer.choices]
        assert all(text.startswith("one  two ") and len(text.split()) == 4 for text in texts)


@pytest.mark.parametrize("in_header", [False, True])
async def test_a_request_is_served_on_the_rank_that_its_client_chose(
    make_served: Callable[..., Any], in_header: bool
) -> None:
    served = make_served(num_replicas=3)
    async with openai_client(served) as client:
        choice: dict[str, Any] = {"extra_body": {"data_parallel_rank": 2}}
        if in_header:
            choice = {"extra_body": {"routed_dp_rank": 0}, "extra_headers": {"X-Data-Parallel-Rank": "2"}}
        for _ in range(3):
            answer = await client.completions.with_raw_response.create(
                model="any", prompt="one", max_tokens=1, **choice
            )
            assert answer.headers["x-data-parallel-rank"] == "2"
    assert [len(replica.submitted) for replica in served.replicas] == [0, 0, 3]


TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}


async def test_every_output_of_a_body_belongs_to_the_trace_of_its_client(make_served: Callable[..., Any]) -> None:
    served = make_served()
    async with openai_client(served) as client:
        await client.completions.create(model="any", prompt="one", max_tokens=1, n=2, extra_headers=TRACE)
        await client.completions.create(model="any", prompt="one", max_tokens=1)
        await client.chat.completions.create(model="any", messages=CHAT, max_tokens=1, extra_headers=TRACE)
    parent = TraceParent(*TRACE.values())
    assert [command.trace for command in served.replicas[0].submitted] == [parent, parent, None, parent]


CHAT = [{"role": "user", "content": "hello"}]
BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "two"]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": "one", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "one", "temperature": -0.5}, "temperature"),
    ({"prompt": "one", "top_p": 0}, "top_p"),
    ({"prompt": "one", "seed": -1}, "seed"),
    ({"prompt": "one", "logprobs": 21}, "logprobs"),
    ({"prompt": "one", "logprobs": 1, "echo": True}, "echo"),
    ({"prompt": "one", "n": 129}, "n"),
    ({"prompt": ["one"] * 65, "n": 2}, "n"),
    ({"prompt": "one", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "one", "extra_body": {"data_parallel_rank": 1}}, "data_parallel_rank"),
    ({"prompt": "one", "extra_headers": {"X-Data-Parallel-Rank": "-1"}}, "x-data-parallel-rank"),
]


@pytest.mark.parametrize(("asked", "field"), BAD_COMPLETIONS)
async def test_an_invalid_body_is_a_bad_request_that_names_the_field(
    make_served: Callable[..., Any], asked: dict[str, Any], field: str
) -> None:
    served = make_served()
    async with openai_client(served) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="any", **asked)
        assert caught.value.param == field
        assert caught.value.type == "invalid_request_error"
        assert field in caught.value.message
    assert served.replicas[0].submitted == []


BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": CHAT, "max_completion_tokens": -1}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("asked", "field"), BAD_CHATS)
async def test_an_invalid_chat_is_a_bad_request(
    make_served: Callable[..., Any], asked: dict[str, Any], field: str
) -> None:
    async with openai_client(make_served()) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="any", **asked)
        assert (caught.value.param or "").startswith(field)


async def test_a_request_longer_than_the_pool_is_a_bad_request_with_the_sizes(make_served: Callable[..., Any]) -> None:
    async with openai_client(make_served()) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="pool has 8192"):
                await client.completions.create(model="any", prompt="one", max_tokens=8193, stream=stream)


class ShortCodec(WordTokenizer):
    """A model of 100 tokens with a context of eight."""

    context_tokens = 8
    vocab_size = 100


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"prompt": [1] * 8}, "prompt"),
        ({"prompt": [1] * 4, "max_tokens": 5}, "max_tokens"),
        ({"prompt": [100], "max_tokens": 1}, "prompt"),
    ],
)
async def test_a_request_that_does_not_fit_the_model_is_not_dispatched(
    make_served: Callable[..., Any], asked: dict[str, Any], field: str
) -> None:
    served = make_served(codec=ShortCodec(hashed_ids=100))
    async with openai_client(served) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="any", **asked)
        assert caught.value.param == field
    assert served.replicas[0].submitted == []


async def test_a_chat_without_a_limit_uses_the_rest_of_the_context(make_served: Callable[..., Any]) -> None:
    served = make_served(codec=ShortCodec(hashed_ids=100))
    async with openai_client(served) as client:
        answer = await client.chat.completions.create(model="any", messages=CHAT)
        assert answer.usage.total_tokens == 8


async def test_a_long_prompt_is_tokenized_in_a_thread(make_served: Callable[..., Any]) -> None:
    """Other clients' streams go on meanwhile; a short one is not worth the way."""
    here, seen = threading.get_ident(), []

    class WatchedCodec(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            seen.append((len(text) > 2048, threading.get_ident() == here))
            return super().encode(text)

    async with openai_client(make_served(codec=WatchedCodec())) as client:
        await client.completions.create(model="any", prompt="short", max_tokens=1)
        await client.completions.create(model="any", prompt="long " * 1000, max_tokens=1)
        messages = [{"role": "user", "content": "long " * 1000}]
        await client.chat.completions.create(model="any", messages=messages, max_tokens=1)
    assert seen == [(False, True), (True, False), (True, False)]


@pytest.mark.parametrize(
    ("field", "refused", "neutral"),
    [
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("tool_choice", "required", "auto"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "none"),
        ("function_call", {"name": "f"}, "none"),
        ("logit_bias", {"5": -100}, {}),
        ("presence_penalty", 0.5, 0),
        ("frequency_penalty", -0.5, 0.0),
        ("repetition_penalty", 1.1, 1.0),
        ("min_tokens", 3, 0),
        ("regex", "a+", None),
        ("structured_outputs", {"choice": ["a"]}, None),
    ],
)
async def test_a_field_without_effect_is_refused_in_openai_s_form(
    make_served: Callable[..., Any], field: str, refused: object, neutral: object
) -> None:
    """An answer that ignores such a field looks like one that follows it."""
    async with openai_client(make_served()) as client:
        asked = {"model": "any", "messages": [{"role": "user", "content": "one"}], "max_tokens": 1}
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(**asked, extra_body={field: refused})
        assert raised.value.body["param"] == field
        assert re.search("not supported|no effect", raised.value.body["message"])
        await client.chat.completions.create(**asked, extra_body={field: neutral})


async def test_a_completion_refuses_what_only_it_has(make_served: Callable[..., Any]) -> None:
    async with openai_client(make_served()) as client:
        for fields in ({"best_of": 3}, {"best_of": 1, "n": 2}, {"suffix": "end"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(fields))):
                await client.completions.create(model="any", prompt="one", max_tokens=1, **fields)
        for fields in ({"best_of": 2, "n": 2}, {"suffix": ""}, {"extra_body": {"min_tokens": 1, "ignore_eos": True}}):
            await client.completions.create(model="any", prompt="one", max_tokens=1, **fields)


async def test_if_one_output_cannot_be_opened_all_are_aborted(make_served: Callable[..., Any]) -> None:
    served = make_served()
    served.frontend.max_open_requests = 2
    async with openai_client(served) as client:
        with pytest.raises(openai.InternalServerError, match="2 requests are open"):
            await client.completions.create(model="any", prompt="one", n=3, max_tokens=100)
        while served.scheduler.has_work or served.frontend.num_open_requests:
            await asyncio.sleep(0)
    assert len(served.replicas[0].aborted) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_all_outputs(make_served: Callable[..., Any], stream: bool) -> None:
    served = make_served()
    asked = {"prompt": "one", "n": 3, "max_tokens": 8000, "stream": stream}
    arriving = [{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}]

    async def scenario() -> None:
        async def receive() -> Any:
            if arriving:
                return arriving.pop()
            while served.scheduler.num_steps < 3:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await asyncio.wait_for(served.app(scope, receive, send), timeout=30)
        while served.scheduler.has_work or served.frontend.num_open_requests:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))
    assert len(served.replicas[0].aborted) == 3
    assert served.scheduler.num_steps < 100
