"""The state machines of the test kit pass on the kit's own implementations and find broken ones."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Set
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from kit.searches import num_examples
from kit.variants import found, instead_of, variants

from observability.kv_stream import (
    BatchApplier,
    BlockView,
    FollowPolicy,
    NullStreamListener,
    StreamCursor,
    StreamFollower,
    StreamState,
    Tier,
)
from observability.kv_stream.instructions import SendReplayRequest
from scheduler_components import BlockStored
from scheduler_components.cache import RadixCache
from scheduler_components.hicache import MemoryPageStore, open_file_page_store
from scheduler_components.kv_events import BatchDecoder
from scheduler_components.kv_events.replay_messages import END_SEQ, encode_plain_request
from scheduler_components.ports import PageStore
from scheduler_components.testing import EventLedger, FollowerMachine, PageStoreMachine, PrefixCacheMachine
from scheduler_components.testing.interfaces import MAX_BYTES, FollowerCore, page_of

# A fault may need hundreds of traces. The search is derandomized, so that the test always finds it.
MANY = settings(
    max_examples=3_000, stateful_step_count=30, deadline=None, phases=[Phase.generate], database=None, derandomize=True
)
FEW = settings(
    max_examples=num_examples(1), stateful_step_count=30, deadline=None, phases=[Phase.generate], database=None
)


class MemoryStoreMachine(PageStoreMachine):
    def open_store(self) -> PageStore:
        return MemoryPageStore(MAX_BYTES)


class FileStoreMachine(PageStoreMachine):
    def open_store(self) -> PageStore:
        self.directory = Path(tempfile.mkdtemp())
        return open_file_page_store(self.directory, capacity_bytes=MAX_BYTES)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.directory)


class SmallStoreMachine(PageStoreMachine):
    loses_pages = True

    def open_store(self) -> PageStore:
        return MemoryPageStore(2 * len(page_of("a")))


@pytest.mark.soak
@pytest.mark.parametrize("machine", [MemoryStoreMachine, FileStoreMachine, SmallStoreMachine])
def test_the_kits_page_stores_pass(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=FEW)


class KitFollower:
    """The kit's ``StreamFollower`` behind the interface of the machine."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.view = BlockView()
        self.request: SendReplayRequest | None = None
        self.open_request_id: int | None = None
        self.frames: deque[tuple[int, bytes]] = deque()
        applier = BatchApplier(
            rank=0, view=self.view, decoder=BatchDecoder(), listener=NullStreamListener(), wall_clock=lambda: 0.0
        )
        self.follower = StreamFollower(
            cursor=StreamCursor(has_replay=True),
            applier=applier,
            channel=self,
            policy=FollowPolicy(),
            jitter=lambda: 0.0,
        )
        self.follower.begin(0.0)
        self.follower.on_connected(0.0)

    def send(self, request: SendReplayRequest) -> None:
        self.request, self.open_request_id = request, request.request_id

    def cancel(self) -> None:
        self.request = self.open_request_id = None

    def on_live_batch(self, sequence: int, payload: bytes) -> None:
        self.frames.append((sequence, payload))
        self.deliver_frames()

    def deliver_frames(self) -> None:
        """Deliver live frames. They stay in the socket while the cursor does not accept them."""
        while self.frames and self.follower.cursor.is_accepting_live:
            self.follower.on_live_batch(*self.frames.popleft(), self.now_s)

    def pop_replay_request(self) -> bytes | None:
        request, self.request = self.request, None
        return None if request is None else request.request.encode()

    def on_replay_message(self, sequence: bytes, payload: bytes) -> None:
        if self.open_request_id is None:
            return
        if sequence == END_SEQ:
            self.follower.on_replay_marker(self.open_request_id, payload, self.now_s)
        else:
            self.follower.on_replay_batch(self.open_request_id, int.from_bytes(sequence, "big"), payload, self.now_s)
        self.deliver_frames()

    def advance_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.follower.tick(self.now_s)
        self.deliver_frames()

    def blocks(self) -> Set[int]:
        return self.view.blocks(0, Tier.DEVICE)

    def is_live(self) -> bool:
        return self.follower.cursor.state is StreamState.LIVE


class KitFollowerMachine(FollowerMachine):
    def open_follower(self) -> FollowerCore:
        return KitFollower()


@pytest.mark.soak
def test_the_kits_follower_passes() -> None:
    run_state_machine_as_test(KitFollowerMachine, settings=settings(FEW, max_examples=num_examples(2)))


class SimpleFollower:
    """A correct, slow follower: it requests a replay after every gap and is live only after the end marker."""

    def __init__(self) -> None:
        self.ledger, self.last = EventLedger(), -1
        self.has_gap, self.wants_replay = True, True

    def on_live_batch(self, sequence: int, payload: bytes) -> None:
        if sequence > self.last + 1:
            self.has_gap = self.wants_replay = True
        self.apply(sequence, payload)

    def apply(self, sequence: int, payload: bytes) -> None:
        if sequence == self.last + 1:
            self.last = sequence
            self.ledger.apply_all(BatchDecoder().decode(payload).events)

    def pop_replay_request(self) -> bytes | None:
        wants_replay, self.wants_replay = self.wants_replay, False
        return encode_plain_request(self.last + 1) if wants_replay else None

    def on_replay_message(self, sequence: bytes, payload: bytes) -> None:
        if sequence == END_SEQ:
            self.has_gap = False
        else:
            self.apply(int.from_bytes(sequence, "big"), payload)

    def advance_time(self, seconds: float) -> None:
        self.wants_replay = True

    def blocks(self) -> Set[int]:
        return self.ledger.hashes()

    def is_live(self) -> bool:
        return not self.has_gap


class SimpleFollowerMachine(FollowerMachine):
    def open_follower(self) -> FollowerCore:
        return SimpleFollower()


@pytest.mark.soak
def test_a_simple_follower_passes() -> None:
    run_state_machine_as_test(SimpleFollowerMachine, settings=FEW)


class BrokenFollower(SimpleFollower):
    @instead_of("apply")
    def skips_gaps(self, sequence, payload):
        if sequence > self.last:
            self.last = sequence - 1
            super().apply(sequence, payload)

    @instead_of("apply")
    def applies_twice(self, sequence, payload):
        if sequence <= self.last:
            self.ledger.apply_all(BatchDecoder().decode(payload).events)
        super().apply(sequence, payload)

    never_requests_again = found(advance_time=lambda self, seconds: None)


class BrokenStore(MemoryPageStore):
    mixes_keys = found(batch_get=lambda self, keys: super().batch_get([key.replace("/", "-") for key in keys]))


class BrokenCache(RadixCache):
    evicts_one_more = found(evict=lambda self, num_pages: super().evict(num_pages + (num_pages > 0)))

    @instead_of("take_events")
    def omits_removals(self):
        return tuple(event for event in super().take_events() if isinstance(event, BlockStored))


OPENINGS = {
    BrokenFollower: (FollowerMachine, "open_follower", lambda kind: lambda self: kind()),
    BrokenStore: (PageStoreMachine, "open_store", lambda kind: lambda self: kind(MAX_BYTES)),
    BrokenCache: (
        PrefixCacheMachine,
        "open_cache",
        lambda kind: (
            lambda self, page_size, capacity_tokens, record: kind(
                page_size=page_size, capacity_tokens=capacity_tokens, record=record
            )
        ),
    ),
}


@pytest.mark.broken_variants
@pytest.mark.parametrize(("table", "name"), [(table, name) for table in OPENINGS for name in variants(table)])
def test_broken_parts_are_found(table: type, name: str) -> None:
    machine, method, opening = OPENINGS[table]
    [broken] = variants(table)[name]
    with pytest.raises(AssertionError):
        run_state_machine_as_test(type("Machine", (machine,), {method: opening(broken)}), settings=MANY)


def test_a_machine_names_the_method_to_override() -> None:
    with pytest.raises(TypeError, match="override open_cache"):
        PrefixCacheMachine().open_cache(1, 1, True)
    with pytest.raises(TypeError, match="override open_follower"):
        FollowerMachine()
    with pytest.raises(TypeError, match="override open_store"):
        PageStoreMachine()
