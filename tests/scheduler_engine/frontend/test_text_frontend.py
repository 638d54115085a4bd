"""``/generate`` with text, as SGLang's clients use it: events with all text so far, logprobs, a stop string, a rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from kit.asgi import ask

from scheduler_components import ConfigError
from scheduler_engine.device.sampling import SamplingParams
from scheduler_engine.frontend.dispatcher import LoadDispatcher
from scheduler_engine.frontend.frontend import Frontend, GenerateReqInput
from scheduler_engine.frontend.openai_format import CompletionBody
from scheduler_engine.frontend.text_frontend import GenerationParams, TextFrontend
from scheduler_engine.text.word_tokenizer import WordTokenizer

CODEC = WordTokenizer()


def generate(served: Any, **body: Any) -> list[dict[str, Any]]:
    """The answer, or the answers of a stream."""

    response = ask(served.app, "/generate", json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return [response.json()]
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_events_carry_all_text_so_far_and_the_new_tokens(make_served: Callable[..., Any]) -> None:
    served = make_served()
    tokens = served.expected_tokens("mine", 3, 4)
    answers = generate(served, text="one two three", rid="mine", stream=True, sampling_params={"max_new_tokens": 4})
    assert [answer["text"] for answer in answers] == [CODEC.decode(tokens[:end]) for end in range(1, 5)]
    assert [answer["output_ids"] for answer in answers] == [[token] for token in tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_match_their_tokens(make_served: Callable[..., Any], stream: bool) -> None:
    served = make_served()
    asked = {"return_logprob": True, "top_logprobs_num": 1, "sampling_params": {"max_new_tokens": 3}}
    meta_infos = [each["meta_info"] for each in generate(served, input_ids=[1], rid="mine", stream=stream, **asked)]
    tokens = served.expected_tokens("mine", 1, 3)
    assert [pair for each in meta_infos for pair in each["output_token_logprobs"]] == [
        [0.0, token, None] for token in tokens
    ]
    assert [top for each in meta_infos for top in each["output_top_logprobs"]] == [
        [[0.0, token, None]] for token in tokens
    ]


def test_a_response_names_the_stop_string_and_the_rank(make_served: Callable[..., Any]) -> None:
    served = make_served(num_replicas=2)
    words = CODEC.decode(served.expected_tokens("mine", 1, 100)).split()
    params = {"max_new_tokens": 100, "stop": words[5], "no_stop_trim": True}
    (answer,) = generate(served, text="one", rid="mine", data_parallel_rank=1, sampling_params=params)
    assert answer["text"].split() == words[:6]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": words[5]}
    assert answer["meta_info"]["dp_rank"] == 1
    assert [len(replica.submitted) for replica in served.replicas] == [0, 1]


class SmallTokenizer(WordTokenizer):
    vocab_size = 100  # type: ignore[assignment]  # a constant instead of a property


def test_a_bias_reaches_a_device_with_logits_and_no_other() -> None:
    frontend = Frontend(leaders=[], dispatcher=LoadDispatcher(replicas=[]))
    text = TextFrontend(frontend=frontend, codec=SmallTokenizer(), has_logits=True)

    def params(**bias: float) -> GenerationParams:
        body = msgspec.json.encode({"prompt": "one", "logit_bias": bias})
        return msgspec.json.decode(body, type=CompletionBody).params()

    asked = text.request([1], params(**{"7": -100, "5": 2.5, "6": 0.0}))
    assert asked.sampling.logit_bias == ((5, 2.5), (7, -100.0))
    with pytest.raises(ConfigError, match=r"logit_bias.*not a token of this model"):
        text.request([1], params(**{"100": 1}))
    with pytest.raises(ConfigError, match="logit_bias"):
        params(**{"1": 101})
    simulated = TextFrontend(frontend=frontend, codec=CODEC)
    with pytest.raises(ConfigError, match=r"logit_bias.*no effect on a simulated model"):
        simulated.request([1], params(**{"5": 1}))
    assert simulated.request([1], params(**{"5": 0})).sampling.logit_bias == ()


def test_a_grammar_reaches_ranks_that_compile_it_and_no_others() -> None:
    frontend = Frontend(leaders=[], dispatcher=LoadDispatcher(replicas=[]))

    def request(*, ignore_eos: bool = False, **device: bool) -> GenerateReqInput:
        params = GenerationParams(sampling=SamplingParams(regex="[a-c]+"), ignore_eos=ignore_eos)
        return TextFrontend(frontend=frontend, codec=SmallTokenizer(), **device).request([1], params)

    assert request(has_logits=True, has_grammars=True).sampling.regex == "[a-c]+"
    with pytest.raises(ConfigError, match=r"regex.*no effect on a simulated model"):
        request()
    with pytest.raises(ConfigError, match=r"regex.*needs a grammar backend.*install the extra grammar"):
        request(has_logits=True)
    with pytest.raises(ConfigError, match=r"ignore_eos.*contradicts regex"):
        request(has_logits=True, has_grammars=True, ignore_eos=True)
