"""Requests that share prefixes, in order of arrival."""

from __future__ import annotations

from hypothesis import strategies as st

from scheduler_components.testing.scheduler_checks import Workload

__all__ = ["workloads"]


@st.composite
def workloads(
    draw: st.DrawFn, *, max_requests: int = 8, max_prompt_tokens: int = 48, max_new_tokens: int = 8, vocabulary: int = 4
) -> Workload:
    """Requests as ``scheduler_checks`` takes them: (prompt, most tokens to generate) pairs.

    A prompt begins with a part of an earlier one as often as not, and few words make the rest meet too.
    """
    tokens = st.integers(0, vocabulary - 1)
    prompts: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, max_requests))):
        earlier = draw(st.sampled_from([(), *prompts]))
        head = earlier[: draw(st.integers(0, len(earlier)))]
        tail = draw(st.lists(tokens, min_size=0 if head else 1, max_size=max(1, max_prompt_tokens - len(head))))
        prompts.append((head + tuple(tail))[:max_prompt_tokens])
    return tuple((prompt, draw(st.integers(1, max_new_tokens))) for prompt in prompts)
