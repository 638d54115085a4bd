"""One publisher, several subscribers and a network that loses, repeats, reorders, cuts and delays.

Everything that happens is a step by name, so that Hypothesis can shrink a story and a person can read it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from observability.kv_stream.cursor import StreamCursor
from observability.kv_stream.instructions import StreamState
from observability.testing.model_publisher import Frame, ModelPublisher
from observability.testing.model_subscriber import POLICY, ModelSubscriber
from scheduler_components.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored

__all__ = ["FaultyWorld", "Story"]

HEAL_S = 2 * POLICY.probe_interval_s + POLICY.answer_timeout_s + POLICY.retry_max_s
"""Two probe intervals plus the sync, with a question that was lost and the pause after it before."""

Story: TypeAlias = list[tuple[Any, ...]]
"""Steps: a method's name and its arguments."""


class FaultyWorld:
    """One publisher, subscribers that it serves by the extension, and others that it does not.

    Args:
        window: batches that the publisher keeps one by one.
        seq_base: of its lives, ``"zero"`` or ``"clock"``.
        num_extended, num_plain: subscribers of either kind, numbered in this order.
    """

    def __init__(self, *, window: int = 4, seq_base: str = "zero", num_extended: int = 2, num_plain: int = 1) -> None:
        self.now_s = 0.0
        self.publisher = ModelPublisher(window=window, seq_base=seq_base)
        self.subscribers = [
            ModelSubscriber(
                self.publisher,
                f"subscriber {number} ",
                has_extension=number < num_extended,
                cursor=StreamCursor(has_replay=True),
            )
            for number in range(num_extended + num_plain)
        ]

    def tell(self, story: Story) -> None:
        """All subscribers join, the story happens, and then everything is as it should be."""
        self.play([("store", 0, 3, False), ("send",)])
        for who in range(len(self.subscribers)):
            self.play([("connect", who), *[("serve", who, 9, "none")] * 2])
        self.play(story)
        self.heal()
        self.check_converged()

    def play(self, story: Story) -> None:
        """Carry out each step, and check after it."""
        for name, *arguments in story:
            getattr(self, name)(*arguments)
            for each in self.subscribers:
                each.check()

    def chosen(self, who: int) -> ModelSubscriber:
        return self.subscribers[who % len(self.subscribers)]

    def spread(self, frames: list[Frame]) -> None:
        for each in self.subscribers:
            if each.connection is not None and not each.connection.is_broken:
                each.connection.frames.extend((self.publisher.life, *frame) for frame in frames)

    # --- steps ---

    def store(self, block: int, count: int, on_host: bool) -> None:
        hashes = tuple(range(block, block + count))
        parent = block - 1 if block else None
        self.publisher.publish(BlockStored(hashes, parent, hashes, 1, None, "CPU" if on_host else None))

    def remove(self, block: int, count: int, on_host: bool) -> None:
        self.publisher.publish(BlockRemoved(tuple(range(block, block + count)), "CPU" if on_host else None))

    def clear(self) -> None:
        self.publisher.publish(AllBlocksCleared())

    def send(self) -> None:
        self.spread(self.publisher.send_pending())

    def poison(self) -> None:
        self.spread(self.publisher.send_poison())

    def connect(self, who: int) -> None:
        self.chosen(who).connect(self.now_s)

    def disconnect(self, who: int) -> None:
        self.chosen(who).disconnect(self.now_s)

    def deliver(self, who: int, count: int, fault: str) -> None:
        self.chosen(who).deliver(count, fault, self.now_s)

    def serve(self, who: int, count: int, fault: str) -> None:
        self.chosen(who).serve(count, fault, self.now_s)

    def deliver_late(self, who: int) -> None:
        self.chosen(who).receive_late(self.now_s)

    def wait(self, tenths: int) -> None:
        until_s = self.now_s + tenths / 10
        for each in self.subscribers:
            while (due_s := each.follower.next_deadline_s) <= until_s:
                each.follower.tick(max(due_s, self.now_s))
        self.now_s = until_s

    def restart(self, is_hidden: bool) -> None:
        """The publisher's next life; ``is_hidden`` behind a proxy, which keeps up the connections of the extended."""
        for each in self.subscribers:
            if each.connection is not None:
                stays = is_hidden and each.has_extension
                each.connection.was_restarted |= stays
                each.connection.is_broken |= not stays
        self.spread(self.publisher.begin_life())

    # --- the end ---

    def heal(self) -> None:
        """Faults stop; what is asked is answered and what is sent arrives, for as long as recovery may take."""
        self.send()
        for each in self.subscribers:
            if each.connection is not None and each.connection.is_broken:
                each.disconnect(self.now_s)
            each.connect(self.now_s)
        for _ in range(round(HEAL_S * 10)):
            for each in self.subscribers:
                for _ in range(3):
                    each.serve(1_000, "none", self.now_s)
                    each.deliver(1_000, "none", self.now_s)
                each.check()
            self.wait(1)

    def check_converged(self) -> None:
        """Every view is what was published, and says so."""
        publisher = self.publisher
        for each in self.subscribers:
            assert each.blocks == publisher.held, f"{each.name} has not converged: {each.follower.cursor!r}"
            assert each.follower.cursor.last_seq == publisher.stream.next_sequence - 1
            if each.follower.cursor.is_extended:
                assert each.proved_life == publisher.life
            if not publisher.is_poisoned and (each.has_extension or len(publisher.stream)):
                assert each.state is StreamState.LIVE  # a plain one cannot tell an empty stream from a silent one
