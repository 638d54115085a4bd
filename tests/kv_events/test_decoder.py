"""Hostile payloads, a million of them in ``make soak``.

Property: each is a batch or a DecodeError, and costs no more than its size allows.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from observability.kv_stream import BatchApplier, BlockView, NullStreamListener
from observability.kv_stream.stream_state import ViewFeedback
from scheduler_components import BlockRemoved, BlockStored, DecodeError
from scheduler_components.events import FULL_ATTENTION_KINDS
from scheduler_components.kv_events import BatchDecoder, DecodedBatch
from scheduler_components.kv_events.codec import MAX_PAYLOAD_BYTES
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind, ReplayRequest, ReplayVerb
from scheduler_components.testing.golden import batch_vectors, peer_vectors

pytestmark = pytest.mark.faults

VECTORS = [vector.payload for vector in (*batch_vectors(), *peer_vectors())]
INPUTS, SOAK_INPUTS = 20_000, 1_000_000
VIEW_LIVES = 5_000
# First bytes of every msgpack kind, and numbers at the edges of its lengths.
KINDS = bytes([0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, *range(0xC0, 0xE0), 0xE0, 0xFF])
NUMBERS = [struct.pack(f">{code}", value) for code, value in (("H", 2**16 - 1), ("I", 2**32 - 1), ("Q", 2**64 - 1))]
NUMBERS += [struct.pack(">d", value) for value in (float("nan"), float("inf"), -0.0)]


def mutate(payload: bytes, draw: random.Random) -> bytes:
    """Change ``payload`` in one to three places, as a faulty or hostile peer would."""
    data = bytearray(payload)
    for _ in range(3 if draw.getrandbits(1) else 1):
        at = draw.getrandbits(16) % (len(data) + 1)
        how = draw.getrandbits(3)
        if how < 3:
            data[at : at + 1] = KINDS[draw.getrandbits(8) % len(KINDS)].to_bytes(1, "big")
        elif how == 3:
            data[at : at + 1] = draw.getrandbits(8).to_bytes(1, "big")
        elif how == 4:
            del data[at:]
        elif how == 5:
            number = NUMBERS[draw.getrandbits(8) % len(NUMBERS)]
            data[at : at + len(number)] = number
        elif how == 6:
            other = VECTORS[draw.getrandbits(16) % len(VECTORS)]
            data[at:at] = other[draw.getrandbits(8) % len(other) :]
        else:
            data[at:at] = data[at : at + draw.getrandbits(6)]
    return bytes(data)


def check_size(batch: DecodedBatch, payload: bytes) -> None:
    """Check that every value of a batch takes at least one byte: a false length creates nothing."""
    values = len(batch.events) + len(batch.errors)
    for event in batch.events:
        if isinstance(event, BlockStored):
            values += len(event.token_ids)
            # A tier may send no tokens; a sliding window's group names fewer blocks than its tokens fill.
            if event.token_ids and event.kv_cache_spec_kind in FULL_ATTENTION_KINDS:
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        if isinstance(event, BlockStored | BlockRemoved):
            values += len(event.block_hashes)
            assert all(-(2**63) <= value < 2**63 for value in event.block_hashes)
    assert values <= len(payload)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_mutated_payloads_reach_the_view_or_are_refused(soaking: bool) -> None:
    inputs, draw = SOAK_INPUTS if soaking else INPUTS, random.Random(20_260)
    decoder, read = BatchDecoder(), 0
    outcomes: Counter[type] = Counter()

    class Sizes(NullStreamListener):
        """Check every decoded batch."""

        def on_batch_applied(self, rank: int, seq: int, batch: DecodedBatch, *, replayed: bool) -> None:
            nonlocal read
            read += 1
            check_size(batch, payload)

    for number in range(inputs):
        if number % VIEW_LIVES == 0:
            view = BlockView()
            applier = BatchApplier(rank=0, view=view, decoder=decoder, listener=Sizes(), wall_clock=lambda: 0.0)
        payload = mutate(VECTORS[number % len(VECTORS)], draw)
        outcomes[applier.apply(number, payload, replayed=False)] += 1
        assert view.block_count(0) <= VIEW_LIVES * 64
    assert set(outcomes) == {None, *ViewFeedback}
    # The fuzzer reaches both sides of every check: neither mostly noise, nor mostly sound.
    assert min(outcomes.values()) > inputs // 200
    assert read > inputs // 20


@pytest.mark.parametrize(
    "make",
    [
        lambda size: b"\x91" * size,
        lambda size: b"\x81\xa0" * (size // 2),
        lambda size: (
            b"\x93\xcb" + bytes(8) + b"\xdd" + (size - 16).to_bytes(4, "big") + b"\xc0" * (size - 16) + b"\x00"
        ),
        lambda size: b"\x93\xcb" + bytes(8) + b"\xdd" + (2**32 - 1).to_bytes(4, "big") + b"\xc0" * (size - 16),
        lambda size: b"\x93\xcb" + bytes(8) + b"\x91" + b"\x91" * (size - 16) + b"\x00",
        lambda size: b"\x93\xcb" + bytes(8) + b"\x91\xdc\x00\x02" + b"\xc6" + (2**32 - 1).to_bytes(4, "big"),
        lambda size: msgspec.msgpack.encode((0.0, [None] * (size // 20), 0)),
        lambda size: msgspec.msgpack.encode((0.0, [["BlockRemoved", [[]] * (size // 2)]], 0)),
        lambda size: msgspec.msgpack.encode((0.0, [["BlockStored", [1], None, [0] * (size - 40), size, None]], 0)),
        lambda size: msgspec.msgpack.encode((0.0, [{"type": "BlockRemoved", "x" * (size - 64): 0}], 0)),
        lambda size: msgspec.msgpack.encode((0.0, [["y" * (size - 32)]], 0)),
    ],
    ids=[
        "nested arrays",
        "nested maps",
        "nil events",
        "a list that lies",
        "a nested event",
        "a lying bin",
        "many nil events",
        "hashes of arrays",
        "a block that is not full",
        "a long key",
        "a long tag",
    ],
)
def test_the_largest_payloads_of_bad_kinds_are_refused(make: Callable[[int], bytes]) -> None:
    payload = make(MAX_PAYLOAD_BYTES)
    assert len(payload) <= MAX_PAYLOAD_BYTES
    try:
        batch = BatchDecoder().decode(payload)
    except DecodeError as error:
        assert len(error.reason) < 500
    else:
        assert batch.events == ()
        assert len(batch.errors) == 1
        assert len(batch.errors[0].reason) < 500


@pytest.mark.soak
def test_mutated_words_of_the_replay_conversation_are_read_or_refused(soaking: bool) -> None:
    inputs, draw = SOAK_INPUTS if soaking else INPUTS, random.Random(7)
    meta = ReplayMeta(bytes(8), bytes(16), 3, 9, ReplayMetaKind.BEGIN, True, 5, bytes(8)).encode()
    request = ReplayRequest(5, ReplayVerb.SYNC, bytes(8), bytes(16)).encode()
    read = refused = 0
    for number in range(inputs):
        try:
            if number % 2:
                parsed = ReplayMeta.decode(mutate(meta, draw))
                assert 0 <= parsed.first <= parsed.start <= parsed.next
            else:
                assert ReplayRequest.parse(mutate(request, draw)[:37]).start >= 0
        except DecodeError:
            refused += 1
        else:
            read += 1
    assert min(read, refused) > inputs // 100
