"""The engine end to end, at a small size: real processes, sockets and HTTP, verified from outside."""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from kit.command_processes import (
    DEADLINE_S,
    ONE_RANK,
    TWO_BY_TWO,
    TWO_RANKS,
    TWO_REPLICAS,
    finish,
    started,
    wait_for_url,
)
from kit.waiting import wait_until

import scheduler_components
from observability.kv_stream import NullStreamListener, discover, open_subscriber
from scheduler_components import AllBlocksCleared
from scheduler_components.kv_events import DecodedBatch
from scheduler_engine.engine.config import EngineConfig
from scheduler_engine.engine.free_ports import default_kv_events

pytestmark = [pytest.mark.sockets, pytest.mark.processes]


def test_the_demo_passes_its_own_checks() -> None:
    with started("demo", *TWO_BY_TWO, "--requests", "10", "--speed", "8", "--seed", "3") as process:
        code, out, err = finish(process)
    assert (code, err) == (0, "")
    assert "exactly 2 streams for 4 ranks; 2 of 4 candidate ports answer" in out
    assert "10 sent, 10 finished, 0 refused, 0 failed" in out
    assert re.search(r"no gap +ok +[1-9]\d* batches", out)
    assert re.search(r"view equals cache +ok +dp0: [1-9]\d* blocks equal; dp1: [1-9]\d* blocks equal", out)
    assert out.endswith("PASSED\n")


def test_context_parallel_ranks_publish_no_stream_and_json_lines_say_so() -> None:
    """JSON lines have the facts of the text. The demo with HiCache has pipeline stages."""
    sizes = ["--dp-size", "1", "--attn-cp-size", "2", "--attn-tp-size", "1"]
    with started("demo", *sizes, "--requests", "8", "--speed", "8", "--json") as process:
        code, out, err = finish(process)
    assert (code, err) == (0, "")
    printed = [json.loads(line) for line in out.splitlines()]
    by_kind = {each["kind"]: each for each in printed}
    assert by_kind.keys() - {"progress"} == {"note", "ready", "summary", "report"}
    assert by_kind["ready"]["url"].startswith("http://127.0.0.1:")
    assert (by_kind["summary"]["requests"], by_kind["summary"]["finished"], by_kind["summary"]["failed"]) == (8, 8, 0)
    assert by_kind["report"]["passed"] is True
    facts = {check["name"]: check["facts"] for check in by_kind["report"]["checks"]}
    assert facts.keys() >= {"requests", "view equals cache"}
    assert facts["streams"] == "exactly 1 streams for 2 ranks; 1 of 2 candidate ports answer"
    assert printed[-1]["kind"] == "report"


def test_modules_in_the_working_directory_reach_no_rank_of_an_engine_without_publisher(tmp_path: Path) -> None:
    """The command's own script does not look there, and neither may its ranks. No publisher, no check of streams."""
    for name in ("observability", "zmq"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    kit = str(Path(scheduler_components.__file__).parent.parent)
    script = f"import sys; sys.path[0] = {kit!r}; from scheduler_engine.cli.main import main; main()"
    settings = ["--requests", "4", "--speed", "8", "--kv-events-config", '{"publisher": "null"}']
    arguments = [sys.executable, "-c", script, "demo", *ONE_RANK, *settings]
    ran = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.search(r"streams +ok +not checked: ", ran.stdout)


def test_a_stream_too_many_and_a_workload_of_which_nothing_finishes_fail_the_run() -> None:
    """A stranger publishes on the port after the last stream, as a rank without its gate would."""
    engine = EngineConfig(dp_size=1, attn_cp_size=1, attn_tp_size=2)
    config = default_kv_events(engine)
    port = int(config.endpoint.rpartition(":")[2])
    with zmq.Context() as context, context.socket(zmq.PUB) as stranger:
        stranger.bind(f"tcp://127.0.0.1:{port + 1}")
        sizes = [*TWO_RANKS, "--requests", "4", "--speed", "8", "--kv-tokens", "64"]
        with started("demo", *sizes, "--kv-events-config", config.model_dump_json()) as process:
            code, out, _ = finish(process)
    assert code == 1
    assert re.search(r"streams +FAIL .*answer", out)
    assert re.search(r"requests +FAIL", out)
    assert out.endswith("FAILED\n")


def test_a_trace_is_replayed_and_verified(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lengths = [(0, 700, [1, 2]), (0, 5000, list(range(10))), (3000, 900, [1, 3]), (6000, 600, [1, 2])]
    path.write_text(
        "".join(
            json.dumps({"timestamp": ms, "input_length": tokens, "output_length": 6, "hash_ids": hash_ids}) + "\n"
            for ms, tokens, hash_ids in lengths
        )
    )
    with started(
        "serve", *ONE_RANK, "--port", "0", "--trace", str(path), "--speed", "20", "--kv-tokens", "4096"
    ) as process:
        code, out, _ = finish(process)
    assert code == 0
    assert "4 sent, 3 finished, 1 refused, 0 failed" in out
    assert "first refusal" in out
    assert out.endswith("PASSED\n")


def test_a_bad_trace_line_is_one_line_and_exit_code_2(tmp_path: Path, command_line: Callable[..., Any]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\nnonsense\n')
    ran = command_line("serve", *TWO_RANKS, "--port", "0", "--trace", str(path))
    assert (ran.code, ran.out) == (2, ""), "a process was started for a trace that cannot be replayed"
    assert f"{path}:2" in ran.complaint


def test_an_interrupt_ends_an_open_stream_and_stops_everything_without_a_traceback() -> None:
    with started("serve", *TWO_RANKS, "--port", "0") as process:
        url = wait_for_url(process)
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 100_000}, "stream": True}
        with httpx.stream("POST", f"{url}/generate", json=body) as answer:
            lines = answer.iter_lines()
            assert "output_ids" in next(lines)
            process.send_signal(signal.SIGINT)
            *_, error, done = [line for line in lines if line]
        assert "the engine is stopping" in error
        assert done == "data: [DONE]"
        status, _, err = finish(process)
    assert (status, err.count("\n")) == (130, 1)
    assert err.endswith("all processes are stopped\n")


def test_a_running_engine_answers_routers_and_users_and_its_ranks_end_when_it_is_killed(
    eventually: Callable[[Callable[[], object]], None], command_line: Callable[..., Any]
) -> None:
    with started("serve", *TWO_REPLICAS, "--port", "0") as process:
        url = wait_for_url(process)
        assert httpx.get(f"{url}/health").status_code == 200
        answer = httpx.post(f"{url}/generate", json={"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}})
        assert len(answer.json()["output_ids"]) == 4
        info = httpx.get(f"{url}/server_info").json()
        assert info["kv_events"]["dp_size"] == 2
        assert info["kv_events"]["block_size"] == 16
        assert info["tp_size"] == 2
        loads = httpx.get(f"{url}/v1/loads", params={"include": "core,disagg,queues,memory"}).json()
        assert [load["dp_rank"] for load in loads["loads"]] == [0, 1]
        metrics = httpx.get(f"{url}/metrics").text
        assert "sglang:num_running_reqs" in metrics
        assert re.search(r"sglang:time_to_first_token_seconds_count\{.*\} 1\.0", metrics)
        sent = re.compile(r'sglang:output_tokens_sent_total\{.*model_name="simulated-8b".*\} 4\.0')
        eventually(lambda: sent.search(httpx.get(f"{url}/metrics").text))  # the last step's report may be on its way
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "simulated-8b"
        assert httpx.get(f"{url}/get_model_info").json()["is_generation"] is True
        tokens = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 1}}
        assert httpx.post(f"{url}/generate", json=tokens).status_code == 200
        diagnosis = command_line("doctor", url, "--listen", "1")
        assert (diagnosis.code, diagnosis.err) == (0, "")
        assert "ERROR" not in diagnosis.out
        for rank in (0, 1):
            assert re.search(
                rf"OK +rank {rank}: load gauge \S+: 0 running, 0 waiting, 0 of 262144 tokens", diagnosis.out
            )
        watched = command_line("watch", url, "--history", "--json", "--count", "1", "--duration", "20")
        assert any(json.loads(line)["kind"] == "stored" for line in watched.out.splitlines())
        process.kill()
        finish(process)  # returns when the last rank has closed the output that it inherited


@pytest.mark.soak_only
def test_more_connections_than_descriptors_cost_a_line_and_no_service() -> None:
    """Found with 21 MB of tracebacks and 22 s without service."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))  # the engine inherits it
        try:
            process = opened.enter_context(started("serve", *ONE_RANK, "--port", "0"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        url = httpx.URL(wait_for_url(process))
        connections = [socket.create_connection((url.host, url.port or 80), timeout=20) for _ in range(600)]
        assert all(b" 503 " in connection.recv(100) for connection in connections[-100:])
        for connection in connections:
            connection.close()
        wait_until(lambda: httpx.get(url.join("/health"), timeout=20).status_code == 200)
        process.send_signal(signal.SIGINT)
        _, _, err = finish(process)
    assert err.count("\n") < 8, err[:2000]
    assert "accepting HTTP connections failed" in err


class Clears(NullStreamListener):
    """Counts the times at which the publisher says that it holds no block any more."""

    num_clears = 0

    def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
        self.num_clears += sum(isinstance(event, AllBlocksCleared) for event in batch.events)


def test_sigterm_lets_open_requests_end_refuses_others_and_clears_its_stream(tmp_path: Path) -> None:
    """On an engine with keys, which are not in the list of processes."""
    (tmp_path / "key").write_text("client-key\n")
    (tmp_path / "admin").write_text("admin-key\n")
    keys = ["--api-key-file", str(tmp_path / "key"), "--admin-api-key-file", str(tmp_path / "admin")]
    with started("serve", *ONE_RANK, *keys, "--port", "0") as process:
        url = wait_for_url(process)
        assert httpx.get(f"{url}/server_info").status_code == 401
        assert httpx.get(f"{url}/ready").status_code == 200
        key = {"authorization": "Bearer client-key"}
        assert httpx.post(f"{url}/flush_cache", headers=key).status_code == 401
        assert httpx.post(f"{url}/flush_cache", headers={"authorization": "Bearer admin-key"}).status_code == 200
        cross = {"sec-fetch-site": "cross-site", "authorization": "Bearer admin-key"}
        assert httpx.get(f"{url}/release_memory_occupation", headers=cross).status_code == 403
        clears = Clears()
        with (
            open_subscriber(discover(url, api_key="client-key"), listener=clears) as subscriber,
            httpx.Client(base_url=url, headers=key) as other,
        ):
            assert other.get("/v1/models/simulated-8b").json()["object"] == "model"
            body = {
                "input_ids": list(range(64)),
                "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
                "stream": True,
            }
            with httpx.stream("POST", f"{url}/generate", json=body, headers=key) as answer:
                lines = answer.iter_lines()
                assert "output_ids" in next(lines)
                wait_until(lambda: subscriber.blocks(0), poll=lambda: subscriber.poll(0.05))
                num_before = clears.num_clears  # the flush above
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: other.get("/ready").status_code == 503)
                assert other.get("/ready").json()["problem"] == "the engine is stopping"
                assert other.post("/generate", json=body).status_code == 503
                with pytest.raises(httpx.ConnectError):
                    httpx.get(f"{url}/health")
                events = [line for line in lines if line]
            assert events[-1] == "data: [DONE]"
            last = json.loads(events[-2].removeprefix("data: "))["meta_info"]
            assert (last["completion_tokens"], last["finish_reason"]["type"]) == (400, "length")
            wait_until(lambda: clears.num_clears > num_before, poll=lambda: subscriber.poll(0.05))
            assert subscriber.blocks(0) == frozenset()
        status, _, err = finish(process)
    assert (status, err.count("\n")) == (143, 3), "two kinds of refusals were logged once each"
    assert err.endswith("all processes are stopped\n")
    assert "client-key" not in err and "admin-key" not in err
