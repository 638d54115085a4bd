"""A subscriber's core on a network that loses, repeats and delays, in every order that Hypothesis finds.

The publisher is a plain one, as SGLang and vLLM have it: it keeps every batch, answers each replay request from a
number, and knows no extension. It does not restart.

- After every step: who says that it is live believes in what was the publisher's state after some batch. It may be
  late; it may not be wrong.
- Once faults stop and time passes: it is live, and its belief is the present state.

For a core of your own::

    class MyFollowerMachine(FollowerMachine):
        def open_follower(self):
            return MyFollower()

    TestMyFollower = MyFollowerMachine.TestCase
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_components.kv_events.codec import BatchEncoder
from scheduler_components.kv_events.events import KVCacheEvent, KVEventBatch
from scheduler_components.kv_events.replay_wire import END_SEQ
from scheduler_components.testing.fakes.network import Fault, FaultyNetwork
from scheduler_components.testing.histories import ChainHistory
from scheduler_components.testing.parts import FollowerCore

__all__ = ["FollowerMachine"]

_HEALING_ROUNDS = 12
_QUESTIONS_A_ROUND = 4
_ROUND_S = 30.0
"""Longer than any pause or probe interval of a subscriber under test should be."""


class FollowerMachine(RuleBasedStateMachine):
    """Subclass it and override ``open_follower``."""

    def open_follower(self) -> FollowerCore:
        """Make the core under test, connected; it has seen nothing yet."""
        raise TypeError(f"{type(self).__name__} does not say which follower it drives: override open_follower")

    def __init__(self) -> None:
        super().__init__()
        self.follower = self.open_follower()
        self.history = ChainHistory()
        self.payloads: list[bytes] = []
        self.states: set[frozenset[int]] = {frozenset()}
        self.plan: list[Fault] = []
        self.network: FaultyNetwork[tuple[int, bytes]] = FaultyNetwork(self.plan)
        self.open_request: bytes | None = None

    def publish(self, event: KVCacheEvent, fault: Fault) -> None:
        """Number one batch and send it; the fault is what its live message meets."""
        number = len(self.payloads)
        self.payloads.append(BatchEncoder().encode(KVEventBatch(float(number + 1), (event,)), 0))
        self.states.add(frozenset(self.history.standing))
        self.plan.append(fault)
        self.deliver(self.network.carry((number, self.payloads[-1])))

    def deliver(self, messages: list[tuple[int, bytes]]) -> None:
        for number, payload in messages:
            self.follower.live(number, payload)

    @rule(token=st.integers(0, 3), fault=st.sampled_from(Fault))
    def store(self, token: int, fault: Fault) -> None:
        self.publish(self.history.store(token, token), fault)

    @precondition(lambda self: self.history.standing)
    @rule(fault=st.sampled_from(Fault))
    def remove(self, fault: Fault) -> None:
        self.publish(self.history.remove(), fault)

    @rule(fault=st.sampled_from(Fault))
    def clear(self, fault: Fault) -> None:
        self.publish(self.history.clear(), fault)

    @rule(most=st.none() | st.integers(0, 3))
    def answer(self, most: int | None) -> None:
        """Answer the open request: whole, or cut after so many batches and without its end."""
        self.open_request = self.follower.request() or self.open_request
        request, self.open_request = self.open_request, None
        if request is None:
            return
        start = int.from_bytes(request, "big")  # a longer request is a huge number to a plain publisher
        batches = list(enumerate(self.payloads))[start:]
        for number, payload in batches[:most]:
            self.follower.answered(number.to_bytes(8, "big"), payload)
        if most is None:
            self.follower.answered(END_SEQ, b"")

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.follower.advance(seconds)

    @invariant()
    def is_never_live_and_wrong(self) -> None:
        if self.follower.is_live():
            blocks = frozenset(self.follower.blocks())
            assert blocks in self.states, f"live with {sorted(blocks)}, which was never the publisher's state"

    def teardown(self) -> None:
        self.deliver(self.network.settle())
        for _ in range(_HEALING_ROUNDS):
            for _ in range(_QUESTIONS_A_ROUND):  # an answer may lead to the next question
                self.answer(None)
            self.is_never_live_and_wrong()
            self.follower.advance(_ROUND_S)
        for _ in range(_QUESTIONS_A_ROUND):
            self.answer(None)
        if self.payloads:
            assert self.follower.is_live(), "not live although all faults have stopped"
            assert set(self.follower.blocks()) == set(self.history.standing)
