"""``POST /tokenize`` in the shape of vLLM and SGLang: the tokens of a prompt or of a conversation.

A router needs them, because the block hashes of KV events are computed from tokens. The tokens are those with which
the generating routes serve the same prompt.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from scheduler_engine.frontend.http_access import ApiRoute
from scheduler_engine.frontend.http_body import (
    BadBodyError,
    BodyReader,
    BodyReceiver,
    json_response,
    respond_with_errors,
)
from scheduler_engine.frontend.openai_format import Messages, chat_messages, check_supported
from scheduler_engine.frontend.text_frontend import TextFrontend

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


def tokenize_route(text: TextFrontend, bodies: BodyReceiver) -> ApiRoute:
    """Return the route.

    Args:
        text: has the tokenizer.
        bodies: receives the bodies.
    """
    reader = BodyReader(TokenizeBody, "/tokenize")

    async def tokenize(request: Request) -> Response:
        """Respond with the tokens of a prompt or of a conversation."""
        async with bodies.receive(request) as received:
            body = reader.read(received)
            if (body.prompt is None) == (body.messages is None):
                raise BadBodyError("prompt", "give either prompt or messages")
            check_supported(body, _NEUTRAL)
        if body.messages is None:
            tokens = await text.encode(body.prompt or "")
        else:
            tokens = await text.encode_chat(chat_messages(body.messages))
        return json_response({"count": len(tokens), "max_model_len": text.codec.context_tokens, "tokens": tokens})

    return ApiRoute("/tokenize", respond_with_errors(tokenize), methods=["POST"], body=TokenizeBody)
