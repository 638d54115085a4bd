"""A base that some client keeps from folding: that client is cut, and the next time it gets all."""

from __future__ import annotations

import pytest

from scheduler_components import BlockStored, KVEventBatch
from scheduler_components.kv_events import (
    END_SEQ,
    BatchDecoder,
    BatchEncoder,
    EventStream,
    ReplayCursors,
    Request,
    Verb,
)

EPOCH, TOKEN, CLIENT = bytes(16), b"12345678", b"c"
MAX_STEPS = 200


class Turns:
    """A publisher's turns without sockets, as its edge takes them: append, fold, cut, serve a bite."""

    def __init__(self) -> None:
        self.stream = EventStream(epoch=EPOCH, max_steps=MAX_STEPS, max_bytes=10**9)
        self.encoder = BatchEncoder()
        self.cursors = ReplayCursors(self.stream, encoder=self.encoder, rank=0)
        self.answer: list[tuple[bytes, ...]] = []

    def take(self, *, batches: int, sends: int) -> None:
        for _ in range(batches):
            block = self.stream.next_sequence + 1
            event = BlockStored((block,), None, (block,), 1, None)
            self.stream.append(self.encoder.encode(KVEventBatch(1.0, (event,)), 0))
        self.stream.fold_some()
        if self.stream.is_held_up:
            self.cursors.cut_pinned()
        for _ in range(sends):
            if CLIENT in self.cursors.clients:
                message = self.cursors.message(CLIENT)
                self.answer += [] if message is None else [message]
                self.cursors.sent(CLIENT)

    def ask(self, request: Request) -> None:
        self.answer = []
        self.cursors.ask([CLIENT, b"", request.encode()])

    @property
    def is_answered(self) -> bool:
        return bool(self.answer) and self.answer[-1][-2] == END_SEQ and CLIENT not in self.cursors.clients

    def blocks(self) -> list[int]:
        batches = [BatchDecoder().decode(each[-1]) for each in self.answer if each[-2] != END_SEQ]
        return [
            block
            for batch in batches
            for event in batch.events
            if isinstance(event, BlockStored)
            for block in event.block_hashes
        ]


@pytest.mark.parametrize("batches", [1, 8], ids=["a batch a turn", "bursts"])
@pytest.mark.parametrize("request_", [Request(0), Request(0, Verb.SNAPSHOT, TOKEN, EPOCH)], ids=["plain", "snapshot"])
def test_a_client_that_was_cut_and_asks_again_at_once_gets_all(batches: int, request_: Request) -> None:
    turns = Turns()
    for _ in range(60):
        turns.take(batches=8, sends=0)
    turns.ask(request_)
    for _ in range(MAX_STEPS + 1):
        turns.take(batches=batches, sends=0)
    assert turns.cursors.num_truncated == 1
    for _ in range(10):
        turns.ask(request_)
        held = turns.stream.next_sequence
        for _ in range(200):
            turns.take(batches=batches, sends=32)
            if turns.is_answered:
                break
        assert turns.blocks()[:held] == list(range(1, held + 1))
    assert turns.cursors.num_truncated == 1


def test_what_comes_is_folded_as_quickly_as_it_comes() -> None:
    turns = Turns()
    for _ in range(50):
        turns.take(batches=30, sends=0)
        assert len(turns.stream) <= MAX_STEPS + 30
