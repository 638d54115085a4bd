"""Grammars that llguidance compiles for the tokenizer of the tiny model."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.grammars import tokens_of
from kit.tiny_model import VOCABULARY, make_tokenizer

from scheduler_components import ConfigError
from scheduler_components.errors import GrammarError
from scheduler_components.values import GrammarKey
from scheduler_components.waiting.held_request import RequestGrammar
from scheduler_components.waiting.llguidance_backend import LlguidanceBackend, open_llguidance_backend

pytestmark = pytest.mark.model

EOS = 2
TOKENIZER = make_tokenizer().backend_tokenizer
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["page", "token"]},
        "size": {"type": "integer"},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return open_llguidance_backend(TOKENIZER.to_str(), vocab_size=VOCABULARY, eos_token_ids=(EOS,))


def write(backend: LlguidanceBackend, key: GrammarKey, seed: int, *, at_most: int = 400) -> tuple[str, list[int]]:
    """A text of random allowed tokens, up to the end of the output."""
    draw, grammar = random.Random(seed), RequestGrammar(backend.compile(key), num_prompt_tokens=1)
    output: list[int] = []
    while len(output) < at_most:
        token = draw.choice(tokens_of(grammar.next_bitmask([7, *output])))
        if token == EOS:
            break
        output.append(token)
    return TOKENIZER.decode(output), output


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_texts_of_allowed_tokens_are_json_of_the_schema(backend: LlguidanceBackend, seed: int) -> None:
    text, _ = write(backend, GrammarKey("json_schema", json.dumps(SCHEMA)), seed)
    found = json.loads(text)
    assert list(found) == ["name", "kind", "size"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 6
    assert found["kind"] in ("page", "token")
    assert isinstance(found["size"], int)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_texts_of_allowed_tokens_match_the_expression(backend: LlguidanceBackend, seed: int) -> None:
    text, _ = write(backend, GrammarKey("regex", r"(page|token) [0-9]{2,4}é?"), seed)
    assert re.fullmatch(r"(page|token) [0-9]{2,4}é?", text)


def test_only_the_end_may_follow_a_complete_output(backend: LlguidanceBackend) -> None:
    grammar = RequestGrammar(backend.compile(GrammarKey("regex", "page")), num_prompt_tokens=0)
    assert tokens_of(grammar.next_bitmask(TOKENIZER.encode("page").ids)) == [EOS]


def test_matchers_of_one_grammar_are_independent(backend: LlguidanceBackend) -> None:
    key = GrammarKey("json_schema", json.dumps(SCHEMA))
    compiled = backend.compile(key)
    _, output = write(backend, key, 3)
    grammars = [RequestGrammar(compiled, num_prompt_tokens=0) for _ in range(2)]
    first = [grammars[0].next_bitmask(output[:length]) for length in range(len(output))]
    assert [grammars[1].next_bitmask(output[:length]) for length in range(len(output))] == first


def test_a_token_that_the_grammar_forbids_is_an_error(backend: LlguidanceBackend) -> None:
    matcher = backend.compile(GrammarKey("regex", "page")).new_matcher()
    with pytest.raises(GrammarError, match=r"token 300 does not match the grammar \(.*satisfy the grammar"):
        matcher.accept_token(300)
    with pytest.raises(GrammarError, match="allows no further token"):
        matcher.next_bitmask()


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", "[]", "Expecting object schema"),
        ("json_schema", '{"$ref": "#/x"}', "Pointer '/x' does not exist"),
        ("json_schema", '{"if": {}, "type": "object"}', r'Unimplemented keys: \["if"\]'),
        ("json_schema", "{", "EOF while parsing"),
        ("regex", "(", "unclosed group"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "no output matches it"),
    ],
)
def test_a_source_that_is_no_grammar_is_refused_with_the_reason(
    backend: LlguidanceBackend, kind: str, source: str, problem: str
) -> None:
    with pytest.raises(GrammarError, match=problem) as raised:
        backend.compile(GrammarKey(kind, source))
    assert "\n" not in str(raised.value)
    assert "verbose" not in str(raised.value)


@pytest.mark.parametrize(("num_properties", "is_too_complex"), [(450, False), (550, True)])
def test_a_grammar_may_become_too_complex_while_the_output_is_written(
    backend: LlguidanceBackend, num_properties: int, is_too_complex: bool
) -> None:
    """docs/how-to/structured-output.md names the number of optional properties."""
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(num_properties)}}
    matcher = backend.compile(GrammarKey("json_schema", json.dumps(schema))).new_matcher()
    brace = TOKENIZER.encode("{").ids[0]
    if is_too_complex:
        with pytest.raises(GrammarError, match=r"Current row has \d+ items"):
            matcher.accept_token(brace)
    else:
        matcher.accept_token(brace)
        assert tokens_of(matcher.next_bitmask())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "items", "enum", "$ref", "pattern", "anyOf", "minLength", "x\0"]),
            inner,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.just("regex"), st.text(max_size=20)) | st.tuples(st.just("json_schema"), json_values.map(json.dumps))
)
def test_any_source_is_compiled_or_refused(backend: LlguidanceBackend, source: tuple[str, str]) -> None:
    """Nothing else is raised, and no source ends the process."""
    try:
        matcher = backend.compile(GrammarKey(*source)).new_matcher()
    except GrammarError as error:
        assert str(error)
        return
    assert len(matcher.next_bitmask()) * 8 >= VOCABULARY


def test_a_tokenizer_that_has_no_bytes_is_refused() -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(10)}, unk_token="w3"))
    with pytest.raises(ConfigError, match=r"tokenizer=.*: cannot be used for grammars .can't determine decoder type"):
        open_llguidance_backend(words.to_str(), vocab_size=10, eos_token_ids=(2,))


def test_an_output_needs_a_token_that_ends_it() -> None:
    with pytest.raises(ConfigError, match=r"eos_token_ids=.*no output could end"):
        open_llguidance_backend(TOKENIZER.to_str(), vocab_size=VOCABULARY, eos_token_ids=())
