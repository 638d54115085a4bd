"""``POST /tokenize`` in the shape of vLLM and SGLang: the tokens of a prompt or of a conversation.

A router needs them, because the block hashes of KV events are computed from tokens. The tokens are those with which
the generating routes serve the same prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler_components import ComponentError
from scheduler_engine.frontend.http_body import (
    BadBodyError,
    BodyReader,
    BodyReceiver,
    component_error_response,
    json_response,
)
from scheduler_engine.frontend.openai_format import Messages, chat_messages, check_supported
from scheduler_engine.frontend.text_frontend import TextFrontend

__all__ = ["TokenizeBody", "TokenizeEndpoint"]

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_strs": (False,),
}


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``/tokenize``: a prompt as text, or the messages of a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    model: str | None = None  # any name: adapters share the tokenizer of their model
    # Refused, unless their value has no effect.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class TokenizeEndpoint:
    """The ASGI application of the route.

    Attributes:
        text: has the tokenizer.
        bodies: receives the bodies.
    """

    text: TextFrontend
    bodies: BodyReceiver = field(default_factory=BodyReceiver)
    _reader: BodyReader[TokenizeBody] = field(default_factory=lambda: BodyReader(TokenizeBody, "/tokenize"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one POST."""
        try:
            response = await self._respond(Request(scope, receive))
        except ClientDisconnect:
            return
        except ComponentError as error:
            response = component_error_response(error)
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        async with self.bodies.receive(request) as received:
            body = self._reader.read(received)
            if (body.prompt is None) == (body.messages is None):
                raise BadBodyError("prompt", "give either prompt or messages")
            check_supported(body, _NEUTRAL)
        if body.messages is None:
            tokens = await self.text.encode(body.prompt or "")
        else:
            tokens = await self.text.encode_chat(chat_messages(body.messages))
        return json_response({"count": len(tokens), "max_model_len": self.text.codec.context_tokens, "tokens": tokens})
