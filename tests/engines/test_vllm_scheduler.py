"""ComponentScheduler without an engine, and inside one: its tokens are those of vLLM's own scheduler."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from kit.waiting import wait_until

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus
from vllm_in_process import Engine, prompts, start_engine
from vllm_schedulers import WORKLOADS, PlayedWorker, make_request, open_scheduler, play
from vllm_server import VllmServer

from observability.kv_stream import StreamState, open_subscriber
from scheduler_components import ConfigError
from scheduler_components.engines.vllm import ComponentScheduler
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_components.kv_events import Endpoint, StreamAddress
from scheduler_components.metrics.shm_metrics_board import open_shm_metrics_board
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines_only,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]

EVERY_STEP = CheckPolicy(
    action="raise", count_every_steps=1, locks_every_steps=1, full_check_every_steps=1, is_full_check_in_steps=True
)


def strict(scheduler: ComponentScheduler, *, reserves_output: bool = False) -> ComponentScheduler:
    """Check every page after every step, and, without reserves for output, preempt as often as vLLM does."""
    scheduler.checker.policy = EVERY_STEP
    scheduler.checker.__post_init__()
    if not reserves_output:
        scheduler.batcher.conditions.new_token_ratio = NewTokenRatioTracker(initial=0.0, minimum=0.0)
    return scheduler


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(workload=WORKLOADS)
def test_each_request_ends_with_vllms_tokens(tiny_llama: Path, workload: Any) -> None:
    ours = PlayedWorker(strict(open_scheduler(ComponentScheduler, tiny_llama)))
    theirs = PlayedWorker(open_scheduler(Scheduler, tiny_llama))
    play([step for step in workload if step[0] != "abort"], [ours, theirs], lambda outputs: None)
    assert (ours.tokens, ours.ended) == (theirs.tokens, theirs.ended)
    assert len(ours.scheduler.queues) == 0
    assert ours.scheduler.cache.used_tokens == 0


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(workload=WORKLOADS)
def test_aborts_and_resets_lose_no_page(tiny_llama: Path, workload: Any) -> None:
    ours = PlayedWorker(strict(open_scheduler(ComponentScheduler, tiny_llama), reserves_output=True))
    play(workload, [ours], lambda outputs: None)
    assert ours.scheduler.cache.used_tokens == 0
    assert ours.scheduler.reset_prefix_cache()
    assert ours.scheduler.cache.free_tokens == ours.scheduler.cache.capacity_tokens


def test_the_worker_is_sent_what_changed(tiny_llama: Path) -> None:
    """A new request with its pages, then new pages, and all pages again after a preemption."""
    worker = PlayedWorker(strict(open_scheduler(ComponentScheduler, tiny_llama, num_blocks=5, max_model_len=16)))
    tables: dict[str, list[int]] = {}
    num_resumed = 0
    for rid in ("a", "b"):
        worker.scheduler.add_request(make_request(rid, [ord(rid)] * 5, 8))
    while worker.scheduler.has_requests():
        output = worker.step()
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            assert new.req_id not in tables
            [tables[new.req_id]] = new.block_ids
        for rid, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if rid in cached.resumed_req_ids:
                num_resumed += 1
                tables[rid] = []
            tables[rid] += blocks[0] if blocks else []
        for rid in output.num_scheduled_tokens:
            request = worker.scheduler.queues.find(rid)
            if request is not None:
                assert tables[rid] == request.pages
                assert 0 not in tables[rid], "the null block was given to a request"
    assert num_resumed > 0
    assert worker.ended == {"a": "length", "b": "length"}


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_while_the_worker_computes_loses_only_its_request(tiny_llama: Path, num_steps: int) -> None:
    """In its prefill of two chunks, and in decode. vLLM applies aborts between the worker's end and the update."""
    worker = PlayedWorker(
        strict(open_scheduler(ComponentScheduler, tiny_llama, max_num_batched_tokens=8)), num_in_flight=2
    )
    for rid in ("aborted", "other"):
        worker.scheduler.add_request(make_request(rid, [1] * 12, 4))
    for _ in range(num_steps):
        worker.step()
        worker.update()
    worker.step()  # its tokens are not applied yet
    worker.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    worker.update()
    worker.num_in_flight = 1
    worker.drain()
    assert worker.ended == {"other": "length"}
    assert worker.scheduler.cache.used_tokens == 0


def test_a_pause_holds_requests(tiny_llama: Path) -> None:
    worker = PlayedWorker(strict(open_scheduler(ComponentScheduler, tiny_llama)))
    scheduler = worker.scheduler
    scheduler.add_request(make_request("running", [1] * 5, 4))
    worker.step()
    scheduler.add_request(make_request("waiting", [2] * 5, 4))
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not scheduler.has_requests()
    assert worker.step().total_num_scheduled_tokens == 0
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.get_num_unfinished_requests() == 1
    assert list(worker.step().num_scheduled_tokens) == ["running"]
    scheduler.set_pause_state(PauseState.UNPAUSED)
    worker.drain()
    assert list(worker.ended) == ["running", "waiting"]


def test_a_reset_retracts_running_requests_only_if_asked(tiny_llama: Path) -> None:
    worker = PlayedWorker(strict(open_scheduler(ComponentScheduler, tiny_llama)))
    worker.scheduler.add_request(make_request("a", [1] * 9, 6))
    worker.step()
    assert not worker.scheduler.reset_prefix_cache()
    assert worker.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert list(worker.scheduler.cache.block_hashes()) == []
    assert worker.step().scheduled_cached_reqs.resumed_req_ids == {"a"}
    worker.drain()
    assert len(worker.tokens["a"]) == 6


def test_a_request_for_what_is_not_supported_ends_alone(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = PlayedWorker(strict(open_scheduler(ComponentScheduler, tiny_llama)))
    salted = make_request("salted", [1] * 5, 4)
    salted.cache_salt = "tenant"
    for request in (salted, make_request("plain", [1] * 5, 4)):
        worker.scheduler.add_request(request)
    worker.drain()
    assert worker.ended == {"salted": "error", "plain": "length"}
    assert "request salted asks for a cache salt" in caplog.text


def test_a_request_for_more_than_the_context_ends_with_the_context(tiny_llama: Path) -> None:
    """It would otherwise reserve more pages than the pool has, and block all others for ever."""
    scheduler = strict(open_scheduler(ComponentScheduler, tiny_llama), reserves_output=True)
    worker = PlayedWorker(scheduler)
    for rid in ("a", "b"):
        scheduler.add_request(make_request(rid, [1] * 5, 10**6))
    worker.drain()
    assert worker.ended == {"a": "length", "b": "length"}
    assert {rid: len(tokens) for rid, tokens in worker.tokens.items()} == {"a": 43, "b": 43}


def test_the_policies_are_those_of_the_settings(tiny_llama: Path) -> None:
    chosen = {"policy": "priority", "preemption": "lowest-priority"}
    worker = PlayedWorker(strict(open_scheduler(ComponentScheduler, tiny_llama, max_num_seqs=1, settings=chosen)))
    for rid, priority in (("first", 0), ("late", 5), ("urgent", -5)):
        worker.scheduler.add_request(make_request(rid, [1, 2, 3], 2, priority=priority))
    worker.drain()
    assert list(worker.ended) == ["urgent", "first", "late"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"async_scheduling": True}, "^async_scheduling=.*pass --no-async-scheduling"),
        ({"enable_prefix_caching": False}, "^enable_prefix_caching=.*pass --enable-prefix-caching"),
        ({"sliding_window": 8}, "^kv_cache_groups=.*full attention in each layer"),
        ({"num_blocks": 12}, "^max_model_len=48: is more than the 44 tokens of the pool"),
        ({"settings": {"policy": "fifo"}}, "'fifo'.*fcfs"),
        ({"settings": {"preemption": "oldest"}}, "'oldest'.*latest-arrival"),
        ({"settings": {"checks": "maybe"}}, "'maybe'.*raise"),
        ({"settings": {"policy": 7}}, "^policy=7: is no text"),
        ({"settings": {"police": "fcfs"}}, "^police=.*is not a setting"),
    ],
)
def test_what_is_not_supported_is_one_sentence_at_the_start(
    tiny_llama: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_scheduler(ComponentScheduler, tiny_llama, **options)


# Inside vLLM.

SMALL = {"load_format": "auto", "max_num_batched_tokens": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 33}
"""Prompts are computed in chunks, and requests preempt each other."""


@pytest.fixture(scope="module")
def stock(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A vLLM with its own scheduler."""
    started = start_engine(tiny_llama, tmp_path_factory.mktemp("s"), **SMALL)
    yield started
    started.scheduler.shutdown()


@pytest.fixture(scope="module")
def ours(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A vLLM with ``ComponentScheduler``, whose pages are checked after each step."""
    board = tmp_path_factory.mktemp("board")
    started = start_engine(
        tiny_llama,
        tmp_path_factory.mktemp("c"),
        scheduler_cls="scheduler_components.engines.vllm.ComponentScheduler",
        additional_config={"scheduler_components": {"metrics_directory": str(board), "checks": "raise"}},
        **SMALL,
    )
    started.board = board
    strict(started.scheduler)
    yield started
    started.scheduler.shutdown()


def run_with_aborts(engine: Engine, asked: list[list[int]], aborted: set[int]) -> dict[str, list[int]]:
    """Serve the prompts step by step, and abort some of them after a few steps. Return the tokens of the others."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    inner, tokens = engine.llm.llm_engine, {}
    for number, prompt in enumerate(asked):
        inner.add_request(str(number), {"prompt_token_ids": prompt}, params)
    for step in itertools.count():
        if not inner.has_unfinished_requests():
            return tokens
        if step in (3, 9):
            inner.abort_request([str(number) for number in aborted if number % 2 == (step == 3)])
        for output in inner.step():
            if output.finished and int(output.request_id) not in aborted:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
    raise AssertionError


def test_vllms_worker_computes_stock_tokens(stock: Engine, ours: Engine) -> None:
    """With prefix hits, chunked prefills and preemptions."""
    asked = list(itertools.islice(prompts(seed=1), 40))
    asked += [[7] * 64 + [number] * 250 for number in range(6)]
    assert ours.generate(asked, max_tokens=60) == stock.generate(asked, max_tokens=60)
    counters = ours.scheduler.counters
    assert counters.cached_tokens_total > 300
    assert counters.num_retractions_total > 0
    assert counters.prompt_tokens_total > 40 * 128 > counters.num_requests_total
    assert ours.scheduler.checker.last_report is None
    assert ours.scheduler.cache.used_tokens == 0


def test_aborts_do_not_change_the_tokens_of_others(stock: Engine, ours: Engine) -> None:
    asked = list(itertools.islice(prompts(seed=2), 16))
    aborted = {2, 3, 7, 10}
    expected = run_with_aborts(stock, asked, aborted)
    assert len(expected) == 12
    assert run_with_aborts(ours, asked, aborted) == expected
    assert ours.scheduler.counters.num_aborted_requests_total == 4
    assert ours.scheduler.cache.used_tokens == 0


def test_stop_tokens_and_logprobs_are_those_of_stock(stock: Engine, ours: Engine) -> None:
    from vllm import SamplingParams

    [free] = stock.generate([[5, 6, 7]], max_tokens=20)
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[free[9]], logprobs=2, detokenize=False)
    asked = [{"prompt_token_ids": [5, 6, 7]}]
    [expected], [found] = (each.llm.generate(asked, params, use_tqdm=False) for each in (stock, ours))
    assert list(found.outputs[0].token_ids) == list(expected.outputs[0].token_ids)
    assert (found.outputs[0].finish_reason, found.outputs[0].stop_reason) == ("stop", free[9])
    assert [list(each) for each in found.outputs[0].logprobs] == [list(each) for each in expected.outputs[0].logprobs]
    assert found.num_cached_tokens is not None


def test_a_late_reader_holds_the_pool(ours: Engine) -> None:
    asked = prompts(seed=3)
    config = ours.scheduler.get_kv_event_publisher_config()
    address = StreamAddress(
        rank=0, events=Endpoint.parse(config.endpoint), replay=Endpoint.parse(config.replay_endpoint)
    )
    for _ in range(30):
        ours.generate([next(asked)])
    with open_subscriber([address]) as late:
        for _ in range(5):
            held = set(ours.scheduler.cache.block_hashes())
            wait_until(lambda: late.blocks(0) == held, poll=lambda: late.poll(0.05))  # noqa: B023 - called here
            assert late.positions()[0].state is StreamState.LIVE
            assert held
            ours.generate([next(asked) for _ in range(4)])
        assert ours.llm.reset_prefix_cache()
        wait_until(lambda: late.blocks(0) == set(), poll=lambda: late.poll(0.05))


def test_load_and_metrics_are_reported(ours: Engine) -> None:
    ours.generate([[1, 2, 3]])
    report = open_shm_metrics_board(ours.board, 1).read()[0]
    assert report.counters.num_requests_total == ours.scheduler.counters.num_requests_total > 0
    assert report.load.num_running_reqs == report.load.num_waiting_reqs == 0
    assert report.publisher.batches_sent > 0
    assert (report.integrity.problems, report.integrity.checks_failed) == (0, 0)
    assert report.integrity.censuses > 0


# Behind vLLM's server.


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
    free_block: Callable[[int], int],
    die_with_us: Callable[[], object] | None,
) -> Iterator[VllmServer]:
    chosen = {"scheduler_components": {"policy": "shortest-prefill-first", "checks": "raise"}}
    started = VllmServer(
        tiny_llama,
        tmp_path_factory.mktemp("server"),
        free_block(1),
        *("--scheduler-cls", "scheduler_components.engines.vllm.ComponentScheduler", "--no-async-scheduling"),
        *("--additional-config", json.dumps(chosen), "--enable-prompt-tokens-details"),
        *("--max-num-batched-tokens", "128", "--max-num-seqs", "8"),
        preexec_fn=die_with_us,
    )
    try:
        started.wait_until_up()
        yield started
    finally:
        started.stop()


def words(text: str) -> list[int]:
    """Return the tokens of a text of the tiny model: one word per token."""
    return [int(word) for word in re.findall(r"w(\d+)", text)]


def test_the_openai_client_streams_stock_tokens(server: VllmServer, stock: Engine) -> None:
    """Sixteen streams at a time. Four clients leave after a few tokens."""
    import openai

    asked = list(itertools.islice(prompts(seed=4), 16))
    expected = stock.generate(asked, max_tokens=30)

    async def stream(client: openai.AsyncOpenAI, number: int) -> list[int]:
        text = ""
        answer = await client.completions.create(
            model=server.model, prompt=asked[number], max_tokens=30, temperature=0, stream=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )  # fmt: skip
        async for part in answer:
            text += part.choices[0].text + " "
            if number % 4 == 3 and len(words(text)) >= 3:
                await answer.close()
                break
        return words(text)

    async def stream_all() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300) as client:
            return await asyncio.gather(*(stream(client, number) for number in range(16)))

    found = asyncio.run(stream_all())
    for number, tokens in enumerate(found):
        if number % 4 == 3:
            assert 3 <= len(tokens) < 30
            assert tokens == expected[number][: len(tokens)]
        else:
            assert tokens == expected[number]

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
    again = client.completions.create(model=server.model, prompt=asked[0], max_tokens=2, temperature=0)
    assert again.usage.prompt_tokens_details.cached_tokens >= 32
    running = re.compile(r"^vllm:num_requests_running\{.*\} 0\.0$", re.MULTILINE)
    wait_until(lambda: running.search(server.get("/metrics").decode()))
    assert "is not in the tree" not in server.log
    with pytest.raises(openai.APIStatusError):
        client.completions.create(model=server.model, prompt=asked[0], extra_body={"cache_salt": "tenant"})
    assert client.completions.create(model=server.model, prompt=asked[1], max_tokens=2, temperature=0).choices
