"""The grammar queue of a rank reads the tokenizer that the frontend wrote, and compiles with its limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.tiny_model import VOCABULARY, make_tokenizer
from kit.waiting import wait_until

from scheduler_components.agreement.step_agreement import StepAgreement
from scheduler_components.errors import QueueFullError
from scheduler_components.ports import NullDecisionLog
from scheduler_components.waiting.grammar_queue import GrammarQueue
from scheduler_engine.device.model_spec import TokenSpec
from scheduler_engine.device.sampling import SamplingParams
from scheduler_engine.engine.config import GrammarConfig
from scheduler_engine.engine.rank.grammar import open_grammar_queue
from scheduler_engine.engine.scheduler.request import EngineRequest

pytestmark = [pytest.mark.model, pytest.mark.threads]

TOKENS = TokenSpec(vocab_size=VOCABULARY, eos_token_ids=(2,))


@contextmanager
def opened(tokenizer: Path, **limits: float) -> Iterator[GrammarQueue[EngineRequest]]:
    queue = open_grammar_queue(GrammarConfig(**limits), TOKENS, tokenizer, NullDecisionLog())  # type: ignore[arg-type]
    try:
        yield queue
    finally:
        queue.close()


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(make_tokenizer().backend_tokenizer.to_str(), encoding="utf-8")
    return path


def request(rid: str, **sampling: str) -> EngineRequest:
    return EngineRequest(rid, [1, 2, 3], sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def departures(queue: GrammarQueue[EngineRequest], number: int) -> dict[str, tuple[str, str]]:
    """Step until this many requests have left. Return why, by request."""
    agreement, left = StepAgreement(parts=[queue]), {}

    def step() -> None:
        agreement.step(len(left))
        left.update({each.rid: (each.reason, each.problem) for each in queue.queue.pop_departures()})

    wait_until(lambda: len(left) == number, poll=step)
    return left


def test_requests_leave_with_their_grammar_or_its_problem(tokenizer_file: Path) -> None:
    with opened(tokenizer_file) as queue:
        good, bad = request("good", regex="[0-9]{3}"), request("bad", json_schema='{"type": "strin"}')
        assert queue.enter(good)
        assert queue.enter(bad)
        assert not queue.enter(request("free"))
        left = departures(queue, 2)
    assert left == {"good": ("ready", ""), "bad": ("failed", "json_schema: Invalid type: strin")}
    assert good.grammar is not None
    assert any(good.grammar.next_bitmask([1, 2, 3]))


def test_without_a_tokenizer_every_grammar_is_an_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("")
    with opened(tmp_path / "tokenizer.json") as queue:
        queue.enter(request("r", regex="a"))
        left = departures(queue, 1)
    assert left["r"][0] == "error"
    assert "this engine cannot compile grammars" in left["r"][1]


def test_the_limits_are_those_of_the_configuration(tokenizer_file: Path) -> None:
    with opened(tokenizer_file, max_waiting=1, timeout_s=1e-6) as queue:
        queue.enter(request("r", regex="a"))
        with pytest.raises(QueueFullError):
            queue.enter(request("more", regex="a"))
        assert queue.queue.max_wait_s == 1e-6
