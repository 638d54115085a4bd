"""`make worlds`: equal seeds print equal bytes, and a broken promise says how to repeat it."""

from __future__ import annotations

import json

import pytest

from observability.kv_stream.digest_cursor import DigestCursor
from worlds.command import main


def simulate(*arguments: object) -> int:
    return main([str(each) for each in arguments])


def test_the_json_of_equal_seeds_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        assert simulate("--seed", 1, "--seeds", 2, "--json") == 0
        printed = capsys.readouterr()
        outputs.append(printed.out)
        assert "s per second" in printed.err
    assert outputs[0] == outputs[1]
    assert [json.loads(line)["seed"] for line in outputs[0].splitlines()] == [1, 2]


def test_a_summary_says_what_was_broken_and_that_every_promise_was_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--seed", 2) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 worlds, ")
    for text in ("batches published: ", "faults: ", "s per second", "every promise that is judged was kept\n"):
        assert text in out


def test_a_broken_promise_is_an_exit_code_and_can_be_repeated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DigestCursor, "_recover_gap", lambda _: ())
    monkeypatch.setattr(DigestCursor, "on_probe_due", lambda _: ())
    seed = next(seed for seed in range(20) if simulate("--seed", seed, "--json") == 1)
    capsys.readouterr()
    assert simulate("--seed", seed) == 1
    out = capsys.readouterr().out
    assert f"seed {seed} breaks a promise at " in out
    assert f"repeat it: make worlds WORLDS='--seed {seed} --kind " in out
    assert f"1 of 1 worlds broke a promise: seeds {seed}\n" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(("--seeds", 0), "must be >= 1"), (("--seed", -1), ">= 0"), (("--seeds", "many"), "many")],
)
def test_a_mistake_is_refused(arguments: tuple[object, ...], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate(*arguments)
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err
