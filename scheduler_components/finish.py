"""Why and when a request ends."""

from __future__ import annotations

import enum
from collections.abc import Container

from scheduler_components.request_ports import StopRules

__all__ = ["FinishReason", "finish_reason_after"]


class FinishReason(enum.StrEnum):
    """Why a request ended. The first three are the values of SGLang's ``meta_info``, the last is vLLM's."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


def finish_reason_after(
    token: int, num_output_tokens: int, limits: StopRules, eos_token_ids: Container[int]
) -> FinishReason | None:
    """Return why a request is over once ``token`` is its last, or None while it goes on. A stop wins over the length.

    Args:
        token: the newest token; one that stops is part of the output.
        num_output_tokens: generated so far, ``token`` included.
        limits: the request's own.
        eos_token_ids: the model's end-of-sequence tokens, which ``ignore_eos`` makes tokens like others.
    """
    if token in limits.stop_token_ids or (token in eos_token_ids and not limits.ignore_eos):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output_tokens >= limits.max_new_tokens else None
