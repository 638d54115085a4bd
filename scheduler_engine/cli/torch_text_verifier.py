"""Verify the answers of a run with transformers: the same model with its own attention and without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler_components.testing import ConformanceError
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_engine.cli.run_report import TextComparison
from scheduler_engine.cli.workload_driver import ChatTranscript
from scheduler_engine.device.model_spec import ModelSpec
from scheduler_engine.device.torch_model import load_model


def verify_texts(spec: ModelSpec, chats: Sequence[ChatTranscript]) -> TextComparison:
    """Compare every answer of every chat with transformers' generate. This loads the model a second time.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    model: Any = load_model(spec)  # the types of transformers do not say that models generate
    model.set_attn_implementation("sdpa")
    verifier = GreedyTextVerifier.over(model)
    problems, gaps = [], [0.0]
    for chat in chats:
        try:
            gaps += (tie.gap for tie in verifier.expect_answers(chat.token_ids.tolist(), chat.answers))
        except ConformanceError as error:
            problems.append(f"{error.found} instead of {error.expected}")
    answers = [answer for chat in chats for answer in chat.answers]
    return TextComparison(
        num_answers=len(answers),
        num_tokens=sum(map(len, answers)),
        num_near_ties=len(gaps) - 1,
        widest_gap=max(gaps),
        noise=verifier.noise,
        problems=tuple(problems),
    )
