"""Verify one stream: recorded frames in, violations of the rules out. It does no I/O.

``scheduler-components conformance`` verifies live engines with it, and ``PUBLISHER_CHECKS`` verify publishers.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_components.testing.event_ledger import EventLedger
from scheduler_components.testing.interfaces import Frames
from scheduler_components.testing.pool_verifier import PoolVerifier
from scheduler_components.testing.rules import Violation
from scheduler_components.testing.strict_decoding import StrictlyDecodedBatch, decode_strictly
from scheduler_components.values import KvPoolSnapshot

__all__ = [
    "AdvertisedStream",
    "StreamVerdict",
    "ReplayResponse",
    "StreamFacts",
    "RecordedStream",
    "sequence_of",
    "verify_stream",
]

# The recorded frames of one stream.


class ReplayResponse(msgspec.Struct, frozen=True):
    """One reply of a replay channel.

    Attributes:
        start: the requested number; None for a malformed request.
        messages: the received messages, without the leading empty delimiter and without the end marker.
        ended: whether the end marker arrived in time.
        is_truncated: the reply was longer than the reader's limits.
    """

    start: int | None
    messages: tuple[Frames, ...] = ()
    ended: bool = False
    is_truncated: bool = False

    @property
    def is_silence(self) -> bool:
        """Whether no message arrived."""
        return not self.messages and not self.ended


class RecordedStream(msgspec.Struct, frozen=True):
    """All recorded messages of one stream.

    Attributes:
        live: messages of the PUB socket in order of arrival.
        history: the reply to a request from 0 before listening; None without a replay channel.
        again: the reply to a request after listening, from the end of ``history`` or the first live number, whichever
            is lower.
        past_end: the reply to a request from beyond the end.
        malformed: the reply to a request of a wrong length.
        extended: whether the publisher supports this kit's extended requests; None if unknown.
        pool: readings of the pool in their order; empty if it cannot be read.
    """

    live: tuple[Frames, ...] = ()
    history: ReplayResponse | None = None
    again: ReplayResponse | None = None
    past_end: ReplayResponse | None = None
    malformed: ReplayResponse | None = None
    extended: bool | None = None
    pool: tuple[KvPoolSnapshot, ...] = ()


class AdvertisedStream(msgspec.Struct, frozen=True):
    """The advertised facts of a stream; None for unknown ones."""

    rank: int = 0
    topic: bytes | None = None
    block_size: int | None = None


_SEQUENCE_BYTES = 8
_LEDGER_RULES = ("root-parent", "one-content", "stored-once", "medium")
_HISTORY_RULES = ("parents-first", "removed-stands", "children-first")
_POOL_RULES = ("pool-missing", "pool-extra")
_BATCH_RULES = ("batch", "batch-time", "batch-rank", "event", "hash-type")


class StreamFacts(msgspec.Struct):
    """Facts about a recorded stream.

    Attributes:
        live_batches, replayed_batches, events, blocks: counts, each batch once; blocks at the end.
        first_sequence, last_sequence: of all recorded batches; None without any.
        dialects: of the events.
        replay_frames: frames of a replayed message after the delimiter: 2 (``seed`` framing) or 3 (``topic``).
        speaks_extension: whether the publisher supports this kit's extended replay requests.
        lost_live: batches that were replayed but not received live.
        chained_blocks, off_chain_blocks: blocks whose hash was compared with SGLang's page chain, and those that
            differ.
        knows_history: the record begins with an empty cache.
        pool_readings, pool_blocks: compared readings of the pool, and compared blocks in total.
    """

    live_batches: int = 0
    replayed_batches: int = 0
    events: int = 0
    blocks: int = 0
    first_sequence: int | None = None
    last_sequence: int | None = None
    dialects: tuple[str, ...] = ()
    replay_frames: tuple[int, ...] = ()
    speaks_extension: bool | None = None
    lost_live: int = 0
    chained_blocks: int = 0
    off_chain_blocks: int = 0
    knows_history: bool = False
    pool_readings: int = 0
    pool_blocks: int = 0


class StreamVerdict(msgspec.Struct, frozen=True):
    """The result: facts, violations in their order, and the names of the rules that could be verified."""

    facts: StreamFacts
    violations: tuple[Violation, ...]
    judged: frozenset[str]


def verify_stream(record: RecordedStream, expected: AdvertisedStream) -> StreamVerdict:
    """Verify the record of one stream."""
    return _Verifier(record, expected).verify()


class _Verifier:
    def __init__(self, record: RecordedStream, expected: AdvertisedStream) -> None:
        self.record = record
        self.expected = expected
        self.facts = StreamFacts(speaks_extension=record.extended)
        self.judged: set[str] = {"speaks"}
        self.live: dict[int, bytes] = {}
        self.replayed: dict[int, bytes] = {}
        self.later: dict[int, bytes] = {}

    def verify(self) -> StreamVerdict:
        violations = [*self._live_frames(), *self._replays(), *self._history(), *self._pool()]
        return StreamVerdict(self.facts, tuple(violations), frozenset(self.judged | {each.rule for each in violations}))

    def _live_frames(self) -> Iterator[Violation]:
        last: int | None = None
        topic = self.expected.topic
        for frames in self.record.live:
            self.judged |= {"live-frames", "sequence-frame"}
            if len(frames) != 3:
                yield Violation("live-frames", f"a message of {len(frames)} frames")
                continue
            if topic is not None:
                self.judged.add("topic")
                if not frames[0].startswith(topic):
                    yield Violation("topic", f"{frames[0]!r:.60} where {topic!r} is advertised")
            sequence = sequence_of(frames)
            if sequence is None:
                yield Violation("sequence-frame", f"the sequence frame is {frames[1].hex() or 'empty'}")
                continue
            if last is not None:
                self.judged.add("order")
                if sequence <= last:
                    yield Violation("order", f"number {sequence} after {last}")
            last = sequence
            self.live[sequence] = frames[2]
        self.facts.live_batches = len(self.live)

    def _replays(self) -> Iterator[Violation]:
        record = self.record
        if record.history is None:
            return
        yield from self._answer("from 0", record.history, self.replayed)
        if record.again is not None:
            yield from self._answer(f"from {record.again.start}", record.again, self.later)
        yield from self._bare("replay-past-end", "from beyond the end", record.past_end)
        yield from self._bare("replay-malformed", "of a wrong length", record.malformed)
        for sequence, payload in [*self.replayed.items(), *self.later.items()]:
            sent = self.live.get(sequence)
            if sent is None or decode_strictly(payload, self.expected.rank).is_snapshot:
                continue
            self.judged.add("replay-same")
            if sent != payload:
                yield Violation("replay-same", f"batch {sequence}: the replayed payload differs from the live one")

    def _answer(self, asked: str, answer: ReplayResponse, payloads: dict[int, bytes]) -> Iterator[Violation]:
        self.judged |= {"replay-answers", "replay-end"}
        if answer.is_silence:
            yield Violation("replay-answers", f"no reply to a request {asked}")
            return
        if not answer.ended and not answer.is_truncated:
            yield Violation("replay-end", f"{len(answer.messages)} messages and no end marker for a request {asked}")
        last: int | None = None
        for frames in answer.messages:
            self.judged.add("replay-frames")
            sequence = sequence_of(frames) if len(frames) in (2, 3) else None
            if sequence is None:
                yield Violation("replay-frames", f"{len(frames)} frames of {[len(frame) for frame in frames]} bytes")
                continue
            self.facts.replay_frames = tuple(sorted({*self.facts.replay_frames, len(frames)}))
            self.judged.add("replay-order")
            if last is not None and sequence != last + 1:
                yield Violation("replay-order", f"number {sequence} after {last} for a request {asked}")
            last = sequence
            payloads[sequence] = frames[-1]

    def _bare(self, rule: str, asked: str, answer: ReplayResponse | None) -> Iterator[Violation]:
        if answer is None:
            return
        self.judged.add(rule)
        if answer.messages or not answer.ended:
            came = f"{len(answer.messages)} messages" + ("" if answer.ended else " and no end marker")
            yield Violation(rule, f"a request {asked} got {came}")

    def _payloads(self) -> dict[int, bytes]:
        """Return the payloads by number. The first reply precedes live batches, because it may be a snapshot."""
        return self.later | self.live | self.replayed

    def _history(self) -> Iterator[Violation]:
        payloads = self._payloads()
        facts = self.facts
        facts.replayed_batches = len(payloads.keys() - self.live.keys())
        if not payloads:
            yield Violation("speaks", "no batch arrived, live or by replay")
            return
        facts.first_sequence, facts.last_sequence = min(payloads), max(payloads)
        if self.live:
            facts.lost_live = sum(min(self.live) < each < max(self.live) for each in payloads.keys() - self.live.keys())
        ledger = EventLedger(block_size=self.expected.block_size, is_complete=facts.first_sequence == 0)
        last: int | None = None
        has_gap = False
        for sequence, payload in sorted(payloads.items()):
            if last is not None:
                self.judged.add("no-gap")
                if sequence != last + 1:
                    ledger.is_complete, has_gap = False, True
                    yield Violation("no-gap", f"{sequence - last - 1} numbers after {last} are missing")
            last = sequence
            for violation in self._batch(decode_strictly(payload, self.expected.rank), ledger):
                yield Violation(violation.rule, f"batch {sequence}: {violation.seen}")
        facts.blocks = len(ledger.blocks())
        facts.chained_blocks, facts.off_chain_blocks = ledger.num_chained, ledger.num_off_chain
        facts.knows_history = ledger.is_complete
        yield from self._late_joiner(is_complete=ledger.is_complete or has_gap)

    def _late_joiner(self, *, is_complete: bool) -> Iterator[Violation]:
        history = self.record.history
        if history is not None and bool(history.messages) != bool(self.replayed):
            return  # Another rule reports unreadable messages.
        if history is not None and history.is_silence:
            return
        self.judged.add("late-joiner")
        if history is None:
            yield Violation("late-joiner", "the publisher has no replay channel")
        elif not is_complete:
            yield Violation("late-joiner", f"the available batches begin at number {self.facts.first_sequence}")

    def _batch(self, batch: StrictlyDecodedBatch, ledger: EventLedger) -> Iterator[Violation]:
        self.judged.update(_BATCH_RULES)
        self.facts.dialects = tuple(sorted({*self.facts.dialects, *batch.dialects}))
        self.facts.events += len(batch.events)
        yield from batch.violations
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.judged.update(_LEDGER_RULES)
                if self.expected.block_size is not None:
                    self.judged.add("block-size")
            if isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared) and ledger.is_complete:
                self.judged.update(_HISTORY_RULES)
            yield from ledger.apply(event)

    def _pool(self) -> Iterator[Violation]:
        """Compare each reading with the recorded batches up to its number."""
        payloads = self._payloads()
        last_recorded = max(payloads, default=-1)
        verifier = PoolVerifier(is_complete=min(payloads, default=0) == 0)
        numbers, applied = iter(sorted(payloads)), -1
        upcoming = next(numbers, None)
        for reading in self.record.pool:
            if reading.sequence is None or not applied <= reading.sequence <= last_recorded:
                continue  # Another epoch of the publisher, or batches that were not recorded.
            while upcoming is not None and upcoming <= reading.sequence:
                batch = decode_strictly(payloads[upcoming], self.expected.rank)
                if applied not in (-1, upcoming - 1):
                    verifier.mark_lost()
                verifier.apply(upcoming, batch.events, is_snapshot=batch.is_snapshot)
                applied, upcoming = upcoming, next(numbers, None)
            self.judged.update(_POOL_RULES)
            self.facts.pool_readings += 1
            for difference in verifier.compare(reading):
                yield Violation(difference.rule, str(difference))
        self.facts.pool_blocks = verifier.num_compared


def sequence_of(frames: Frames) -> int | None:
    """Return the sequence number of a message in either framing: the last frame but one. None if it has none."""
    frame = frames[-2] if len(frames) > 1 else b""
    if len(frame) != _SEQUENCE_BYTES or frame[0] & 0x80:
        return None
    return int.from_bytes(frame, "big")
