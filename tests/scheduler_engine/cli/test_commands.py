"""The command line: help is complete, and a user's mistake is one line on standard error and exit code 2."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_components.kv_events import CurveClientKeys
from scheduler_engine.cli.commands import COMMANDS

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

MISTAKES = [
    (["frobnicate"], "frobnicate"),
    (["serve", "stray"], "stray"),
    (["demo", "--hicache-write", "back"], "write_back"),
    (["serve", "--sped", "3"], "--sped"),
    (["serve", "--dp-size", "two"], "--dp-size"),
    (["serve", "--dp-size", "0"], "dp_size=0"),
    (["serve", "--attn-cp-size", "-1"], "attn_cp_size=-1"),
    (["serve", "--page-size", "0"], "page_size=0"),
    (["serve", "--moe-dp-size", "3"], "give a divisor of 8"),
    (["serve", "--kv-tokens", "1000"], "give 992"),
    (["serve", "--speed", "nan"], "speed=nan"),
    (["serve", "--decision-log", "dump"], "decision_log='dump'"),
    (["serve", "--port", "70000"], "--port"),
    (["serve", "--limit", "0"], "--limit"),
    (["serve", "--trace", "/no/such/file"], "/no/such/file"),
    (["serve", "--kv-events-config", "{"], "kv_events"),
    (["serve", "--kv-events-config", '{"publisher": "zmqq"}'], "did you mean 'zmq'"),
    (["serve", "--kv-events-config", '{"publisher": "zmq", "endpont": "tcp://*:1"}'], "did you mean"),
    (["serve", "--kv-events-config", '{"publisher": "zmq", "endpoint": "tcp://*:65535"}'], "65535"),
    (["serve", "--kv-events-config", '{"publisher": "zmq", "replay_endpoint": "tcp://*:5558"}'], "overlaps"),
    (["serve", "--kv-events-config", '{"publisher": "zmq", "load_endpoint": "inproc://load"}'], "load_endpoint"),
    (["demo", "--requests", "0"], "num_requests=0"),
    (["demo", "--chats-per-s", "0"], "chats_per_s=0"),
    (["watch"], "TARGET"),
    (["watch", "tcp://127.0.0.1:1", "--log-level", "loud"], "--log-level"),
    (["--log-format", "xml", "doctor", "http://h"], "--log-format"),
    (["watch", "localhost"], "localhost"),
    (["watch", "tcp://*:5557"], "cannot be dialled"),
    (["doctor", "ftp://host"], "ftp://host"),
    (["doctor", "tcp://*:5557"], "cannot be dialled"),
    (["doctor", "http://host:1", "--topic", "kv"], "topic='kv'"),
    (["relay", "--kv-events-config", "{}"], "SOURCE"),
    (["relay", "localhost:5557", "--kv-events-config", "{}"], "localhost:5557"),
    (["relay", "tcp://*:5557", "--kv-events-config", "{}"], "cannot be dialled"),
    (["relay", "tcp://127.0.0.1:5557,tcp://127.0.0.1", "--kv-events-config", "{}"], "has no port"),
    (["relay", "9999=tcp://127.0.0.1:5557", "--kv-events-config", "{}"], "rank 9999"),
    (["relay", "http://", "--kv-events-config", "{}"], "http://"),
    (["relay", "tcp://127.0.0.1:5557"], "--kv-events-config"),
    (["relay", "tcp://127.0.0.1:5557", "--kv-events-config", '{"publisher": "null"}'], "publisher='null'"),
    (["relay", "tcp://127.0.0.1:5557", "--kv-events-config", '{"endpont": "tcp://*:1"}'], "did you mean"),
    (["relay", "tcp://127.0.0.1:5557", "--kv-events-config", "{}", "--secret-key-file", "x"], "publisher_key_file"),
    (["relay", "tcp://127.0.0.1:5557", "--kv-events-config", "{}", "--jetstraem", "x"], "--jetstraem"),
]


ENGINE = """
    admin-api-key admin-api-key-file affinity-tokens allowed-host api-key api-key-file attn-cp-size attn-tp-size
    batch-mode chunk-tokens decision-dump-directory decision-log dp-attention dp-size drain-timeout enable-lora
    forward-pass-endpoint forward-pass-worker-id grammar-backend hicache hicache-host-layout hicache-host-tokens
    hicache-load hicache-load-pages hicache-mooncake-master hicache-mooncake-metadata hicache-prefetch
    hicache-prefetch-pages hicache-retry-steps hicache-storage hicache-storage-checksum hicache-storage-path
    hicache-write hicache-write-hits host kv-events-config kv-pool kv-tokens lora-paths max-loaded-loras
    max-running-requests moe-dp-size otlp-traces-endpoint page-size port pp-size preemption-policy
    prefill-delay-low-usage prefill-delay-steps profile-directory queue-timeout recv-interval request-timeout
    schedule-policy seed speed weights-root
"""
API_KEY, STREAM_KEYS = "api-key api-key-file", "publisher-key-file secret-key-file"
OPTIONS = {
    "serve": f"{ENGINE} allow-untested-model device dtype duration json keep-serving limit model trace",
    "demo": f"{ENGINE} allow-untested-model chats-per-s device dtype json model requests",
    "chat": "dp-size max-tokens model temperature",
    "watch": f"{API_KEY} count duration history json publisher-key-file replay-endpoint secret-key-file topic",
    "doctor": f"{API_KEY} json listen publisher-key-file replay-endpoint secret-key-file timeout topic",
    "conformance": f"{API_KEY} batches block-size json junit listen oracle replay-endpoint timeout topic",
    "relay": f"{API_KEY} block-size host jetstream kv-events-config port {STREAM_KEYS} topic worker",
    "route": f"{API_KEY} allowed-host answer-timeout drain-timeout host max-requests picker poll-interval port"
    f" replica-api-key replica-api-key-file {STREAM_KEYS}",
    "new": "directory",
    "hicache-sim": "attn-cp-size attn-tp-size picture pp-size seeds steps without",
    "dp-attn-sim": "delay-steps dp-size output-tokens prompt-tokens rate requests seed",
    "keygen": "",
}
"""Scripts rely on these names: the changelog names every added or removed one."""


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(command_line: Callable, arguments: list[str], named: str) -> None:
    ran = command_line(*arguments)
    assert ran.code == 2
    assert named in ran.complaint


def test_an_invalid_trace_is_refused_before_the_start(command_line: Callable, tmp_path: Path) -> None:
    ran = command_line("serve", "--trace", str(tmp_path))
    assert ran.code == 2
    assert "starting" not in ran.out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_names_each_of_its_options_and_no_other(command_line: Callable, command: str) -> None:
    ran = command_line(command, "--help")
    assert ran.code == 0
    assert f"scheduler-components {command}" in ran.out
    shown = set(re.findall(r"^│ (?:\*  |   )?--(\S+)", ran.out, re.MULTILINE))
    assert shown == {*OPTIONS[command].split(), "log-level", "log-format"}


def test_without_a_command_the_help_is_shown(command_line: Callable) -> None:
    ran = command_line()
    assert ran.code == 0
    assert all(command in ran.out for command in COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "http://127.0.0.1:1"],
        ["doctor", "tcp://127.0.0.1:1"],
        ["conformance", "tcp://127.0.0.1:1", "--listen", "0.1"],
    ],
)
def test_a_stream_that_does_not_answer_is_exit_code_3(command_line: Callable, arguments: list[str]) -> None:
    ran = command_line(*arguments)
    assert (ran.code, "refused" in ran.out) == (3, True)
    as_json = command_line(*arguments, "--json")
    assert as_json.code == 3
    assert "refused" in str(json.loads(as_json.out))


def test_watching_an_endpoint_that_accepts_no_connection_is_exit_code_3(command_line: Callable) -> None:
    ran = command_line("watch", "tcp://127.0.0.1:1", "--duration", "0.1")
    assert (ran.code, ran.out) == (3, "")
    assert "accepted no connection" in ran.complaint


@pytest.mark.parametrize("command", ["watch", "conformance"])
def test_a_worker_that_does_not_answer_is_exit_code_3_and_one_line(command_line: Callable, command: str) -> None:
    ran = command_line(command, "http://127.0.0.1:1")
    assert (ran.code, ran.out) == (3, "")
    assert "refused" in ran.complaint


def test_a_flag_is_shown_as_a_flag(command_line: Callable) -> None:
    """It takes no value, so none is named behind it, and it has no opposite."""
    shown = command_line("serve", "--help").out
    for flag in ("--hicache", "--keep-serving", "--json"):
        assert re.search(rf"^│ {flag} {{2,}}\S", shown, re.MULTILINE), flag
    assert "--no-" not in shown


def test_a_port_in_use_is_reported_before_the_start(command_line: Callable, free_ports: Callable[[int], int]) -> None:
    port = free_ports(2) + 1
    with socket.create_server(("127.0.0.1", port)):
        ran = command_line("serve", "--port", str(port))
        assert (ran.code, ran.out) == (1, "")
        assert f"127.0.0.1:{port}" in ran.complaint
        for field in ("endpoint", "replay_endpoint", "load_endpoint"):
            config = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "bind": True}
            # The second of the two streams gets the port that is taken.
            config[field] = f"tcp://127.0.0.1:{port - 1}"
            ran = command_line("serve", "--port", "0", "--kv-events-config", json.dumps(config))
            assert (ran.code, ran.out) == (1, "")
            assert f"tcp://127.0.0.1:{port}: is in use" in ran.complaint


@pytest.mark.parametrize(
    ("removed", "instead"),
    [
        ("completion bash", "generate_completion"),
        ("simulate delivery --seeds 9", "make worlds WORLDS='--seeds 1000'"),
        ("refactor carry MOVE BRANCH NEW", "git rebase"),
    ],
)
def test_a_removed_command_names_what_to_use_instead(command_line: Callable, removed: str, instead: str) -> None:
    ran = command_line(*removed.split())
    assert (ran.code, instead in ran.complaint) == (2, True)


def test_keygen_writes_what_the_kit_reads_and_overwrites_nothing(command_line: Callable, tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    made = command_line("keygen", folder, "router-1")
    assert made.code == 0
    public_file, secret_file = (line.split(":", 1)[1].strip() for line in made.out.splitlines())
    assert CurveClientKeys.read(secret_file, public_file).publisher
    again = command_line("keygen", folder, "router-1")
    assert again.code == 2
    assert "has keys in" in again.complaint
    outside = command_line("keygen", folder, "../router")
    assert outside.code == 2
    assert outside.complaint
