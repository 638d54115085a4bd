"""The judge of one stream: frames in, broken rules out. Pure: it neither listens nor waits.

Used on live engines by ``examine``, and on publishers in tests by ``zmq_publisher_checks``.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from scheduler_components.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_components.testing.conformance.payload import StrictBatch, read_strictly
from scheduler_components.testing.conformance.record import Expectations, Frames, ReplayAnswer, StreamRecord
from scheduler_components.testing.ledger import EventLedger
from scheduler_components.testing.wire_rules import Violation

__all__ = ["StreamFacts", "StreamVerdict", "judge_stream"]

_SEQUENCE_BYTES = 8
_LEDGER_RULES = ("root-parent", "one-content", "stored-once", "medium")
_HISTORY_RULES = ("parents-first", "removed-stands", "children-first")
_BATCH_RULES = ("batch", "batch-time", "batch-rank", "event", "hash-type")


class StreamFacts(msgspec.Struct):
    """What was seen, good or bad.

    Attributes:
        live_batches, replayed_batches, events, blocks: counted, each batch once; blocks stand at the end.
        first_sequence, last_sequence: of all batches seen; None before any.
        dialects: of the events.
        replay_frames: frames of a replayed message after the delimiter: 2 (``seed`` framing) or 3 (``topic``).
        speaks_extension: whether the publisher knows this kit's extended replay requests.
        lost_live: batches that did not come live and were had by replay.
        chained_blocks, off_chain_blocks: blocks whose hash was compared with SGLang's page chain, and is another.
        knows_history: the judge saw the stream from where its cache was empty.
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


class StreamVerdict(msgspec.Struct, frozen=True):
    """The judgement: every broken rule in the order seen, and the names of rules that could be judged at all."""

    facts: StreamFacts
    violations: tuple[Violation, ...]
    judged: frozenset[str]


def judge_stream(record: StreamRecord, expected: Expectations) -> StreamVerdict:
    """Judge what was heard of one stream."""
    return _Judge(record, expected).verdict()


class _Judge:
    def __init__(self, record: StreamRecord, expected: Expectations) -> None:
        self.record = record
        self.expected = expected
        self.facts = StreamFacts(speaks_extension=record.extended)
        self.judged: set[str] = {"speaks"}
        self.live: dict[int, bytes] = {}
        self.replayed: dict[int, bytes] = {}
        self.later: dict[int, bytes] = {}

    def verdict(self) -> StreamVerdict:
        violations = [*self._live_frames(), *self._replays(), *self._history()]
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
            sequence = _sequence(frames)
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
            if sent is None or read_strictly(payload, self.expected.rank).is_base:
                continue
            self.judged.add("replay-same")
            if sent != payload:
                yield Violation("replay-same", f"batch {sequence}: {len(sent)} bytes live, others by replay")

    def _answer(self, asked: str, answer: ReplayAnswer, payloads: dict[int, bytes]) -> Iterator[Violation]:
        self.judged |= {"replay-answers", "replay-end"}
        if answer.is_silence:
            yield Violation("replay-answers", f"nothing came for a request {asked}")
            return
        if not answer.ended and not answer.is_overlong:
            yield Violation("replay-end", f"{len(answer.messages)} messages and no end marker for a request {asked}")
        last: int | None = None
        for frames in answer.messages:
            self.judged.add("replay-frames")
            sequence = _sequence(frames) if len(frames) in (2, 3) else None
            if sequence is None:
                yield Violation("replay-frames", f"{len(frames)} frames of {[len(frame) for frame in frames]} bytes")
                continue
            self.facts.replay_frames = tuple(sorted({*self.facts.replay_frames, len(frames)}))
            self.judged.add("replay-order")
            if last is not None and sequence != last + 1:
                yield Violation("replay-order", f"number {sequence} after {last} for a request {asked}")
            last = sequence
            payloads[sequence] = frames[-1]

    def _bare(self, rule: str, asked: str, answer: ReplayAnswer | None) -> Iterator[Violation]:
        if answer is None:
            return
        self.judged.add(rule)
        if answer.messages or not answer.ended:
            came = f"{len(answer.messages)} messages" + ("" if answer.ended else " and no end marker")
            yield Violation(rule, f"a request {asked} got {came}")

    def _history(self) -> Iterator[Violation]:
        # What the first answer says of a number goes before the live batch: it may be a base that holds all before it.
        payloads = self.later | self.live | self.replayed
        facts = self.facts
        facts.replayed_batches = len(payloads.keys() - self.live.keys())
        if not payloads:
            yield Violation("speaks", "no batch came, neither live nor by replay")
            return
        facts.first_sequence, facts.last_sequence = min(payloads), max(payloads)
        if self.live:
            facts.lost_live = sum(min(self.live) < each < max(self.live) for each in payloads.keys() - self.live.keys())
        ledger = EventLedger(block_size=self.expected.block_size, is_complete=facts.first_sequence == 0)
        last: int | None = None
        for sequence, payload in sorted(payloads.items()):
            if last is not None:
                self.judged.add("no-gap")
                if sequence != last + 1:
                    ledger.is_complete = False
                    yield Violation("no-gap", f"{sequence - last - 1} numbers after {last} came in no way")
            last = sequence
            for violation in self._batch(read_strictly(payload, self.expected.rank), ledger):
                yield Violation(violation.rule, f"batch {sequence}: {violation.seen}")
        facts.blocks = len(ledger.blocks())
        facts.chained_blocks, facts.off_chain_blocks = ledger.num_chained, ledger.num_off_chain
        facts.knows_history = ledger.is_complete

    def _batch(self, batch: StrictBatch, ledger: EventLedger) -> Iterator[Violation]:
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


def _sequence(frames: Frames) -> int | None:
    """The number of a message, read as both framings have it: the last frame but one."""
    frame = frames[-2]
    if len(frame) != _SEQUENCE_BYTES or frame[0] & 0x80:
        return None
    return int.from_bytes(frame, "big")
