"""Writer and reader of a log against a real server: crashes, pauses, slow readers, retries, retention, forgeries."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import pytest
from kit.follow_policies import SOON_AGAIN
from kit.jetstream import config_of

from observability.jetstream import (
    JetStreamConfig,
    LogAddress,
    log_writer,
    nats_writer,
    open_jetstream_subscriber,
    open_jetstream_writer,
)
from observability.kv_stream import FollowPolicy, StreamState
from observability.kv_stream.log_records import LogHeartbeat

pytestmark = [pytest.mark.sockets, pytest.mark.processes, pytest.mark.faults]

WORKER = "http://pod-1:30000"
HERE = LogAddress(WORKER, 0, "kv@pod")


def write(config: JetStreamConfig) -> Any:
    return open_jetstream_writer(config, WORKER, topic="kv@pod")


def read(config: JetStreamConfig, *addresses: LogAddress, policy: FollowPolicy = SOON_AGAIN) -> Any:
    return open_jetstream_subscriber(config, addresses or (HERE,), policy=policy)


def run_with_client(config: JetStreamConfig, work: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    """Run ``use`` with a separate client."""

    async def run() -> Any:
        client = await nats.connect(list(config.servers))
        try:
            return await work(client, client.jetstream())
        finally:
            await client.close()

    return asyncio.run(run())


def log_state(config: JetStreamConfig) -> Any:
    async def work(client: Any, js: Any) -> Any:
        return (await js.stream_info(HERE.log)).state

    return run_with_client(config, work)


def test_no_batch_is_missing_after_a_server_was_killed(
    nats_server: Any, feed: Any, wait_for_whole: Any, poll_until: Any, eventually: Any
) -> None:
    config = config_of(nats_server)
    with write(config) as writer, read(config) as reader:
        feeder = feed(writer.sink(0))
        feeder.churn(50)
        wait_for_whole(reader, feeder)
        nats_server.kill()
        poll_until(reader, lambda: reader.stats()[0].state is StreamState.CONNECTING)
        eventually(lambda: not writer.stats()[0].is_connected)
        feeder.churn(50)
        assert writer.stats()[0].waiting == 50
        nats_server.start()
        wait_for_whole(reader, feeder)
        assert writer.stats()[0].broker_losses == 1
        assert reader.stats()[0].disconnects == 1
        assert reader.stats()[0].snapshots == 1  # resumed by number, without another snapshot


def test_an_unreachable_broker_costs_bounded_memory_and_one_log_line(
    free_server: Any, feed: Any, wait_for_whole: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(free_server)
    with caplog.at_level(logging.INFO, "observability.jetstream"), write(config) as writer, read(config) as reader:
        sink = writer.sink(0)
        feeder = feed(sink)
        feeder.churn(3_000)
        stats = sink.stats()
        assert stats.batches_buffered == 1_024
        assert stats.blocks_in_base > 0
        free_server.start()
        wait_for_whole(reader, feeder)
        assert writer.stats()[0].collapsed == 3_000
        away = [record.getMessage() for record in caplog.records if "is unreachable" in record.getMessage()]
        assert len(away) == 2  # one of the writer, one of the reader
        assert all(free_server.url in sentence for sentence in away)


def test_a_broker_that_lost_its_store_gets_the_state_again(
    nats_server: Any, feed: Any, wait_for_whole: Any, eventually: Any
) -> None:
    config = config_of(nats_server)
    with write(config) as writer, read(config) as reader:
        feeder = feed(writer.sink(0))
        feeder.churn(50)
        wait_for_whole(reader, feeder)
        nats_server.kill()
        shutil.rmtree(nats_server.folder / "store")
        nats_server.start()
        feeder.churn(10)
        wait_for_whole(reader, feeder)
        with read(config) as late:
            wait_for_whole(late, feeder)


async def delete_pointer_bucket(js: Any) -> None:
    await js.delete_key_value(HERE.pointer_bucket)


async def delete_snapshot_bucket(js: Any) -> None:
    await js.delete_object_store(HERE.snapshot_bucket)


async def delete_both_buckets(js: Any) -> None:
    await delete_pointer_bucket(js)
    await delete_snapshot_bucket(js)


async def delete_pointer(js: Any) -> None:
    await (await js.key_value(HERE.pointer_bucket)).delete(HERE.pointer_key)


async def delete_snapshots(js: Any) -> None:
    bucket = await js.object_store(HERE.snapshot_bucket)
    for each in await bucket.list():
        await bucket.delete(each.name)


async def delete_log(js: Any) -> None:
    await js.delete_stream(HERE.log)


@pytest.mark.parametrize(
    "delete",
    [delete_pointer_bucket, delete_snapshot_bucket, delete_both_buckets, delete_pointer, delete_snapshots, delete_log],
)
def test_what_is_deleted_from_a_connected_broker_is_stored_again(
    delete: Callable[[Any], Awaitable[None]],
    nats_server: Any,
    feed: Any,
    wait_for_whole: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that joins afterwards is LIVE, and so is the one that followed meanwhile."""
    monkeypatch.setattr(log_writer, "REQUEST_PAUSE_S", 0.1)
    config = config_of(nats_server)
    with write(config) as writer, read(config) as reader:
        feeder = feed(writer.sink(0))
        feeder.churn(50)
        wait_for_whole(reader, feeder)
        run_with_client(config, lambda _, js: delete(js))
        feeder.churn(10)
        with read(config) as late:
            wait_for_whole(late, feeder)
        feeder.churn(10)
        wait_for_whole(reader, feeder)
        assert not writer.stats()[0].is_superseded


def test_retention_drops_only_messages_that_the_snapshot_covers(
    nats_server: Any, feed: Any, wait_for_whole: Any
) -> None:
    config = config_of(nats_server, max_msgs=16)
    with write(config) as writer, read(config) as reader:
        feeder = feed(writer.sink(0))
        for _ in range(20):
            feeder.churn(10)
            wait_for_whole(reader, feeder)
        assert log_state(config).messages <= 16
        assert writer.stats()[0].bases >= 200 // 16
        with read(config) as late:
            wait_for_whole(late, feeder)
            assert late.stats()[0].snapshots == 1


def test_a_slow_reader_reads_the_snapshot_after_the_log_has_passed_it(
    nats_server: Any, feed: Any, wait_for_whole: Any, eventually: Any
) -> None:
    config = config_of(nats_server, max_msgs=64)
    with write(config) as writer, read(config) as reader:
        feeder = feed(writer.sink(0))
        feeder.churn(10)
        wait_for_whole(reader, feeder)
        for _ in range(4):
            feeder.churn(500)  # without polling
            eventually(lambda: not writer.stats()[0].waiting)
        wait_for_whole(reader, feeder)
        assert not reader.stats()[0].decode_errors


def test_a_reader_that_polls_late_has_every_message_of_a_large_log(
    nats_server: Any, feed: Any, wait_for_whole: Any, eventually: Any
) -> None:
    """Messages beyond the inbox wait at the broker, and are read in order without another snapshot."""
    config = config_of(nats_server)
    with write(config) as writer, read(config) as reader:
        feeder = feed(writer.sink(0))
        feeder.churn(1)
        wait_for_whole(reader, feeder)
        for _ in range(10):
            feeder.churn(500)
            eventually(lambda: not writer.stats()[0].waiting)
        assert writer.stats()[0].stored + writer.stats()[0].collapsed == feeder.num_batches
        wait_for_whole(reader, feeder)
        assert reader.stats()[0].last_seq == feeder.num_batches - 1
        assert reader.stats()[0].snapshots == 1


def test_a_retried_message_is_stored_once(
    nats_server: Any, feed: Any, wait_for_whole: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server pauses beyond the acknowledgement timeout, and receives each message twice."""
    monkeypatch.setattr(nats_writer, "ACK_TIMEOUT_S", 0.2)
    config = config_of(nats_server)
    with write(config) as writer, read(config) as reader:
        feeder = feed(writer.sink(0))
        feeder.churn(1)
        wait_for_whole(reader, feeder)
        eventually(lambda: writer.stats()[0].bases)  # no batch is sent before the first snapshot
        nats_server.freeze()
        try:
            feeder.churn(20)
            eventually(lambda: writer.stats()[0].failures)
        finally:
            nats_server.thaw()
        eventually(lambda: not writer.stats()[0].waiting)
        assert writer.stats()[0].retried
        wait_for_whole(reader, feeder)
        in_log = 21 - writer.stats()[0].collapsed  # the snapshot may have the first ones
        assert log_state(config).messages <= in_log


def test_messages_of_the_epoch_before_a_restart_are_fenced_off(
    nats_server: Any, feed: Any, wait_for_whole: Any
) -> None:
    config = config_of(nats_server)
    with write(config) as writer, read(config) as reader:
        sink = writer.sink(0)
        feeder = feed(sink)
        feeder.churn(20)
        wait_for_whole(reader, feeder)
        sink.start_epoch()
        again = feed(sink)
        again.store(7)
        wait_for_whole(reader, again)
        assert reader.stats()[0].restarts == 1
        assert reader.stats()[0].last_seq == 0
        with read(config) as late:
            wait_for_whole(late, again)


def test_a_second_writer_takes_over_and_the_first_stops(
    nats_server: Any, feed: Any, wait_for_whole: Any, poll_until: Any
) -> None:
    config = config_of(nats_server, max_msgs=16)
    with write(config) as first, read(config) as reader:
        old = feed(first.sink(0))
        old.churn(5)
        wait_for_whole(reader, old)
        with write(config) as second:
            new = feed(second.sink(0))
            new.store(7)
            wait_for_whole(reader, new)
            poll_until(reader, lambda: first.stats()[0].is_superseded)
            assert not second.stats()[0].is_superseded
            old.churn(20)
            new.store(8)
            wait_for_whole(reader, new)
            assert reader.stats()[0].restarts == 1


def test_hostile_messages_are_counted_and_skipped(
    nats_server: Any, feed: Any, wait_for_whole: Any, poll_until: Any
) -> None:
    config = config_of(nats_server)
    with write(config) as writer, read(config) as reader:
        sink = writer.sink(0)
        feeder = feed(sink)
        feeder.churn(20)
        wait_for_whole(reader, feeder)
        epoch = reader._streams[0].follower.cursor.epoch.hex()
        headers: list[dict[str, str] | None] = [
            None,
            {"Nats-Msg-Id": "x"},
            {"Nats-Msg-Id": f"{epoch}-20"},
            {"Nats-Msg-Id": f"{epoch}-99999999999999999999", "Kv-Chain": "0" * 16},
            {"Nats-Msg-Id": f"{epoch}-020", "Kv-Chain": "0" * 16},
            {"Nats-Msg-Id": f"{'f' * 32}-20", "Kv-Chain": "0" * 16},
            {"Nats-Msg-Id": f"{epoch}-0-forged", "Kv-Chain": "0" * 16},
            {"Nats-Msg-Id": f"{epoch}-25", "Kv-Chain": "0" * 16},
            {"Nats-Msg-Id": f"{epoch}-20 ", "Kv-Chain": "\u00e4"},
        ]
        heartbeats = [
            b"",
            b"junk",
            b"\xc1",
            LogHeartbeat(b"e" * 15, 1, b"c" * 8, 0).encode(),
            LogHeartbeat(b"e" * 16, 1, b"c" * 8, 9).encode(),
        ]

        async def work(client: Any, js: Any) -> None:
            for each in headers:
                await js.publish(HERE.subject, b"\x93\xca junk", headers=each)
            for heartbeat in heartbeats:
                await client.publish(HERE.heartbeat_subject, heartbeat)
            await client.flush()

        run_with_client(config, work)
        states = []
        poll_until(reader, lambda: states.append(reader.stats()[0].state) or reader.stats()[0].bad_frames >= 11)
        assert set(states) == {StreamState.LIVE}
        feeder.churn(20)
        wait_for_whole(reader, feeder)
        stats = reader.stats()[0]
        assert (stats.last_seq, stats.decode_errors) == (39, 0)
        assert stats.snapshots == 2  # two ids were already used: their batches went by a snapshot
        with read(config) as late:
            wait_for_whole(late, feeder)


def test_a_stopped_writer_is_dead_after_a_while(
    nats_server: Any, feed: Any, wait_for_whole: Any, poll_until: Any
) -> None:
    config = config_of(nats_server)
    policy = FollowPolicy(answer_timeout_s=1.0, retry_min_s=0.05, retry_max_s=0.5, dead_after_s=0.5)
    writer = write(config)
    with read(config, policy=policy) as reader:
        feeder = feed(writer.sink(0))
        feeder.churn(20)
        wait_for_whole(reader, feeder)
        writer.close()
        poll_until(reader, lambda: reader.stats()[0].state is StreamState.DEAD)
        assert not reader.blocks(0)
        with write(config) as successor:
            again = feed(successor.sink(0))
            again.store(1)
            wait_for_whole(reader, again)


def test_a_stream_with_an_upstream_state_is_partial(
    nats_server: Any, feed: Any, wait_for_whole: Any, poll_until: Any
) -> None:
    config = config_of(nats_server)
    with write(config) as writer, read(config) as reader:
        sink = writer.sink(0)
        sink.set_upstream_state("partial")
        feeder = feed(sink)
        feeder.store(1)
        poll_until(reader, lambda: reader.stats()[0].state is StreamState.PARTIAL)
        assert reader.blocks(0) == {1}
        sink.set_upstream_state(None)
        wait_for_whole(reader, feeder)
        sink.set_upstream_state("recovering")
        poll_until(reader, lambda: reader.stats()[0].state is StreamState.PARTIAL)


def test_ranks_are_streams_of_one_log(nats_server: Any, feed: Any, wait_for_whole: Any) -> None:
    config = config_of(nats_server, max_bytes=65_536)
    addresses = [LogAddress(WORKER, rank, "kv@pod") for rank in range(2)]
    with write(config) as writer, read(config, *addresses) as reader:
        quiet, busy = (feed(writer.sink(rank)) for rank in range(2))
        quiet.churn(10)
        for _ in range(10):
            busy.churn(100)  # drops the messages of the quiet stream
            wait_for_whole(reader, busy, 1)
        wait_for_whole(reader, quiet, 0)
        with read(config, *addresses) as late:
            wait_for_whole(late, quiet, 0)
            wait_for_whole(late, busy, 1)
            assert late.ranks_holding(next(iter(quiet.held & busy.held))) in ((0, 1), (1, 0))


def test_a_batch_above_the_message_limit_goes_by_a_snapshot(nats_server: Any, feed: Any, wait_for_whole: Any) -> None:
    config = config_of(nats_server)
    with write(config) as writer, read(config) as reader:
        feeder = feed(writer.sink(0))
        feeder.churn(5)
        wait_for_whole(reader, feeder)
        feeder.store(*range(10**15, 10**15 + 120_000))  # more than a megabyte
        wait_for_whole(reader, feeder)
        stats = writer.stats()[0]
        assert stats.stored + stats.collapsed == 6
        assert stats.bases == 2
        feeder.churn(5)
        wait_for_whole(reader, feeder)


def test_a_cluster_of_three_survives_the_loss_of_the_log_leader(
    nats_cluster: Any, feed: Any, wait_for_whole: Any
) -> None:
    config = config_of(*nats_cluster, replicas=3)

    async def leader(client: Any, js: Any) -> int:
        return int((await js.stream_info(HERE.log)).cluster.leader.removeprefix("server-"))

    with write(config) as writer, read(config) as reader:
        feeder = feed(writer.sink(0))
        feeder.churn(50)
        wait_for_whole(reader, feeder)
        nats_cluster[run_with_client(config, leader)].kill()
        feeder.churn(50)
        wait_for_whole(reader, feeder)
        with read(config) as late:
            wait_for_whole(late, feeder)
        assert not writer.stats()[0].is_superseded
