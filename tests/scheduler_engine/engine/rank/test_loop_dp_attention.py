"""Replicas that take every step together: sleeping ones wake, dead ones are named, and outputs do not change."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias
from zlib import crc32

import attrs
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rid_model import RidModel
from kit.waiting import wait_until

from scheduler_components import ConfigError, LoadPublisher, ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.agreement.rank_groups import RankGroups
from scheduler_components.internal_state import InternalState
from scheduler_components.profiler_manager import ProfilerManager
from scheduler_components.quiesce import QuiesceState
from scheduler_components.receiving.zmq_input_relay import (
    IdleSleeper,
    StopRequestedError,
    WaitForSocket,
    ZmqInputSource,
)
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.scheduling.dp_attn import DpBatchSync, dp_rank_groups
from scheduler_components.testing import ListOutputSink
from scheduler_engine.cli.engine_commands import EngineOptions, HiCacheOptions, engine_config
from scheduler_engine.device.device import SimulatedDevice, SimulatedModel
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import (
    DpAttentionConfig,
    EngineConfig,
    EnginePaths,
    RankConfig,
    SchedulerConfig,
)
from scheduler_engine.engine.engine import Engine, open_engine
from scheduler_engine.engine.messages import RankHeartbeat, SubmitRequest, encode, pack_tokens
from scheduler_engine.engine.rank.frontend_sinks import ZmqReportSender
from scheduler_engine.engine.rank.heartbeat import HeartbeatSender, StopPipe
from scheduler_engine.engine.rank.loop import CommandDecoder, Leader, RankWorker
from scheduler_engine.engine.rank.quiescable_scheduler import make_quiesce_stepper
from scheduler_engine.engine.rank.rpc_handler import RpcHandler
from scheduler_engine.engine.rank.zmq_sync import ZmqSyncHub, open_zmq_sync_hub
from scheduler_engine.engine.scheduler.scheduler import Scheduler
from scheduler_engine.frontend.errors import EngineFailedError
from scheduler_engine.frontend.frontend import GenerateReqInput

pytestmark = [pytest.mark.sockets, pytest.mark.processes]

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]

MODEL = RidModel(vocab_size=50)


# --- the bell ---


class RankSockets:
    """Sockets of ranks in one process, all closed in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context: Context = zmq.Context()
        self.kept: list[zmq.Socket[bytes]] = []

    def pipe(self, name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A PUSH and the PULL that reads it."""
        push, pull = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.kept += (push, pull)
        pull.bind(f"ipc://{self.folder / name}")
        push.connect(f"ipc://{self.folder / name}")
        return push, pull

    def hub(
        self, rank: int, reduce_groups: RankGroups, wait_for: WaitForSocket | None = None, timeout_s: float = 30.0
    ) -> ZmqSyncHub:
        hub = open_zmq_sync_hub(
            self.context,
            rank=rank,
            reduce_groups=reduce_groups.reduce_groups,
            address_of=lambda peer: f"ipc://{self.folder / f'dp-{peer}'}",
            wait_for=wait_for or _wait,
            timeout_s=timeout_s,
        )
        self.kept += (hub.inbox, *hub.peers.values())
        return hub

    def close(self) -> None:
        self.context.destroy(linger=0)


def _wait(socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
    socket.poll(timeout_ms, event)
    return True


@contextmanager
def open_sockets() -> Iterator[RankSockets]:
    with tempfile.TemporaryDirectory(prefix="sc-") as folder:  # short: a socket's path has at most 107 bytes
        sockets = RankSockets(Path(folder))
        try:
            yield sockets
        finally:
            sockets.close()


@pytest.fixture
def sockets() -> Iterator[RankSockets]:
    with open_sockets() as opened:
        yield opened


def open_hubs(sockets: RankSockets, size: int, timeout_s: float = 30.0) -> list[ZmqSyncHub]:
    return [sockets.hub(rank, RankGroups(rank=rank, tp=range(size)), timeout_s=timeout_s) for rank in range(size)]


def test_a_peer_is_waiting_from_its_first_vector_until_the_collective_ends(sockets: RankSockets) -> None:
    hubs = open_hubs(sockets, 2)
    all_groups = [hub.parallel_groups(((0, 1),)) for hub in hubs]
    assert not any(hub.is_peer_waiting() for hub in hubs)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(all_groups[0].all_reduce_min, "step", 5, step=1)
        assert hubs[1].inbox.poll(10_000)
        assert hubs[1].is_peer_waiting()
        assert all_groups[1].all_reduce_min("step", 3, step=1) == 3
        assert first.result() == 3
    assert not any(hub.is_peer_waiting() for hub in hubs)


def test_an_early_vector_of_the_next_step_wakes_the_leader(sockets: RankSockets) -> None:
    """Rank 2 receives a vector of step 2 from rank 0 while it waits for rank 1 in step 1. No socket wakes it again."""
    hubs = open_hubs(sockets, 3)
    all_groups = [hub.parallel_groups(((0, 1, 2),)) for hub in hubs]
    late, waiting = sockets.pipe("late")
    direct, hubs[1].peers[2] = hubs[1].peers[2], late
    with ThreadPoolExecutor(3) as threads:
        first = [threads.submit(groups.all_reduce_min, "step", rank, step=1) for rank, groups in enumerate(all_groups)]
        assert first[0].result() == first[1].result() == 0
        again = threads.submit(all_groups[0].all_reduce_min, "step", 7, step=2)
        wait_until(lambda: len(hubs[2]._vectors) == 2)  # the vectors of both steps have arrived
        direct.send(waiting.recv())
        assert first[2].result() == 0
        assert hubs[2].is_peer_waiting()
        hubs[1].peers[2] = direct
        rest = [threads.submit(all_groups[rank].all_reduce_min, "step", 8, step=2) for rank in (1, 2)]
        assert [each.result() for each in (again, *rest)] == [7, 7, 7]
    assert not any(hub.is_peer_waiting() for hub in hubs)


# --- leaders, on threads ---


class LeaderThread:
    """One replica of one rank: its leader's loop on a thread."""

    def __init__(self, sockets: RankSockets, rank: int, size: int) -> None:
        parallel = ParallelState.from_tp_rank(rank, tp_size=size, attn_dp_size=size)
        self._stop_reader, self._stop_writer = os.pipe()
        self.commands, pull = sockets.pipe(f"commands-{rank}")
        reports = ZmqReportSender(socket=sockets.pipe(f"reports-{rank}")[0])
        alive, stop = RankHeartbeat(str(parallel), rank), StopPipe(self._stop_reader)
        heartbeat = HeartbeatSender(alive=alive, reports=reports, stop=stop)
        hub = sockets.hub(rank, dp_rank_groups(parallel), heartbeat.wait)
        reduce_groups = dp_rank_groups(parallel).reduce_groups
        self.dp = DpBatchSync(groups=hub.parallel_groups(reduce_groups), replica=rank, num_replicas=size)
        self.outputs, state, profiles = ListOutputSink(), QuiesceState(), ProfilerManager()
        self.scheduler = Scheduler.compose(
            SchedulerConfig(page_size=4, kv_tokens=512),
            parallel,
            SimulatedDevice(model=MODEL, sleep=lambda _: None),
            sinks=SchedulerSinks(outputs=self.outputs),
            quiesce=state,
            dp=self.dp,
        )
        internal = InternalState(providers=(self.scheduler.settings,))
        self.leader = Leader(
            worker=RankWorker(
                parallel=parallel,
                scheduler=self.scheduler,
                reports=reports,
                rpc=RpcHandler(state=internal, profiles=profiles, sessions=self.scheduler.sessions),
                quiesce=make_quiesce_stepper(self.scheduler, state, groups=ParallelGroups(rank=rank)),
            ),
            receiver=RequestReceiver(rank=str(parallel), reader=CommandDecoder(), source=ZmqInputSource(socket=pull)),
            sleeper=IdleSleeper([pull, hub.inbox], [self._stop_reader]),
            heartbeat=heartbeat,
            load_publisher=LoadPublisher(parallel=parallel, load=self.scheduler.load),
            is_peer_waiting=hub.is_peer_waiting,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(StopRequestedError):
            self.leader.run()

    def submit(self, rid: str, num_tokens: int, max_new_tokens: int) -> None:
        first = 1_000 * int(rid)  # no two prompts share a prefix
        tokens = pack_tokens(range(first, first + num_tokens))
        self.commands.send(encode(SubmitRequest(rid, tokens, SamplingLimits(max_new_tokens=max_new_tokens), 1, 1)))

    @property
    def num_ended(self) -> int:
        return sum(delta.finish_reason is not None for delta in self.outputs.deltas)

    def request_stop(self) -> None:
        os.close(self._stop_writer)

    def close(self) -> None:
        self._thread.join()
        os.close(self._stop_reader)


class Arrival(NamedTuple):
    replica: int
    num_prompt: int
    num_new: int
    is_waited_for: bool


def serve(arrivals: list[Arrival], size: int) -> list[LeaderThread]:
    """Send each request to its replica and return the replicas after their end."""
    with open_sockets() as sockets:
        replicas = [LeaderThread(sockets, rank, size) for rank in range(size)]
        try:
            for number, arrival in enumerate(arrivals):
                replicas[arrival.replica].submit(str(number), arrival.num_prompt, arrival.num_new)
                if arrival.is_waited_for or number == len(arrivals) - 1:
                    wait_until(lambda: sum(each.num_ended for each in replicas) == number + 1)  # noqa: B023
            wait_until(lambda: not any(each.dp.last.any_work for each in replicas))
            wait_until(lambda: len({each.dp.groups.num_calls for each in replicas}) == 1)
        finally:
            for each in replicas:
                each.request_stop()
            for each in replicas:
                each.close()
    return replicas


arrivals_at = st.builds(Arrival, st.integers(0, 2), st.integers(1, 60), st.integers(1, 8), st.booleans())


@settings(max_examples=20)
@given(st.lists(arrivals_at, min_size=1, max_size=8))
def test_a_replica_with_work_wakes_all_and_all_take_the_same_steps(arrivals: list[Arrival]) -> None:
    replicas = serve(arrivals, 3)
    outputs = {delta.rid: list[int]() for each in replicas for delta in each.outputs.deltas}
    for delta in (delta for each in replicas for delta in each.outputs.deltas):
        outputs[delta.rid] += delta.output.token_ids
    for number, arrival in enumerate(arrivals):
        first = arrival.num_prompt
        assert outputs[str(number)] == [MODEL.next_token(str(number), first + at) for at in range(arrival.num_new)]
    assert len({each.dp.stats.steps for each in replicas}) == 1
    own = [sum(each.num_prompt + each.num_new - 1 for each in arrivals if each.replica == at) for at in range(3)]
    longest = {each.dp.stats.padded_tokens + mine for each, mine in zip(replicas, own, strict=True)}
    assert len(longest) == 1, "the sum over all steps of the longest batch, as each replica heard it"
    for each, mine in zip(replicas, own, strict=True):
        assert mine or each.dp.stats.idle_batches == each.dp.stats.steps


# --- processes ---

SMALL = EngineConfig(
    dp_size=2,
    attn_cp_size=1,
    attn_tp_size=2,
    scheduler=SchedulerConfig(page_size=4, kv_tokens=8192),
    speed=20.0,
    dp_attention=DpAttentionConfig(max_delay_steps=4),
)


async def generate(engine: Engine, rid: str, num_prompt: int, num_new: int) -> list[int]:
    asked = GenerateReqInput(
        rid=rid, input_ids=pack_tokens(range(num_prompt)), limits=SamplingLimits(max_new_tokens=num_new)
    )
    async with engine.frontend.open_request(asked) as stream:
        return [token async for delta in stream for token in delta.output.token_ids]


def dp_counts(engine: Engine) -> list[tuple[int, int, int]]:
    """Steps, idle batches, and positions of the longest batches, as each replica counts them."""
    counts = []
    for stats in engine.stats.read().values():
        totals, batching = stats.counters, stats.batching
        assert batching is not None
        own = totals.prompt_tokens_total - totals.cached_tokens_total
        own += totals.generation_tokens_total - totals.num_requests_total
        counts.append((batching.dp_steps, batching.dp_idle_batches, batching.dp_padded_tokens + own))
    return counts


def test_processes_agree_on_shapes_and_fail_together_naming_the_dead_rank() -> None:
    async def scenario(engine: Engine) -> None:
        lengths = [(f"r{number}", 40 + 90 * (number % 3), 3 + 5 * (number % 4)) for number in range(8)]
        served = await asyncio.gather(*(generate(engine, *each) for each in lengths))
        for (_, first, num_new), tokens in zip(lengths, served, strict=True):
            source = crc32(pack_tokens(range(first)))
            assert tokens == [SimulatedModel().next_token(source, first + at) for at in range(num_new)]
        await generate(engine, "alone", 300, 20)  # one replica has nothing to compute
        await engine.wait_until_idle()
        while len({(steps, longest) for steps, _, longest in dp_counts(engine)}) > 1:
            await asyncio.sleep(0.01)  # a replica may still write what it counted in the last step
        assert sum(idle for _, idle, _ in dp_counts(engine)) >= 20
        dumps = await engine.dump_caches()
        assert dumps[0].digest == dumps[1].digest and dumps[2].digest == dumps[3].digest

        running = [asyncio.ensure_future(generate(engine, f"long-{at}", 10, 6000)) for at in range(2)]
        while not all(stats.load.num_running_reqs for stats in engine.stats.read().values()):
            await asyncio.sleep(0.01)
        os.kill(engine.ranks[3].process.pid, signal.SIGKILL)
        for each in running:
            with pytest.raises(EngineFailedError, match=r"rank dp1/pp0/tp3.* was killed by signal 9"):
                await each

    async def whole() -> None:
        async with open_engine(SMALL, show=lambda _: None) as engine:
            await scenario(engine)

    asyncio.run(asyncio.wait_for(whole(), timeout=90))


# --- what an operator gives ---


def test_the_options_of_dp_attention_reach_a_rank() -> None:
    config = RankConfig(SMALL, 1, EnginePaths("x"))
    assert RankConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("dp_size", lambda: attrs.evolve(SMALL, dp_size=1)),
        ("max_delay_steps", lambda: DpAttentionConfig(max_delay_steps=-1)),
        ("low_usage", lambda: DpAttentionConfig(low_usage=2.0)),
        ("prefill_delay_steps", lambda: engine_config(EngineOptions(prefill_delay_steps=3), HiCacheOptions())),
        (
            "prefill_delay_low_usage",
            lambda: engine_config(EngineOptions(prefill_delay_low_usage=0.5), HiCacheOptions()),
        ),
    ],
)
def test_an_invalid_value_is_refused_by_name(field: str, make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as refusal:
        make()
    assert refusal.value.field == field


def test_the_options_reach_the_engine() -> None:
    options = EngineOptions(dp_attention=True, prefill_delay_steps=30, prefill_delay_low_usage=0.1)
    assert engine_config(options, HiCacheOptions()).dp_attention == DpAttentionConfig(max_delay_steps=30, low_usage=0.1)
    assert engine_config(EngineOptions(), HiCacheOptions()).dp_attention is None
