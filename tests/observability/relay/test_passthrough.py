"""Unknown fields from an engine through a relay to a reader: live, in a snapshot, in parts.

The engines are payloads of generated events, in maps or arrays, whose blocks carry fields that no version of this kit
declares. The relay consists of the kit's real cores without sockets. The reader keeps all fields per block.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from observability.kv_stream import BatchApplier, CountingView
from observability.relay.passthrough import PassthroughDecoder, RawRemoved, RawStored, split_removal
from observability.relay.stream import RelayedStream, SourceListener
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEventBatch
from scheduler_components.events import signed_block_hash
from scheduler_components.kv_events import BatchDecoder, BatchEncoder, EventStream
from scheduler_components.kv_events.decoder import decode_event
from scheduler_components.values import PublisherStats

FORMS = ("map", "array")
STORED_FIELDS = BlockStored.__struct_fields__


def stored(form: str, mark: str, hashes: list[Any], *, parent: Any = None, **known: Any) -> Any:
    """Return a stored event with three unknown fields: of the event, per block and per token."""
    fields = dict.fromkeys(STORED_FIELDS) | {"block_hashes": hashes, "parent_block_hash": parent, "block_size": 2}
    fields |= {"token_ids": list(range(2 * len(hashes)))}
    fields |= known
    later = {"mark": mark, "per_block": [f"{mark}{number}" for number in range(len(hashes))]}
    later |= {"per_token": [[mark, number] for number in range(2 * len(hashes))]}
    if form == "array":
        return ["BlockStored", *fields.values(), *later.values()]
    return {"type": "BlockStored"} | {name: value for name, value in fields.items() if value is not None} | later


def removed(form: str, mark: str, hashes: list[Any]) -> Any:
    if form == "array":
        return ["BlockRemoved", hashes, None, None, None, None, mark]
    return {"type": "BlockRemoved", "block_hashes": hashes, "mark": mark}


def cleared(form: str) -> Any:
    return ["AllBlocksCleared", "mark"] if form == "array" else {"type": "AllBlocksCleared", "mark": "c"}


def payload_of(*events: Any) -> bytes:
    return msgspec.msgpack.encode((1.0, list(events), 0))


class Reader:
    """Keeps the last stored event of each block, including unknown fields."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Any, ...]] = {}
        self.said: set[str] = set()

    def read(self, *payloads: bytes) -> Reader:
        for payload in payloads:
            assert BatchDecoder().decode(payload).errors == ()
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)
        return self

    def _apply(self, event: Any) -> None:
        fields = event if isinstance(event, dict) else dict(enumerate(event))
        tag = fields.get("type", fields.get(0))
        if tag == "AllBlocksCleared":
            self.blocks.clear()
            return
        hashes = fields["block_hashes"] if "type" in fields else fields[1]
        if tag == "BlockRemoved":
            for each in hashes:
                self.blocks.pop(signed_block_hash(each), None)
            return
        names = (
            (*range(1, len(STORED_FIELDS) + 1), 17, 18, 19)
            if 0 in fields
            else (*STORED_FIELDS, "mark", "per_block", "per_token")
        )
        known = [fields.get(name) for name in names]
        for number, each in enumerate(hashes):
            own = [known[1] if not number else hashes[number - 1], known[2][2 * number : 2 * number + 2], *known[3:16]]
            own += [known[16], None if known[17] is None else known[17][number]]
            own += [None if known[18] is None else known[18][2 * number : 2 * number + 2]]
            self.blocks[signed_block_hash(each)] = (each, *own)
            self.said.add(repr((each, *own)))


class KeptStream:
    """A sink with the stream of a publisher: its batches, and the replay of a late reader."""

    def __init__(self, dialect: str = "native", buffer_steps: int = 1) -> None:
        self.encoder = BatchEncoder(dialect)
        self.stream = EventStream(epoch=bytes(16), max_steps=buffer_steps, max_bytes=10**9)
        self.sent: list[bytes] = []

    def publish(self, events: EventBatch) -> None:
        self.append(self.encoder.encode(events, 0))

    def append(self, payload: bytes) -> None:
        self.sent.append(payload)
        self.stream.append(payload)
        self.stream.fold_oldest()

    def replayed(self) -> tuple[list[bytes], list[bytes]]:
        """Return the snapshot and the replay buffer."""
        chunks = [each for each in self.stream.plan_snapshot() if each is not None]
        parts = self.stream.encode_chunk(chunks[0][0], self.encoder, 0, clear=True)
        batches = [self.stream.payload(number) for number in range(self.stream.first, self.stream.next_sequence)]
        return [each for each in parts if each is not None], batches

    def idle(self) -> None: ...

    def set_upstream_state(self, state: str | None) -> None: ...

    def stats(self) -> PublisherStats:
        return PublisherStats()

    def shutdown(self) -> None: ...


class Relay:
    """A relay of one stream that receives batches as from a subscriber."""

    def __init__(self, num_sources: int = 1) -> None:
        self.out = KeptStream()
        self.stream = RelayedStream(0, (self.out,), wall_clock=lambda: 9.0)
        self.sources = [self._follow(key) for key in range(num_sources)]

    def _follow(self, key: int) -> BatchApplier:
        self.stream.merger.add_source(key)
        listener = SourceListener(key, {0: self.stream})
        return BatchApplier(
            rank=0, view=CountingView(), decoder=PassthroughDecoder(), listener=listener, wall_clock=lambda: 1.0
        )

    def receive(self, *payloads: bytes, source: int = 0) -> None:
        for payload in payloads:
            self.sources[source].apply(0, payload, replayed=False)

    def receive_snapshot(self, chunks: list[bytes], batches: list[bytes], source: int = 0) -> None:
        """Receive a snapshot: chunks, then the batches after it."""
        applier = self.sources[source]
        applier.start_staging()
        for payload in chunks:
            applier.apply_staged(0, payload, is_snapshot_chunk=True)
        for payload in batches:
            applier.apply_staged(0, payload, is_snapshot_chunk=False)
        applier.commit_staging()


HASHES = st.sampled_from([1, 2, 3, 4, 5, 6, 7])


@st.composite
def histories(draw: st.DrawFn) -> list[bytes]:
    """Batches of one engine in one encoding, with signed or unsigned hashes."""
    form, is_unsigned = draw(st.sampled_from(FORMS)), draw(st.booleans())

    held: set[int] = set()

    def hashes(most: int) -> list[int]:
        found = draw(st.lists(HASHES, min_size=1, max_size=most, unique=True))
        return [each + (2**63 if is_unsigned else -(2**63)) if each % 2 else each for each in found]

    batches = []
    for number in range(draw(st.integers(1, 6))):
        events = []
        for place in range(draw(st.integers(0, 3))):
            mark = f"{number}.{place}"
            kind = draw(st.sampled_from(["stored", "stored", "stored", "removed", "removed", "cleared"]))
            if kind == "stored":
                new = [each for each in hashes(5) if each not in held]  # a held block is not stored again
                held |= set(new)
                events += [stored(form, mark, new, parent=draw(st.none() | HASHES))] if new else []
            elif kind == "removed":
                gone = hashes(3)
                held -= set(gone)
                events.append(removed(form, mark, gone))
            else:
                held.clear()
                events.append(cleared(form))
        batches.append(payload_of(*events))
    return batches


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(2))
@given(history=histories())
def test_events_of_one_source_are_forwarded_as_received_bytes(history: list[bytes]) -> None:
    relay = Relay()
    relay.receive(*history)
    assert relay.out.sent == [each for each in history if each != payload_of()]


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(2))
@example(history=[payload_of(stored("map", "a", [1, 2, 3])), payload_of(removed("map", "r", [2]))], joined_at=1)
@example(history=[payload_of(stored("array", "a", [1, 2, 3])), payload_of(removed("array", "r", [2]))], joined_at=2)
@given(history=histories(), joined_at=st.integers(0, 6))
def test_unknown_fields_survive_live_and_in_a_snapshot(history: list[bytes], joined_at: int) -> None:
    """The relay joins at batch ``joined_at`` by the engine's snapshot, its reader by the relay's."""
    engine, relay = KeptStream(), Relay()
    for payload in history[:joined_at]:
        engine.append(payload)
    relay.receive_snapshot(*engine.replayed())
    relay.receive(*history[joined_at:])
    expected = Reader().read(*history)
    assert Reader().read(*relay.out.sent).blocks == expected.blocks
    chunks, batches = relay.out.replayed()
    assert Reader().read(*chunks, *batches).blocks == expected.blocks


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(2))
@given(histories_of=st.tuples(histories(), histories()), order=st.lists(st.integers(0, 1), max_size=12))
def test_two_sources_of_one_worker_keep_unknown_fields(histories_of: tuple[list[bytes], ...], order: list[int]) -> None:
    """Each block of the stream equals the event of one of its sources."""
    relay, readers = Relay(num_sources=2), (Reader(), Reader())
    left = [list(history) for history in histories_of]
    for source in [*order, *[0] * len(left[0]), *[1] * len(left[1])]:
        if left[source]:
            payload = left[source].pop(0)
            relay.receive(payload, source=source)
            readers[source].read(payload)
        chunks, batches = relay.out.replayed()
        for seen in (Reader().read(*relay.out.sent), Reader().read(*chunks, *batches)):
            assert seen.blocks.keys() == readers[0].blocks.keys() | readers[1].blocks.keys()
            assert set(map(repr, seen.blocks.values())) <= readers[0].said | readers[1].said


VALUES = st.sampled_from(
    [None, 0, 1, -1, 2**32, 2**63, 2**64 - 1, True, 1.5, "", "x", b"", b"x", [], [1], [1, 2], [-1, 0], ["x"], [[1]], {}]
)


def odd_event(form: str, changes: dict[str, Any], left_out: set[str]) -> Any:
    if form == "map":
        event = stored("map", "a", [1, 2]) | changes
        return {name: value for name, value in event.items() if name not in left_out}
    return stored("array", "a", [1, 2], **changes)


ODD_EVENTS = st.builds(
    odd_event,
    st.sampled_from(FORMS),
    st.dictionaries(st.sampled_from(STORED_FIELDS), VALUES, max_size=2),
    st.sets(st.sampled_from(STORED_FIELDS), max_size=1),
)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(10))
@given(event=ODD_EVENTS)
def test_forwarded_bytes_are_valid_in_the_dialect(event: Any) -> None:
    """An overflowing queue decodes the events again, and must not lose one."""
    decoder = PassthroughDecoder()
    decoder.decode(payload_of(stored("map", "a", [1], parent=None)))
    for read in decoder.decode(payload_of(event)).events:
        if isinstance(read, RawStored):
            batch = KVEventBatch(1.0, (msgspec.Raw(read.raw),))  # type: ignore[arg-type]
            assert BatchEncoder("native").encode_valid(batch, 0)[2] == []


def events_of(relay: Relay) -> list[Any]:
    return [event for payload in relay.out.sent for event in msgspec.msgpack.decode(payload)[1]]


@pytest.mark.parametrize("form", FORMS)
def test_a_partial_removal_keeps_its_unknown_fields(form: str) -> None:
    relay = Relay(num_sources=2)
    relay.receive(payload_of(stored(form, "a", [1, 2, 3, 4, 5])))
    relay.receive(payload_of(stored(form, "b", [3])), source=1)
    assert len(relay.out.sent) == 1  # every block is held already
    relay.receive(payload_of(removed(form, "gone", [1, 2, 3, 4])))
    assert events_of(relay)[1:] == [removed(form, "gone", [1, 2]), removed(form, "gone", [4])]


def test_a_part_of_a_removal_equals_its_bytes() -> None:
    (event,) = PassthroughDecoder().decode(payload_of(removed("map", "gone", [1, 2, 3, 2**63 + 4]))).events
    assert isinstance(event, RawRemoved)
    parts = list(split_removal(event, {1, 3, 4 - 2**63}))
    assert [part.block_hashes for part in parts] == [(1,), (3, 4 - 2**63)]
    assert [decode_event(part.raw) for part in parts] == [BlockRemoved((1,)), BlockRemoved((3, 4 - 2**63))]
    plain = BlockRemoved((1, 2, 3), "CPU")
    assert list(split_removal(plain, {1, 3})) == [BlockRemoved((1, 3), "CPU")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wide", [2**63, 2**63 + 5, -5])
def test_events_of_the_relay_use_the_encoding_of_the_source(form: str, wide: int) -> None:
    """A plain reader compares raw hashes, and may read only one encoding."""
    relay = Relay()
    relay.receive(payload_of(stored(form, "z", [0, 2**63 - 1])))  # which do not show the sign
    relay.receive(payload_of(stored(form, "a", [wide, 7, wide + 1])))
    restarted = payload_of(stored(form, "b", [7]))
    relay.sources[0].start_staging()
    relay.sources[0].apply_staged(0, restarted, is_snapshot_chunk=False)
    relay.sources[0].commit_staging()
    *_, last = events_of(relay)
    expected = {"type": "BlockRemoved", "block_hashes": [wide, wide + 1, 0, 2**63 - 1]}
    if form == "array":
        assert last == list(expected.values())
    else:
        assert {name: last[name] for name in expected} == expected


def test_bytes_hashes_are_forwarded_as_integers() -> None:
    relay = Relay()
    digest, parent = (2**255 + 3).to_bytes(32, "big"), b"\xff" * 32
    for form in FORMS:
        relay.receive(payload_of(stored(form, form, [digest, digest[::-1]], parent=parent)))
    narrow = [signed_block_hash(digest), signed_block_hash(digest[::-1])]
    assert events_of(relay) == [stored(form, form, narrow, parent=-1) for form in FORMS]
    relay.receive(payload_of(removed("map", "r", [digest])))
    assert events_of(relay)[2:] == [removed("map", "r", narrow[:1])]


def test_an_event_that_native_refuses_is_forwarded_as_decoded() -> None:
    """Readers ignore an option of a wrong type; the valid events of its batch are forwarded unchanged."""
    relay = Relay()
    odd, good = stored("map", "a", [1], lora_name=1.5), stored("map", "b", [2])
    relay.receive(payload_of(odd, good))
    first, second = events_of(relay)
    assert second == good
    assert (first["block_hashes"], first["lora_name"], "mark" in first) == ([1], None, False)


@pytest.mark.parametrize("form", FORMS)
def test_an_event_forwarded_as_decoded_has_the_encoding_of_its_source(form: str) -> None:
    relay, wide = Relay(), 2**63 + 5
    relay.receive(payload_of(stored(form, "a", [wide])), payload_of(stored(form, "b", [7], parent=wide, lora_name=1.5)))
    relay.receive(payload_of(stored(form, "c", [wide + 1], lora_name=1.5)))
    expected = [list(event.values()) if isinstance(event, dict) else event for event in events_of(relay)[1:]]
    assert [event[:3] for event in expected] == [["BlockStored", [7], wide], ["BlockStored", [wide + 1], None]]


def test_an_event_that_cannot_be_split_is_left_out() -> None:
    relay = Relay()
    good = stored("map", "b", [2])
    torn = msgspec.msgpack.encode(stored("map", "XYZ", [1])).replace(b"\xa3XYZ", b"\xa3X\xff\xff")
    relay.receive(payload_of(msgspec.Raw(torn), good))
    assert events_of(relay) == [good]
    assert relay.sources[0].decode_errors == 1


def test_an_unreadable_batch_raises_as_in_any_decoder() -> None:
    relay = Relay()
    relay.receive(b"\xc1", payload_of("no event", cleared("map")))
    assert events_of(relay) == [cleared("map")]
    assert relay.sources[0].decode_errors == 2


def test_a_decoded_event_equals_that_of_any_decoder() -> None:
    payload = payload_of(stored("map", "a", [2**63 + 5, 7], medium="CPU"), cleared("map"))
    plain, kept = BatchDecoder().decode(payload), PassthroughDecoder().decode(payload)
    assert isinstance(kept.events[0], RawStored)
    assert isinstance(kept.events[1], AllBlocksCleared)
    assert [getattr(kept.events[0], name) for name in STORED_FIELDS] == list(msgspec.structs.astuple(plain.events[0]))
