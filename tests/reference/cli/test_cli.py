"""The command line: help helps, and a person's mistake is one line on standard error and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scheduler_components import __version__
from scheduler_components.reference.cli import main as cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str:
    monkeypatch.setattr(sys, "argv", ["scheduler-components", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


MISTAKES = [
    (["frobnicate"], "frobnicate"),
    (["serve", "--sped", "3"], "--sped"),
    (["serve", "--dp-size", "two"], "--dp-size"),
    (["serve", "--dp-size", "0"], "dp_size=0"),
    (["serve", "--attn-cp-size", "-1"], "attn_cp_size=-1"),
    (["serve", "--page-size", "0"], "page_size=0"),
    (["serve", "--kv-tokens", "1000"], "give 992"),
    (["serve", "--speed", "nan"], "speed=nan"),
    (["serve", "--port", "70000"], "--port"),
    (["serve", "--limit", "0"], "--limit"),
    (["serve", "--trace", "/no/such/file"], "/no/such/file"),
    (["serve", "--kv-events-config", "{"], "kv_events"),
    (["serve", "--kv-events-config", '{"publisher": "zmqq"}'], "did you mean 'zmq'"),
    (["serve", "--kv-events-config", '{"publisher": "zmq", "endpont": "tcp://*:1"}'], "did you mean"),
    (["serve", "--kv-events-config", '{"publisher": "zmq", "endpoint": "tcp://*:65535"}'], "65535"),
    (
        ["serve", "--kv-events-config", '{"publisher": "zmq", "replay_endpoint": "tcp://*:5558"}'],
        "overlaps",
    ),
    (["serve", "--kv-events-config", '{"publisher": "zmq", "load_endpoint": "inproc://load"}'], "load_endpoint"),
    (["demo", "--requests", "0"], "num_requests=0"),
    (["demo", "--chats-per-s", "0"], "chats_per_s=0"),
    (["watch"], "target"),
    (["watch", "localhost"], "localhost"),
    (["watch", "tcp://*:5557"], "cannot be dialled"),
    (["doctor", "ftp://host"], "ftp://host"),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("scheduler-components: ")
    assert complaint.count("\n") == 1
    assert named in complaint


def test_a_trace_that_is_none_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "serve", "--trace", str(tmp_path)) == 2
    assert "starting" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "demo", "watch", "doctor"])
def test_every_command_has_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    assert command in capsys.readouterr().out


def test_without_a_command_the_help_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 0
    assert "doctor" in capsys.readouterr().out


def test_the_version_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_a_worker_that_does_not_answer_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "doctor", "http://127.0.0.1:1") == 1
    assert "refused" in capsys.readouterr().out
