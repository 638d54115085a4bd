"""A session computes what a batcher schedules, and verifies every batch."""

from __future__ import annotations

import msgspec
import pytest

from scheduler_components.batcher import Batcher
from scheduler_components.testing import ConformanceError
from scheduler_components.testing.batcher_checks import SMALL_LIMITS
from scheduler_components.testing.batcher_session import BatcherSession, PlannedRequest, max_batcher_steps
from scheduler_components.values import FinishReason, ScheduledBatch, ScheduledChunk


def open_batcher(limits, queues, kv_cache):
    return Batcher(limits=limits, queues=queues, kv_cache=kv_cache)


def a_session(salt: int = 0) -> BatcherSession:
    return BatcherSession.open("title", open_batcher, limits=SMALL_LIMITS, salt=salt)


def test_requests_arrive_abort_and_end_in_their_steps() -> None:
    session = a_session()
    workload = [PlannedRequest((1, 2, 3), 4), PlannedRequest((5,), 9, step=2, abort_step=4)]
    session.serve(workload)
    assert [each.finish_reason for each in session.requests] == [FinishReason.LENGTH, FinishReason.ABORT]
    assert len(session.batches) < max_batcher_steps(workload)
    session.expect_outputs()
    session.expect_nothing_held()


def test_sessions_with_different_salts_hash_their_requests_and_ids_differently() -> None:
    orders = set()
    for salt in range(3):
        session = a_session(salt)
        requests = {session.add(PlannedRequest((number,), 1)) for number in range(6)}
        orders.add(tuple(str(each.rid) for each in requests))
        orders.add(tuple(str(rid) for rid in {each.rid for each in requests}))
        assert session.queues.find(session.requests[3].rid) is session.requests[3]
    assert len(orders) > 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"end": 99}, "positions of"),
        ({"start": 1}, "the first position of"),
        ({"is_prefill": False}, "is in prefill"),
    ],
)
def test_a_wrong_chunk_is_reported(change: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = a_session()
    session.add(PlannedRequest((1, 2, 3), 4))
    sound = session.batcher.next_batch()

    def next_batch(_: object) -> ScheduledBatch:
        [chunk] = sound.chunks
        return msgspec.structs.replace(sound, chunks=(msgspec.structs.replace(chunk, **change),))

    assert isinstance(sound.chunks[0], ScheduledChunk)
    monkeypatch.setattr(Batcher, "next_batch", next_batch)
    with pytest.raises(ConformanceError, match=words):
        session.step()
