"""A double of vLLM's request: what the kit's view reads of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Params:
    extra_args: Mapping[str, object] | None


@dataclass
class Lora:
    lora_name: str


@dataclass(eq=False)
class RequestDouble:
    request_id: str
    _all_token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int = 4
    priority: int = 0
    sampling_params: Params | None = field(default_factory=lambda: Params({}))
    lora_request: Lora | None = None
    is_done: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self._all_token_ids) - self.num_prompt_tokens

    def is_finished(self) -> bool:
        return self.is_done


def make_double(
    rid: str,
    prompt: Sequence[int] = (1, 2),
    *,
    max_tokens: int = 4,
    priority: int = 0,
    lora: Lora | None = None,
    extra: Mapping[str, object] | None = None,
) -> RequestDouble:
    return RequestDouble(rid, list(prompt), len(prompt), max_tokens, priority, Params(extra), lora)
