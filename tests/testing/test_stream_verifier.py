"""The judge of streams: a sound record breaks no rule, and each fault of the wire breaks the rule of its name."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.events import payload

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.events import medium_group
from scheduler_components.kv_events import BatchEncoder
from scheduler_components.kv_events.codec import DIALECTS
from scheduler_components.testing.golden import PeerVector, peer_vectors
from scheduler_components.testing.interfaces import Frames
from scheduler_components.testing.rules import RULES
from scheduler_components.testing.strategies import cache_histories, invalid_histories
from scheduler_components.testing.stream_verifier import AdvertisedStream, RecordedStream, ReplayResponse, verify_stream
from scheduler_components.values import KvPoolSnapshot

GPU = medium_group(None)
EXPECTED = AdvertisedStream(rank=0, topic=b"kv", block_size=1)


def stored(block_hash: int, parent: int | None = None, token: int = 7, **fields: object) -> BlockStored:
    return BlockStored((block_hash,), parent, (token,), 1, None, **fields)  # type: ignore[arg-type]


def raw(*events: object, ts: object = 1.0, rank: object = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


def live(*payloads: bytes, first: int = 0, topic: bytes = b"kv") -> tuple[Frames, ...]:
    return tuple((topic, number.to_bytes(8, "big"), each) for number, each in enumerate(payloads, start=first))


def replayed(*payloads: bytes, first: int = 0, start: int | None = 0, ended: bool = True) -> ReplayResponse:
    return ReplayResponse(start, tuple(frames[1:] for frames in live(*payloads, first=first)), ended)


def broken(record: RecordedStream, expected: AdvertisedStream = EXPECTED) -> list[str]:
    return [violation.rule for violation in verify_stream(record, expected).violations]


A, B, C = payload(stored(1)), payload(stored(2, 1)), payload(BlockRemoved((2,)))
BARE = ReplayResponse(None, (), True)
SOUND = RecordedStream(
    live=live(B, C, first=1), history=replayed(A), again=replayed(B, C, first=1, start=1),
    past_end=BARE, malformed=BARE, pool=(KvPoolSnapshot({GPU: (1, 2)}, 1), KvPoolSnapshot({GPU: (1,)}, 2)),
)  # fmt: skip


def test_a_sound_stream_breaks_no_rule_and_all_but_the_engines_rules_were_judged() -> None:
    judged = verify_stream(SOUND, EXPECTED)
    assert judged.violations == ()
    assert judged.judged == RULES.keys() - {"descriptor", "reachable"}
    facts = judged.facts
    assert (facts.live_batches, facts.replayed_batches, facts.events, facts.blocks) == (2, 1, 3, 1)
    assert (facts.first_sequence, facts.last_sequence, facts.knows_history) == (0, 2, True)
    assert (facts.dialects, facts.replay_frames) == (("array",), (2,))
    assert (facts.pool_readings, facts.pool_blocks) == (2, 3)


@settings(deadline=None)
@given(history=cache_histories(), dialect=st.sampled_from(DIALECTS), late=st.integers(0, 12))
def test_what_a_cache_tells_breaks_no_rule(history: list[KVEventBatch], dialect: str, late: int) -> None:
    payloads = [BatchEncoder(dialect).encode(batch, 0) for batch in history]
    if not payloads:
        return
    late = min(late, len(payloads) - 1)
    record = RecordedStream(live=live(*payloads[late:], first=late), history=replayed(*payloads[: late + 1]))
    judged = verify_stream(record, AdvertisedStream(0, b"kv"))
    assert judged.violations == ()
    assert judged.facts.off_chain_blocks == 0


@settings(deadline=None)
@given(
    history=invalid_histories(),
    noise=st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9), st.binary(max_size=40))),
    answers=st.lists(st.lists(st.binary(max_size=9), min_size=1, max_size=4).map(tuple), max_size=4),
)
def test_nothing_that_is_heard_raises(history: list[KVEventBatch], noise: list[Frames], answers: list[Frames]) -> None:
    payloads = [BatchEncoder().encode(batch, 0) for batch in history]
    answer = ReplayResponse(0, tuple(answers), False)
    judged = verify_stream(RecordedStream(live=(*live(*payloads), *noise, (b"",)), history=answer), EXPECTED)
    assert {violation.rule for violation in judged.violations} <= judged.judged <= RULES.keys()


@pytest.mark.parametrize("vector", peer_vectors(), ids=str)
def test_every_measured_peer_is_at_most_warned(vector: PeerVector) -> None:
    rank = vector.rank or 0
    record = RecordedStream(
        live=live(vector.payload, first=5), history=ReplayResponse(0)
    )  # silent: its replay address is not given
    expected = {"hash-type", "replay-answers"}
    if "without tokens" in vector.name:  # reported, because a router that hashes tokens itself cannot use it
        expected.add("event")
    assert set(broken(record, AdvertisedStream(rank, b"kv"))) <= expected


def sound(**changes: object) -> RecordedStream:
    """The facts of a correct stream with some replaced; the pool is not read unless it is among them."""
    return msgspec.structs.replace(SOUND, **{"pool": (), **changes})


CASES: dict[str, RecordedStream] = {
    "speaks": RecordedStream(history=BARE),
    "live-frames": sound(live=((b"kv", bytes(8)),)),
    "topic": sound(live=live(B, C, first=1, topic=b"other")),
    "sequence-frame": sound(live=((b"kv", b"\xff" * 8, B),)),
    "order": sound(live=(*live(B, C, first=1), *live(B, first=1))),
    "no-gap": sound(live=live(B, payload(), first=1)[:1] + live(payload(), first=9)),
    "batch": sound(live=live(msgspec.msgpack.encode([1.0, [], 0, "later"]), first=1), again=None),
    "batch-time": sound(live=live(raw(ts=float("nan")), first=1), again=None),
    "batch-rank": sound(live=live(payload(rank=3), first=1), again=None),
    "event": sound(live=live(raw(["BlockMoved", [1]]), first=1), again=None),
    "hash-type": sound(live=live(raw(["BlockRemoved", [b"\x00" * 7 + b"\x01"]]), first=1), again=None),
    "block-size": sound(live=live(payload(BlockStored((3,), None, (1, 2), 2, None)), first=1), again=None),
    "root-parent": sound(live=live(payload(stored(3, 0)), first=1), again=None),
    "parents-first": sound(live=live(payload(stored(3, 99)), first=1), again=None),
    "one-content": sound(live=live(payload(BlockRemoved((1,)), stored(1, token=8)), first=1), again=None),
    "stored-once": sound(live=live(payload(stored(1)), first=1), again=None),
    "removed-stands": sound(live=live(payload(BlockRemoved((9,))), first=1), again=None),
    "children-first": sound(live=live(B, payload(BlockRemoved((1,))), first=1), again=None),
    "medium": sound(live=live(payload(stored(3, medium="TAPE")), first=1), again=None),
    "replay-answers": RecordedStream(live=live(A), history=ReplayResponse(0)),
    "replay-frames": sound(history=ReplayResponse(0, ((b"", b"", bytes(8), A),), True)),
    "replay-end": sound(history=replayed(A, ended=False)),
    "replay-order": sound(again=ReplayResponse(1, replayed(B, C, first=1).messages[::-1], True)),
    "replay-same": sound(again=replayed(payload(stored(2, 1), ts=2.0), C, first=1, start=1)),
    "replay-past-end": sound(past_end=replayed(A)),
    "replay-malformed": sound(malformed=ReplayResponse(None)),
    "late-joiner": sound(live=live(B, first=8), history=replayed(payload(stored(1)), first=7), again=None),
    "pool-missing": sound(pool=(KvPoolSnapshot({GPU: (1, 9)}, 2),)),
    "pool-extra": sound(pool=(KvPoolSnapshot({GPU: (1, 2)}, 1), KvPoolSnapshot({GPU: ()}, 2))),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "record"), CASES.items(), ids=str)
def test_each_fault_breaks_the_rule_of_its_name(rule: str, record: RecordedStream) -> None:
    assert set(broken(record)) == {rule}


def test_every_rule_has_a_fault() -> None:
    assert CASES.keys() == RULES.keys() - {"descriptor", "reachable"}


def test_what_refers_to_unseen_history_is_not_judged_until_a_clear() -> None:
    orphan, unknown = payload(stored(3, 99)), payload(BlockRemoved((9,)))
    before = RecordedStream(live=live(orphan, unknown, first=7))
    judged = verify_stream(before, EXPECTED)
    assert {violation.rule for violation in judged.violations} == {"late-joiner"}
    assert not judged.facts.knows_history
    assert "parents-first" not in judged.judged
    after = RecordedStream(live=live(payload(AllBlocksCleared()), orphan, unknown, first=7), history=BARE)
    assert broken(after) == ["parents-first", "removed-stands"]


def test_batches_of_a_folded_base_may_differ_from_the_live_ones() -> None:
    base = payload(AllBlocksCleared(), stored(1), ts=0.0)
    record = sound(live=live(A, B, C), history=replayed(base, B, C), again=None)
    assert broken(record) == []


def test_a_live_batch_that_only_replay_had_is_a_fact_and_no_fault() -> None:
    record = sound(live=(*live(A), *live(C, first=2)), history=BARE, again=replayed(A, B, C))
    judged = verify_stream(record, EXPECTED)
    assert (judged.violations, judged.facts.lost_live) == ((), 1)


def test_the_topic_framing_is_read() -> None:
    answer = ReplayResponse(0, live(A), True)
    assert verify_stream(sound(history=answer), EXPECTED).facts.replay_frames == (2, 3)


def test_readings_that_belong_to_nothing_that_was_heard_are_not_judged() -> None:
    """A number that was not received, one that the oracle does not know, and one of an earlier epoch."""
    for reading in (KvPoolSnapshot({GPU: (9,)}, 3), KvPoolSnapshot({GPU: (9,)}, None)):
        assert verify_stream(sound(pool=(reading,)), EXPECTED).facts.pool_readings == 0
    back = (KvPoolSnapshot({GPU: (1,)}, 2), KvPoolSnapshot({GPU: (9,)}, 0))
    assert verify_stream(sound(pool=back), EXPECTED).facts.pool_readings == 1


def test_a_pool_behind_a_silent_stream_is_missing_from_it() -> None:
    record = RecordedStream(history=BARE, pool=(KvPoolSnapshot({GPU: (1,)}, -1),))
    assert broken(record) == ["speaks", "pool-missing"]


def test_what_a_base_says_and_what_a_gap_hides_is_compared_with_care() -> None:
    base = payload(AllBlocksCleared(), stored(1), ts=0.0)
    after_base = RecordedStream(
        live=live(B, first=6), history=replayed(base, first=5), pool=(KvPoolSnapshot({GPU: (2,)}, 6),)
    )
    (seen,) = [each.seen for each in verify_stream(after_base, EXPECTED).violations]
    assert seen.endswith("the stream stored it and the pool does not hold it; wrong since one of the batches 0 to 6")
    gap = sound(live=live(payload(), first=9), pool=(KvPoolSnapshot({GPU: (1, 8)}, 9), KvPoolSnapshot({GPU: ()}, 9)))
    assert set(broken(gap)) == {"no-gap"}


def test_blocks_of_a_history_that_nobody_heard_are_not_missed() -> None:
    record = RecordedStream(
        live=live(payload(stored(3)), first=7), history=BARE, pool=(KvPoolSnapshot({GPU: (1, 3)}, 7),)
    )
    assert broken(record) == ["late-joiner"]
