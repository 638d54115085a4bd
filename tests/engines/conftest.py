"""Fixtures of the tests inside real engines. `make engines` makes an environment per engine and runs the tests there.

A test file begins with ``pytest.importorskip("vllm", reason=...)`` and is skipped where its engine is not installed.
The file's name contains the name of its engine, from which `make engines` chooses the environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from observability import discover
from observability.kv_stream import NoStreamsError, NullStreamListener, StreamState, open_subscriber
from scheduler_components.kv_events import StreamAddress

sys.path.append(str(Path(__file__).parent))  # modules that the tests of one engine share

if find_spec("sglang") and not find_spec("torchvision"):
    # Set before any test imports SGLang. The processes that it starts inherit the variable.
    STAND_INS = str(Path(__file__).parent / "stand_ins")
    sys.path.insert(0, STAND_INS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STAND_INS, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with a random Llama: config, weights and a tokenizer of one word per token.

    2 layers, hidden size 64, 4 heads of 32, 2 KV heads, 1,000 tokens (``w0`` to ``w999``; 0 begins, 1 ends, 2 pads),
    context 2,048, float32. The weights are the same in every run.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny_llama")
    config = LlamaConfig(
        vocab_size=1_000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest size that vLLM's attention supports on CPUs
        max_position_embeddings=2_048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(1_000)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w3"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vllm_events() -> Iterator[Any]:
    """Import ``vllm.distributed.kv_events``. Where vLLM is not installed, its modules are the doubles."""
    if find_spec("vllm"):
        yield import_module("vllm.distributed.kv_events")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent / "doubles"))
        yield import_module("vllm.distributed.kv_events")
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


@pytest.fixture(scope="session")
def engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start one vLLM for all tests, because a start takes about 40 seconds. See ``vllm_in_process``."""
    from vllm_in_process import start_engine

    started = start_engine(tiny_llama, tmp_path_factory.mktemp("s"))
    yield started
    started.scheduler.kv_event_publisher.shutdown()


# Readers of a relay.


class RelayReader(NullStreamListener):
    """A reader of one stream of a relay that records every state of the stream."""

    def __init__(self, url: str) -> None:
        self.states: list[StreamState] = []
        self.subscriber = open_subscriber([self._first_stream(url)], listener=self)

    @staticmethod
    def _first_stream(url: str) -> StreamAddress:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                return discover(url)[0]
            except NoStreamsError:  # the relay has not found its source
                assert time.monotonic() < deadline_s
                time.sleep(0.05)

    def on_state_changed(self, rank: int, old: StreamState, new: StreamState) -> None:
        self.states.append(new)

    @property
    def blocks(self) -> set[int]:
        return self.subscriber.blocks(0)

    def reaches(self, condition: Callable[[StreamState, set[int]], bool]) -> bool:
        """Wait until the stream's state and blocks satisfy the condition."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            if condition(self.subscriber.positions()[0].state, self.blocks):
                return True
            self.subscriber.poll(0.05)
        return False

    def becomes_live_with(self, blocks: set[int]) -> bool:
        """Wait until the stream is live with exactly these blocks."""
        return self.reaches(lambda state, held: state is StreamState.LIVE and held == blocks)


@pytest.fixture
def read_relay() -> Iterator[Callable[[str], RelayReader]]:
    """Return a function that follows the relay at a URL."""
    with contextlib.ExitStack() as stack:

        def start(url: str) -> RelayReader:
            reader = RelayReader(url)
            stack.enter_context(reader.subscriber)
            return reader

        yield start


# SGLang as a server.

PROBES = Path(__file__).parent / "probes"
START_S = 600.0
"""A start took 15 s on a quiet machine and 300 s on a busy one."""


class SglangServer:
    """One `sglang.launch_server` with the tiny model on the CPU and a probe in its schedulers.

    Attributes:
        url: URL of the server.
        events_port: base port of its streams. Replay is at ``events_port + 10``, load at ``events_port + 5``.
        folder: its directory, for temporary files too.
        log: its output so far.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        ports: int,
        *,
        args: tuple[str, ...],
        without: tuple[str, ...] = (),
        forks: SglangForks | None = None,
        **process: Any,
    ) -> None:
        self.url, self.events_port, self.folder = f"http://127.0.0.1:{ports}", ports + 1, folder
        self._log, self._ranks, self._questions = folder / "log", 1, 0
        for size in {"--tp-size", "--dp-size"} & {*args}:
            self._ranks = int(args[args.index(size) + 1])
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{self.events_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.events_port + 10}",
            "bind": True,
            "buffer_steps": 20,
        }
        command = [
            *("--model-path", model, "--device", "cpu"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"),
            *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-tokenizer-init", "--skip-server-warmup"),
            "--sleep-on-idle",  # otherwise an idle server occupies a core
            *("--mem-fraction-static", "0.3", "--max-total-tokens", "2048", "--page-size", "16", "--enable-metrics"),
            *("--host", "127.0.0.1", "--port", str(ports), "--random-seed", "7"),
            *("--load-publish-endpoint", f"tcp://0.0.0.0:{self.events_port + 5}"),
            *("--kv-events-config", json.dumps(events), *args),
        ]
        command = [each for each in command if each not in without]
        (folder / "probe-1.dist-info").mkdir()
        (folder / "probe-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1\n")
        (folder / "probe-1.dist-info" / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nprobe = sglang_probe:load_plugin\n"
            "divergence = sglang_divergence:load_plugin\ncost = sglang_step_cost:load_plugin\n"
        )
        path = os.pathsep.join([str(folder), str(PROBES), os.environ["PYTHONPATH"]])
        own = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "SGLANG_PROBE": str(folder), "SGLANG_PLUGINS": "probe"}
        own["TMPDIR"] = str(folder)  # a killed server leaves its metrics there
        own |= process.pop("env")
        if forks is not None:
            self._log.touch()
            self._process: Any = forks.start(list(map(str, command)), own, [str(folder), str(PROBES)], self._log)
            return
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *map(str, command)],
                **{"stdout": log, "stderr": log, "start_new_session": True, "env": os.environ | own} | process,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_up(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return self.get("/server_info")
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline_s, self.log[-4000:]
                time.sleep(0.2)

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read()

    def generate(self, input_ids: list, max_new_tokens: int = 8, **options: object) -> list:
        """Send all prompts in one request; return the greedy tokens of each."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": input_ids, "sampling_params": sampling, **options}).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return [one["output_ids"] for one in json.load(answer)]

    def post(self, path: str, **body: object) -> None:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        urllib.request.urlopen(request, timeout=60).close()

    def ask(self, prompts: list) -> dict:
        """Return the probe's answer of each (dp rank, tp rank) after all schedulers are idle."""
        self._questions += 1
        name = f"q{self._questions}"
        (self.folder / f"{name}.unfinished").write_text(json.dumps(prompts))
        (self.folder / f"{name}.unfinished").rename(self.folder / f"{name}.question")
        deadline_s = time.monotonic() + 120
        while len(answers := list(self.folder.glob(f"{name}.*.answer"))) < self._ranks:
            assert time.monotonic() < deadline_s, f"{len(answers)} of {self._ranks} ranks answered\n{self.log[-4000:]}"
            time.sleep(0.01)
        return {tuple(map(int, path.stem.split(".")[1:])): json.loads(path.read_text()) for path in answers}

    def wait_until_ended(self) -> None:
        """Wait until the server ends by itself."""
        deadline_s = time.monotonic() + 120
        while self._process.poll() is None:
            assert time.monotonic() < deadline_s, self.log[-4000:]
            time.sleep(0.05)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class ForkedServer:
    """The process of a server that is not a child of the tests."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """Return None while the process is alive."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 1
        return None

    def wait(self) -> None:
        deadline_s = time.monotonic() + 60
        while self.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


class SglangForks:
    """A process that has imported SGLang and forks a server in 3 s, instead of the 15 to 100 s of a start.

    Args:
        env: read when SGLang is imported, so it applies to all servers.
    """

    def __init__(self, env: dict[str, str], **process: Any) -> None:
        path = os.pathsep.join([*map(str, sys.path[:1]), str(Path(__file__).parents[2]), os.environ["PYTHONPATH"]])
        self._process = subprocess.Popen(
            [sys.executable, str(PROBES / "sglang_fork.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **({"env": os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"} | env} | process),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout
        while (line := self._answers.readline()) != "ready\n":
            assert line, "the process that imports SGLang has ended"

    def start(self, args: list[str], env: dict[str, str], path: list[str], log: Path) -> ForkedServer:
        order = {"args": args, "env": env, "path": path, "log": str(log)}
        print(json.dumps(order), file=self._orders, flush=True)
        return ForkedServer(int(self._answers.readline()))

    def stop(self) -> None:
        self._orders.close()
        self._process.wait(60)
        self._answers.close()


@pytest.fixture(scope="module")
def forked_sglang_servers(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, die_with_us: Callable[[], object] | None
) -> Iterator[Callable[..., SglangServer]]:
    """Return a function that starts a server in 3 s: ``start(*arguments, imported=, without=, **environment)``.

    ``imported`` are the variables that SGLang reads when it is imported; each set of them costs one slow start.
    ``without`` are options of ``SglangServer`` to leave away.
    """
    with contextlib.ExitStack() as stack:
        forks: dict[tuple[tuple[str, str], ...], SglangForks] = {}

        def start(
            *args: str, imported: dict[str, str] | None = None, without: tuple[str, ...] = (), **env: str
        ) -> SglangServer:
            imported = imported or {}
            key = tuple(sorted(imported.items()))
            if key not in forks:
                forks[key] = SglangForks(imported, preexec_fn=die_with_us)
                stack.callback(forks[key].stop)
            folder = tmp_path_factory.mktemp("sglang")
            server = SglangServer(
                tiny_llama, folder, _free_block(20), args=args, without=without, forks=forks[key], env=env
            )
            stack.callback(server.stop)
            server.wait_until_up()
            return server

        yield start


@pytest.fixture(scope="module")
def sglang_servers(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, die_with_us: Callable[[], object] | None
) -> Iterator[Callable[..., SglangServer]]:
    """Return a function that starts a server: ``sglang_servers(*arguments, **environment)``.

    All servers stop after the module. Call it on the tests' thread: a server ends with the thread that started it.
    """
    with contextlib.ExitStack() as stack:

        def start(*args: str, **env: str) -> SglangServer:
            folder = tmp_path_factory.mktemp("sglang")
            # The processes that SGLang starts end with this one.
            server = SglangServer(tiny_llama, folder, _free_block(20), args=args, env=env, preexec_fn=die_with_us)
            stack.callback(server.stop)
            server.wait_until_up()
            return server

        yield start


@pytest.fixture(scope="session")
def free_block() -> Callable[[int], int]:
    """Return a function that finds consecutive free ports and returns the lowest."""
    return _free_block


def _free_block(count: int) -> int:
    """Return the first of ``count`` consecutive free ports, below the range of ephemeral ports."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for neighbour in range(port, port + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", neighbour))
            return port
