"""The engine as processes: it serves, its ranks agree, it notices the dead, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from kit.imported_later import ImportedLater
from prometheus_client import CollectorRegistry

from observability.kv_stream import Tier, open_async_subscriber, parse_addresses, parse_worker_url
from scheduler_components import ConfigError, DecodeError
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_components.kv_events import KVEventsConfig
from scheduler_components.load import open_zmq_load_reader
from scheduler_components.values import ReceiverStats
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import (
    EngineConfig,
    EnginePaths,
    HiCacheConfig,
    IntegrityConfig,
    RankConfig,
    SchedulerConfig,
)
from scheduler_engine.engine.engine import Engine, open_engine
from scheduler_engine.engine.free_ports import default_kv_events
from scheduler_engine.engine.http_app import EngineStatus, make_app
from scheduler_engine.engine.messages import (
    FRONTEND_DISPATCHER,
    BlockInput,
    DrainInput,
    UnblockInput,
    pack_tokens,
    unpack_hashes,
)
from scheduler_engine.frontend.errors import (
    EngineFailedError,
    RankSilentError,
    RequestRefusedError,
    TooBusyError,
)
from scheduler_engine.frontend.frontend import GenerateReqInput

openai = ImportedLater("openai", reason="needs openai: pip install scheduler-components[dev]")
httpx2 = ImportedLater("httpx2", reason="openai 3 brings it")

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

SMALL = EngineConfig(
    dp_size=2, attn_cp_size=1, attn_tp_size=2, scheduler=SchedulerConfig(page_size=4, kv_tokens=1024), speed=20.0
)
ONE_REPLICA = attrs.evolve(SMALL, dp_size=1)
ONE_RANK = attrs.evolve(ONE_REPLICA, attn_tp_size=1)


@pytest.fixture
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the engine puts its sockets, empty afterwards; short, since a socket's path has at most 107 bytes."""
    with empty_afterwards() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


@contextmanager
def empty_afterwards() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="sc-") as directory:
        yield directory
        assert list(Path(directory).iterdir()) == []


def run_engine(
    scenario: Callable[[Engine], Awaitable[None]], config: EngineConfig = SMALL, complaints: list[str] | None = None
) -> None:
    async def whole() -> None:
        show = (complaints if complaints is not None else []).append
        async with open_engine(config, show=show) as engine:
            await scenario(engine)
        assert all(rank.process.returncode is not None for rank in engine.ranks)

    asyncio.run(asyncio.wait_for(whole(), timeout=60))


RunScenario = Callable[[Callable[[Engine], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def run_on_shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunScenario]:
    """Run scenarios that leave an engine idle on one engine, because a start costs seconds.

    Its event loop has its own thread, so that the engine receives heartbeats between the scenarios. It is so slow that
    a long request takes seconds: a busy machine acts before its last token.
    """
    with ExitStack() as stack:
        profiles = str(tmp_path_factory.mktemp("profiles"))
        directory = stack.enter_context(empty_afterwards())
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(loop.call_soon_threadsafe, loop.stop)

        def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, timeout=60), loop).result()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", directory)
            config = attrs.evolve(SMALL, speed=1.0, kv_events=default_kv_events(SMALL), profile_directory=profiles)
            opened = open_engine(config, show=lambda _: None)
            engine = run(opened.__aenter__())
        stack.callback(lambda: run(opened.__aexit__(None, None, None)))

        async def leave_idle(scenario: Callable[[Engine], Awaitable[None]]) -> None:
            await scenario(engine)
            await engine.wait_until_idle()

        yield lambda scenario: run(leave_idle(scenario))


def make_request(tokens: range, max_new_tokens: int = 5) -> GenerateReqInput:
    limits = SamplingLimits(max_new_tokens=max_new_tokens)
    return GenerateReqInput(input_ids=pack_tokens(tokens), limits=limits)


async def generate(engine: Engine, request: GenerateReqInput) -> list[int]:
    async with engine.frontend.open_request(request) as stream:
        return [token async for delta in stream for token in delta.output.token_ids]


def test_it_serves_and_all_ranks_of_a_replica_agree(run_on_shared_engine: RunScenario) -> None:
    async def scenario(engine: Engine) -> None:
        requests = [make_request(range(start, start + 40)) for start in range(12)]
        answers = await asyncio.gather(*(generate(engine, request) for request in requests))
        assert all(len(tokens) == 5 for tokens in answers)
        await engine.wait_until_idle()
        dumps = await engine.dump_caches()
        for leader in (0, 2):
            assert unpack_hashes(dumps[leader].block_hashes)
            assert dumps[leader].block_hashes == dumps[leader + 1].block_hashes
            assert dumps[leader].digest == dumps[leader + 1].digest
            assert dumps[leader].step == dumps[leader + 1].step
        assert all(stats.load.num_running_reqs == 0 for stats in engine.stats.read().values())

    run_on_shared_engine(scenario)


def test_all_ranks_end_a_request_at_the_limit_that_its_client_has_set(run_on_shared_engine: RunScenario) -> None:
    """While it runs, and while the engine is paused, so that its ranks take no steps of their own."""

    async def scenario(engine: Engine) -> None:
        app = httpx2.ASGITransport(app=make_app(engine, CollectorRegistry()))
        async with httpx2.AsyncClient(transport=app, base_url="http://localhost") as http:
            client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)

            async def complete(**limits: float) -> Any:
                return await client.completions.create(
                    model="any", prompt=list(range(40)), max_tokens=900, extra_body={**limits, "ignore_eos": True}
                )

            late = await complete(timeout=0.4)
            assert late.choices[0].finish_reason == "timeout"
            assert 0 < late.usage.completion_tokens < 900
            assert (await http.post("/pause_generation", json={"mode": "retract"})).status_code == 200
            try:
                with pytest.raises(
                    openai.InternalServerError, match=r"queue_timeout=0\.2: .* try again later"
                ) as raised:
                    await complete(queue_timeout=0.2)
                assert raised.value.status_code == 503
            finally:
                assert (await http.post("/continue_generation", json={})).status_code == 200
        await engine.wait_until_idle()
        dumps = await engine.dump_caches()
        assert all(dumps[leader].digest == dumps[leader + 1].digest for leader in (0, 2))

    run_on_shared_engine(scenario)


def test_only_the_first_rank_of_each_replica_opens_a_stream(run_on_shared_engine: RunScenario) -> None:
    async def scenario(engine: Engine) -> None:
        ready = engine.frontend.replies.ready
        base = (engine.config.kv_events or KVEventsConfig()).endpoint
        port = int(base.rpartition(":")[2])
        streams = {tp_rank: said.stream_endpoint for tp_rank, said in ready.items()}
        assert streams == {0: base, 1: None, 2: f"tcp://127.0.0.1:{port + 1}", 3: None}

    run_on_shared_engine(scenario)


def test_without_the_option_an_engine_has_no_route_of_its_kv_pool(run_on_shared_engine: RunScenario) -> None:
    async def scenario(engine: Engine) -> None:
        app = httpx.ASGITransport(app=make_app(engine, CollectorRegistry()))
        async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
            assert (await client.get("/kv_pool")).status_code == 404

    run_on_shared_engine(scenario)


def test_every_rank_reads_sets_and_records(run_on_shared_engine: RunScenario) -> None:
    async def scenario(engine: Engine) -> None:
        app = httpx.ASGITransport(app=make_app(engine, CollectorRegistry()))
        async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
            before = (await client.get("/get_internal_state")).json()["internal_states"][0]["chunk_tokens"]
            for value in (8, before):
                response = await client.post("/set_internal_state", json={"server_args": {"chunk_tokens": value}})
                assert response.json() == {"updated": True, "server_args": {"chunk_tokens": value}}
                states = (await client.get("/get_internal_state")).json()["internal_states"]
                assert [state["chunk_tokens"] for state in states] == [value] * 2
            for body in ({"server_args": {"page_size": 8}}, {"chunk_tokens": 8}, []):
                refused = await client.post("/set_internal_state", json=body)
                assert refused.status_code == 400, refused.text
            read_only = await client.put("/set_internal_state", json={"server_args": {"page_size": 8}})
            assert "can be read but not set" in read_only.text
            assert (await client.post("/start_profile", json={"num_steps": 0})).status_code == 400
            started = await client.post("/start_profile", json={"profile_id": "p", "num_steps": 2})
            assert started.status_code == 200, started.text
            assert len(await generate(engine, make_request(range(40), 4))) == 4
            traces = [Path(trace) for trace in (await client.post("/stop_profile")).json()["traces"]]
        assert [trace.name for trace in traces] == ["p-rank0.folded", "p-rank1.folded"]
        assert all("run_rank (process.py:" in trace.read_text() for trace in traces)

    run_on_shared_engine(scenario)


def test_streams_on_ports_of_the_system_are_advertised_and_found(private_tmp: Path) -> None:
    async def scenario(engine: Engine) -> None:
        await generate(engine, make_request(range(64)))
        info = json.loads(json.dumps(EngineStatus(engine=engine).server_info(), default=str))
        addresses = parse_addresses(info, parse_worker_url("http://127.0.0.1:30000"))
        assert len({each.port for at in addresses for each in (at.events, at.replay, at.load) if each}) == 6
        dumps = await engine.dump_caches()
        async with open_async_subscriber(addresses) as reader:
            for rank, address in enumerate(addresses):
                dump = dumps[rank]
                assert address.rank == rank and await reader.wait_until(rank, dump.last_sequence, 20)
                assert reader.blocks(rank) == unpack_hashes(dump.block_hashes)

    anywhere = "tcp://127.0.0.1:0"
    settings = {"endpoint": anywhere, "replay_endpoint": anywhere, "load_endpoint": anywhere, "bind": True}
    config = attrs.evolve(SMALL, attn_tp_size=1, kv_events=json.dumps({"publisher": "zmq"} | settings))
    run_engine(scenario, config)


def test_a_flush_of_an_idle_engine_reaches_its_readers(run_on_shared_engine: RunScenario) -> None:
    """The cache is empty after the flush. A flush with work in flight is refused."""

    async def scenario(engine: Engine) -> None:
        app = httpx.ASGITransport(app=make_app(engine, CollectorRegistry()))
        addresses = parse_addresses(
            dict(EngineStatus(engine=engine).server_info()), parse_worker_url("http://127.0.0.1:1")
        )
        async with (
            httpx.AsyncClient(transport=app, base_url="http://localhost") as client,
            open_async_subscriber(addresses) as reader,
        ):
            await asyncio.gather(*(generate(engine, make_request(range(64))) for _ in range(4)))
            await engine.wait_until_idle()
            before = await engine.dump_caches()
            for rank in (0, 1):
                assert before[2 * rank].block_hashes
                assert await reader.wait_until(rank, before[2 * rank].last_sequence, 20)
            flushed = await client.post("/flush_cache")
            assert (flushed.status_code, flushed.text) == (200, "Cache flushed.\n")
            for rank in (0, 1):
                assert await reader.wait_until(rank, before[2 * rank].last_sequence + 1, 20)
                assert reader.blocks(rank) == frozenset()
            # One for each replica, for many seconds of its device's time.
            asked = [asyncio.ensure_future(generate(engine, make_request(range(64), 900))) for _ in range(2)]
            while not (await engine.dump_caches())[0].block_hashes:
                await asyncio.sleep(0)
            assert (await client.post("/flush_cache")).status_code == 400
            late = await client.post("/flush_cache?timeout=0.05")
            assert late.status_code == 400 and "given up at its deadline: 1 requests run" in late.text
            refused = await client.post("/clear_hicache_storage_backend")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "storage")
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    run_on_shared_engine(scenario)


def test_a_cleared_store_is_empty_reported_and_filled_again(tmp_path: Path, private_tmp: Path) -> None:
    pytest.importorskip("numpy", reason="needs numpy: pip install scheduler-components[hicache]")

    async def scenario(engine: Engine) -> None:
        app = httpx.ASGITransport(app=make_app(engine, CollectorRegistry()))
        addresses = parse_addresses(
            dict(EngineStatus(engine=engine).server_info()), parse_worker_url("http://127.0.0.1:1")
        )
        async with (
            httpx.AsyncClient(transport=app, base_url="http://localhost") as client,
            open_async_subscriber(addresses) as reader,
        ):

            async def stored() -> list[frozenset[int]]:
                """The pages that each rank counts as stored, once the views have received the events."""
                await engine.wait_until_idle()
                dumps = await engine.dump_caches()
                assert await reader.wait_until(0, dumps[0].last_sequence, 20)
                assert reader.blocks(0, Tier.STORAGE) == unpack_hashes(dumps[0].stored_hashes)
                return [unpack_hashes(dumps[tp_rank].stored_hashes) for tp_rank in range(2)]

            async def serve() -> None:
                await asyncio.gather(*(generate(engine, make_request(range(64))) for _ in range(4)))

            await serve()
            full = await stored()
            assert all(full)
            asked = asyncio.ensure_future(generate(engine, make_request(range(64), 400)))
            while engine.frontend.is_idle:
                await asyncio.sleep(0)
            assert (await client.post("/clear_hicache_storage_backend")).status_code == 400
            await asked
            await stored()  # and so no page is on its way
            num_files = sum(path.is_file() for path in (tmp_path / "pages").rglob("*/*"))
            cleared = await client.post("/clear_hicache_storage_backend")
            assert (cleared.status_code, cleared.text) == (200, f"Storage cleared: {num_files} pages.\n")
            assert await stored() == [frozenset()] * 2
            await serve()
            assert all(await stored())

    hicache = HiCacheConfig(host_tokens=1024, storage="file", storage_path=str(tmp_path))
    run_engine(scenario, attrs.evolve(ONE_REPLICA, hicache=hicache, kv_events=default_kv_events(ONE_REPLICA)))


def test_server_info_has_the_kv_metrics_of_each_replica(run_on_shared_engine: RunScenario) -> None:
    async def scenario(engine: Engine) -> None:
        while set(engine.stats.read()) != {0, 1}:
            await asyncio.gather(*(generate(engine, make_request(range(8))) for _ in range(4)))
        metrics = EngineStatus(engine=engine).server_info()["kv_metrics"]
        assert [(each["data_parallel_rank"], each["kv_total_blocks"]) for each in metrics] == [(0, 256), (1, 256)]

    run_on_shared_engine(scenario)


def test_the_advertised_load_gauge_counts_dispatched_requests(run_on_shared_engine: RunScenario) -> None:
    async def scenario(engine: Engine) -> None:
        described = EngineStatus(engine=engine).server_info()["kv_events"]
        base, host = described["load_endpoint_port_base"], described["endpoint_host"]
        with closing(open_zmq_load_reader(f"tcp://{host}:{base + rank}" for rank in range(2))) as reader:
            num_before = sum(load.last_dispatch_ticket for load in engine.frontend.dispatcher.replicas)
            await asyncio.gather(*(generate(engine, make_request(range(8))) for _ in range(4)))
            await engine.wait_until_idle()
            sent = {rank: load.last_dispatch_ticket for rank, load in enumerate(engine.frontend.dispatcher.replicas)}
            assert sum(sent.values()) == num_before + 4
            loads: dict[int, tuple[int, int, int]] = {}
            while loads != {rank: (ticket, 0, 1024) for rank, ticket in sent.items()}:  # two heartbeats at most
                loads = {rank: sample.stat for rank, sample in reader.read(0.1).samples.items()}
                await asyncio.sleep(0)  # lets the test's timeout take effect
                loads = {
                    rank: (
                        dict(load.dispatched_watermarks)[FRONTEND_DISPATCHER],
                        load.num_running_reqs,
                        load.max_total_num_tokens,
                    )
                    for rank, load in loads.items()
                }

    run_on_shared_engine(scenario)


def test_a_draining_engine_takes_no_requests_and_waits_for_open_ones_up_to_its_deadline(
    run_on_shared_engine: RunScenario,
) -> None:
    async def scenario(engine: Engine) -> None:
        async with engine.frontend.open_request(make_request(range(40), 900)) as stream:
            await anext(stream)
            assert await engine.drain(0.0) == 1
            with pytest.raises(TooBusyError, match="is stopping"):
                await generate(engine, make_request(range(40)))
        assert await engine.drain(20.0) == 0, "the aborted request has ended"
        engine.frontend.is_draining = False  # other tests use the engine, too

    run_on_shared_engine(scenario)


def test_a_request_that_can_never_fit_is_refused(run_on_shared_engine: RunScenario) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(RequestRefusedError, match="the pool has 1024"):
            await generate(engine, make_request(range(2000)))
        assert len(await generate(engine, make_request(range(40)))) == 5

    run_on_shared_engine(scenario)


def test_blocked_input_waits_and_a_draining_replica_refuses_requests(private_tmp: Path) -> None:
    """On two ranks that take input in after every fourth decode step."""

    async def scenario(engine: Engine) -> None:
        def counts() -> ReceiverStats:
            stats = next(iter(engine.stats.read().values()), None)
            return ReceiverStats() if stats is None or stats.receiver is None else stats.receiver

        running = asyncio.create_task(generate(engine, make_request(range(40), max_new_tokens=200)))
        await asyncio.sleep(0)  # it is sent now
        engine.frontend.send(0, BlockInput())
        waiting = [asyncio.create_task(generate(engine, make_request(range(start, start + 40)))) for start in range(3)]
        await asyncio.sleep(0)
        async with engine.frontend.open_request(make_request(range(9, 49))):
            pass  # left while it waits: it is answered, and never computed
        while (counts().requests_held, counts().requests_refused) != (3, 1):
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        engine.frontend.send(0, UnblockInput())
        assert [len(tokens) for tokens in await asyncio.gather(*waiting)] == [5, 5, 5]
        assert len(await running) == 200
        engine.frontend.send(0, DrainInput())
        with pytest.raises(TooBusyError, match="this replica is draining"):
            await generate(engine, make_request(range(40)))
        await engine.wait_until_idle()
        first, second = (await engine.dump_caches()).values()
        assert first.digest == second.digest
        assert engine.stats.read()[0].outputs.tokens_sent == 215
        assert (counts().requests_admitted, counts().requests_refused) == (4, 2)
        assert counts().receives_skipped > 0

    sizes = SchedulerConfig(page_size=4, kv_tokens=1024, recv_interval=4)
    run_engine(scenario, attrs.evolve(ONE_REPLICA, scheduler=sizes))


def test_a_closed_request_frees_its_pages(run_on_shared_engine: RunScenario) -> None:
    async def scenario(engine: Engine) -> None:
        async with engine.frontend.open_request(make_request(range(40), max_new_tokens=900)) as stream:
            await anext(stream)
        await engine.wait_until_idle()
        assert all(stats.load.num_used_tokens == 0 for stats in engine.stats.read().values())

    run_on_shared_engine(scenario)


# In the suite, test_http_control.py kills a follower.
@pytest.mark.parametrize("tp_rank", [0, pytest.param(1, marks=pytest.mark.soak_only)])
def test_a_dead_rank_stops_the_engine_and_is_named(private_tmp: Path, tp_rank: int) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(ConfigError, match="--profile-directory"):
            await engine.ask("start_profile")
        os.kill(engine.ranks[tp_rank].process.pid, signal.SIGKILL)
        with pytest.raises(EngineFailedError, match=f"tp{tp_rank}.* was killed by signal 9"):
            await engine.run(asyncio.Event().wait())
        with pytest.raises(EngineFailedError):
            await generate(engine, make_request(range(4)))

    run_engine(scenario, ONE_REPLICA)


def test_a_stopped_rank_is_named_and_serves_again_when_it_continues(run_on_shared_engine: RunScenario) -> None:
    """First the leader of a replica, then a follower."""

    async def stop_and_continue(engine: Engine, client: httpx.AsyncClient, tp_rank: int) -> None:
        assert (await client.get("/health")).status_code == 200
        async with engine.frontend.open_request(make_request(range(40), max_new_tokens=900)) as stream:
            rank = 2 * stream.replica + tp_rank
            name = f"rank dp{stream.replica}/pp0/tp{rank}"
            process = engine.ranks[rank].process
            await anext(stream)
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(RankSilentError, match=rf"^{name}.* no heartbeat for [\d.]+ s$"):
                async for _ in stream:
                    pass
        answer = await client.get("/health")
        assert answer.status_code == 503
        assert name in answer.json()["problem"]
        assert len(await generate(engine, make_request(range(40)))) == 5  # by the other replica
        os.kill(process.pid, signal.SIGCONT)
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.02)
        await engine.wait_until_idle()  # what was given up is over there too
        answers = await asyncio.gather(
            *(generate(engine, make_request(range(start, start + 40))) for start in range(8))
        )
        assert all(len(tokens) == 5 for tokens in answers)

    async def scenario(engine: Engine) -> None:
        heartbeats = engine.frontend.heartbeats
        usual_s, heartbeats.timeout_s = heartbeats.timeout_s, 3.0
        app = make_app(engine, CollectorRegistry())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for tp_rank in (0, 1):
                await stop_and_continue(engine, client, tp_rank)
        heartbeats.timeout_s = usual_s

    run_on_shared_engine(scenario)


def test_a_rank_that_cannot_start_reports_why(private_tmp: Path) -> None:
    async def scenario(engine: Engine) -> None:
        raise AssertionError("it started")

    complaints: list[str] = []
    config = attrs.evolve(ONE_RANK, kv_events='{"publisher": "carrier-pigeon"}')
    with pytest.raises(EngineFailedError, match="carrier-pigeon"):
        run_engine(scenario, config, complaints)
    assert any("carrier-pigeon" in line for line in complaints)


def test_an_exception_of_the_caller_stops_the_engine(private_tmp: Path) -> None:
    async def scenario(engine: Engine) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_engine(scenario, ONE_RANK)


def test_a_configuration_survives_encoding() -> None:
    checks = CheckPolicy(action="dump", count_every_steps=3)
    integrity = IntegrityConfig(checks=checks, owners_one_in=4, follows_events=True, stall_after_s=2.5)
    settings = attrs.evolve(SMALL, kv_events="{}", scheduler=SchedulerConfig(integrity=integrity))
    config = RankConfig(settings, 3, EnginePaths("/tmp/x"))
    assert RankConfig.from_json(config.to_json()) == config
    with pytest.raises(DecodeError):
        RankConfig.from_json(b"{}")


@pytest.mark.parametrize(
    "changes", [{"dp_size": 0}, {"attn_cp_size": -1}, {"attn_tp_size": 0}, {"speed": 0.0}, {"speed": float("inf")}]
)
def test_invalid_sizes_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**changes)
    assert refused.value.field == next(iter(changes))
