"""``demo --model``: real processes and tokens, verified from outside by the streams and by transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

import pytest

from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_engine.cli.torch_text_verifier import verify_texts
from scheduler_engine.cli.workload_driver import ChatTranscript
from scheduler_engine.device.torch_model import inspect_model

pytestmark = [pytest.mark.model, pytest.mark.processes]

COMMAND = [sys.executable, "-m", "scheduler_engine.cli.main", "demo"]
DEADLINE_S = 200
PROMPT = (7, 90, 211, 34, 9)


@pytest.mark.soak_only  # a real model in the engine and over chat, and the comparison itself, run in the suite
def test_the_demo_compares_its_answers_with_transformers(model_folder: Path) -> None:
    """A pool so small that prompts go to the host and come back."""
    arguments = ["--model", str(model_folder), "--requests", "5", "--chats-per-s", "50", "--speed", "50"]
    tiers = ["--hicache", "--kv-tokens", "256", "--hicache-host-tokens", "4096"]
    with tempfile.TemporaryDirectory(prefix="sc-") as directory:  # a short path, for sockets are made below it
        ran = subprocess.run(
            [*COMMAND, *arguments, *tiers],
            capture_output=True,
            text=True,
            env=os.environ | {"TMPDIR": directory, "OMP_NUM_THREADS": "1"},
            timeout=DEADLINE_S,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 finished, 0 refused, 0 failed" in ran.stdout
    assert re.search(r"view equals cache +ok +dp0: ([1-9]\d* device \+ )?[1-9]\d* host blocks equal", ran.stdout)
    assert re.search(r"text +ok +5 answers of [1-9]\d* tokens compared with transformers'", ran.stdout)
    assert ran.stdout.endswith("PASSED\n")


def test_an_answer_with_a_different_token_is_reported(model_folder: Path, judge: GreedyTextVerifier) -> None:
    right = judge.text(PROMPT, 6).token_ids
    chats = [ChatTranscript(array("I", PROMPT)), ChatTranscript(array("I", PROMPT))]
    chats[0].add_answer(right)
    chats[1].add_answer((*right[:4], (right[4] + 1) % 320, right[5]))
    found = verify_texts(inspect_model(model_folder), chats)
    assert (found.num_answers, found.num_tokens) == (2, 12)
    assert len(found.problems) == 1
    assert f"instead of {right[4]} at 9" in found.problems[0]
