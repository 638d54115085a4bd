"""RoutingFields: what a proxy reads of a request to choose its replica: the prompt, the session, the adapter.

A field that has another type than a replica accepts counts as missing. The replica refuses such a request itself, with
its own sentence, so the proxy needs no rules for the fields of each engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from scheduler_engine.frontend.http_body import BadBodyError

_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Tokens: TypeAlias = Annotated[list[_Token], msgspec.Meta(min_length=1)]
_Prompt: TypeAlias = str | Annotated[list[str | _Token | _Tokens], msgspec.Meta(min_length=1)]
_Fields: TypeAlias = dict[str, msgspec.Raw]

T = TypeVar("T")

_TEMPLATE_FIELDS = ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")
"""Fields of a chat that change its tokens. Not a ``chat_template`` of the client, which engines refuse by default."""

MAX_HASHED_TOKENS = 2**18
"""A longer prompt is placed as if it ended there: a client must not hold up the others with a prompt of any length."""

MAX_KEY_CHARACTERS = 256  # longer than any name that engines accept; bounds what the proxy remembers per session


class RoutingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a request that chooses its replica.

    Attributes:
        token_ids: the first ``MAX_HASHED_TOKENS`` tokens of the first prompt, if the client sent tokens; else None.
        tokenize_body: the body of ``POST /tokenize`` for the first prompt; empty if it needs none or has no prompt.
        session: requests with the same value share a prefix; None for a request of its own.
        lora: the adapter; None for the base model, or if the field ``model`` names it.
        model: the field ``model``, which may name an adapter.
        open_session: the open session of which the request is a turn, or which it closes. Its state is on one replica.
        new_session: the session that the request opens; None if it opens none or names none.
    """

    token_ids: Sequence[int] | None = None
    tokenize_body: bytes = b""
    session: str | None = None
    lora: str | None = None
    model: str | None = None
    open_session: str | None = None
    new_session: str | None = None


class _SessionId(msgspec.Struct, frozen=True):
    id: str


_TEXT = msgspec.json.Decoder(str)
_SESSION = msgspec.json.Decoder(_SessionId)
_TOKENS = msgspec.json.Decoder(_Tokens)
_PROMPT = msgspec.json.Decoder(_Prompt)


def read_routing_fields(body: bytes | bytearray) -> RoutingFields:
    """Read the body of any generating route. Their prompts have different names.

    Raises:
        BadBodyError: the body is not a JSON object.
    """
    fields = _decode(body)
    token_ids, tokenize_body = _prompt(fields)
    session = _field(fields, "session_params", _SESSION)
    opened = None if session is None else session.id
    named = _field(fields, "conversation", _TEXT) if opened is None else opened
    return RoutingFields(
        token_ids=token_ids,
        tokenize_body=tokenize_body,
        session=named if named is None else named[:MAX_KEY_CHARACTERS],
        lora=_field(fields, "lora_path", _TEXT),
        model=_field(fields, "model", _TEXT),
        open_session=opened,
    )


def read_session_id(body: bytes | bytearray) -> str | None:
    """Read the body of ``/open_session`` or ``/close_session``: the id of the session, or None if it names none.

    Raises:
        BadBodyError: the body is not a JSON object.
    """
    return _field(_decode(body), "session_id", _TEXT)


def _decode(body: bytes | bytearray) -> _Fields:
    try:
        return msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBodyError("body", str(error)) from None


def _prompt(fields: _Fields) -> tuple[Sequence[int] | None, bytes]:
    """Return the tokens of the first prompt, or the body with which a replica tokenizes it."""
    if "messages" in fields:
        return None, msgspec.json.encode({name: fields[name] for name in _TEMPLATE_FIELDS if name in fields})
    given = _field(fields, "input_ids", _TOKENS)
    if given is not None:
        return _array(given), b""
    prompt: str | Sequence[str | int | list[int]] | None = _field(fields, "text", _TEXT)
    if prompt is None:
        prompt = _field(fields, "prompt", _PROMPT)
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return None, msgspec.json.encode({"prompt": prompt})
    tokens = [each for each in prompt or () if isinstance(each, int)]
    return _array(tokens) if prompt and len(tokens) == len(prompt) else None, b""


def _array(tokens: Sequence[int]) -> Sequence[int]:
    """Return the tokens that count, in the least memory: they are kept until the request ends."""
    return array("I", tokens[:MAX_HASHED_TOKENS])


def _field(fields: _Fields, name: str, decoder: msgspec.json.Decoder[T]) -> T | None:
    """Return a field, or None if it is missing, null or of another type."""
    text = fields.get(name)
    if text is None:
        return None
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
