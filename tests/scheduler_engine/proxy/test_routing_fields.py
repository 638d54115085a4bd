"""RoutingFields: what a proxy reads of a request. What it cannot read, it leaves to the replica."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.fake_engine import body_of

from scheduler_engine.frontend.http_body import BadBodyError
from scheduler_engine.proxy.routing_fields import RoutingFields, read_routing_fields, read_session_id


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (body_of(prompt=[1, 2, 3]), [1, 2, 3]),
        (body_of(prompt=[[1, 2], [3]]), [1, 2]),
        (body_of(input_ids=[7, 8]), [7, 8]),
        (body_of(input_ids=[2**32 - 1]), [2**32 - 1]),
    ],
)
def test_a_prompt_of_tokens_is_read_as_it_is(body: bytes, tokens: list[int]) -> None:
    fields = read_routing_fields(body)
    assert (list(fields.token_ids or ()), fields.tokenize_body) == (tokens, b"")


@pytest.mark.parametrize(
    ("body", "question"),
    [
        (body_of(prompt="a b"), {"prompt": "a b"}),
        (body_of(prompt=["a b", "c"]), {"prompt": "a b"}),
        (body_of(text="a b"), {"prompt": "a b"}),
        (
            body_of(messages=[{"role": "user", "content": "a"}], temperature=0.5, tools=[{"x": 1}]),
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"x": 1}]},
        ),
    ],
)
def test_the_tokens_of_a_text_are_asked_for_with_all_that_they_depend_on(body: bytes, question: object) -> None:
    fields = read_routing_fields(body)
    assert fields.token_ids is None
    assert json.loads(fields.tokenize_body) == question


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], {"a": 1}, [1, "a"], [-1], [2**32], [True]])
def test_a_prompt_that_no_replica_accepts_has_no_tokens(prompt: object) -> None:
    assert read_routing_fields(body_of(prompt=prompt)) == RoutingFields()


def test_a_session_an_adapter_and_a_model_are_read() -> None:
    fields = read_routing_fields(body_of(conversation="c", lora_path="l", model="m"))
    assert (fields.session, fields.lora, fields.model, fields.open_session) == ("c", "l", "m", None)
    fields = read_routing_fields(body_of(conversation="c", session_params={"id": "s", "rid": None}))
    assert (fields.session, fields.open_session) == ("s", "s")


def test_a_session_id_is_read_only_where_a_session_is_opened_or_closed() -> None:
    body = body_of(prompt=[1], session_id="s")
    assert read_routing_fields(body).open_session is None
    assert read_session_id(body) == "s"
    assert [read_session_id(body_of(session_id=each)) for each in (None, 5, {})] == [None] * 3


def test_a_long_session_name_is_cut() -> None:
    session = read_routing_fields(body_of(conversation="c" * 10_000)).session
    assert session is not None
    assert len(session) == 256


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b"5", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadBodyError):
        read_routing_fields(body)
    with pytest.raises(BadBodyError):
        read_session_id(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("prompt", "text", "input_ids", "messages", "conversation", "session_params", "lora_path", "model")


@given(fields=st.dictionaries(st.sampled_from(NAMES), JSON))
@example(fields={"prompt": ["", [0]]})
def test_any_object_is_read(fields: dict[str, object]) -> None:
    read = read_routing_fields(json.dumps(fields).encode())
    assert read.token_ids is None or all(0 <= token < 2**32 for token in read.token_ids)
    assert not (read.token_ids and read.tokenize_body)
