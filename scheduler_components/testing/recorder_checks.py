"""Checks of every recorder of a block table. Run each of ``RECORDER_CHECKS`` on a recorder of your own.

A check takes a function that opens an empty recorder of blocks of ``BLOCK_SIZE`` tokens, and raises
``ConformanceError`` with its trace. ``CopyCountingTable`` is a naive model for random histories. ``RecorderMachine``
finds further errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from scheduler_components import AllBlocksCleared, BlockStored
from scheduler_components.cache import BlockTableRecorder, PrefixNamespace, hash_pages
from scheduler_components.testing.check_trace import CheckTrace, checks_in
from scheduler_components.testing.event_ledger import EventLedger
from scheduler_components.testing.interfaces import BLOCK_SIZE

__all__ = ["RECORDER_CHECKS", "BlockLocation", "CopyCountingTable", "OpenRecorder"]

OpenRecorder = Callable[[], BlockTableRecorder]
"""Opens an empty recorder."""

BlockLocation = tuple[str | None, int | None]
"""A medium and a KV-cache group, as a recorder takes them: None is the default of each."""


@dataclass
class CopyCountingTable:
    """A model of a block table: the number of copies per location and hash, and the parent of each hash."""

    copies: Counter[tuple[BlockLocation, int]] = field(default_factory=Counter)
    parents: dict[int, int | None] = field(default_factory=dict)

    def store(self, hashes: Iterable[int], parent: int | None, place: BlockLocation) -> None:
        for block_hash in hashes:
            self.parents[block_hash] = parent
            self.copies[place, block_hash] += 1
            parent = block_hash

    def remove(self, hashes: Iterable[int], place: BlockLocation) -> None:
        for block_hash in hashes:
            self.copies[place, block_hash] = max(0, self.copies[place, block_hash] - 1)

    def reachable_hashes(self, place: BlockLocation) -> set[int]:
        """Return the blocks of a reader's view: those at ``place`` whose ancestors are stored on any medium of the
        group.
        """
        held = {(at[1], block_hash) for (at, block_hash), count in self.copies.items() if count}
        here = {block_hash for (at, block_hash), count in self.copies.items() if count and at == place}
        return {block_hash for block_hash in here if self._is_whole(held, place[1], block_hash)}

    def _is_whole(self, held: set[tuple[int | None, int]], group_idx: int | None, block_hash: int | None) -> bool:
        while block_hash is not None:
            if (group_idx, block_hash) not in held:
                return False
            block_hash = self.parents[block_hash]
        return True


_PROMPT = (1, 2, 3, 4, 5, 6)
_A, _B, _C = hash_pages(_PROMPT, BLOCK_SIZE)


def check_parents_are_published_first(open_recorder: OpenRecorder) -> None:
    """Stores have parents and tokens, and removals follow."""
    trace, recorder, ledger = _begin("A prompt's blocks are published as they were stored", open_recorder)
    trace.call("stored a chain of three", lambda: recorder.store((_A, _B, _C), _PROMPT))
    _read(trace, recorder, ledger, {_A, _B, _C})
    trace.expect(_PROMPT, ledger.prefix(_C), "the tokens up to its end")
    trace.call("removed the last", lambda: recorder.remove((_C,)))
    _read(trace, recorder, ledger, {_A, _B})
    trace.call("stored it again below the second", lambda: recorder.store((_C,), _PROMPT[4:], _B))
    _read(trace, recorder, ledger, {_A, _B, _C})
    trace.expect((), tuple(recorder.take_events()), "events taken twice")


def check_removal_is_published_with_the_last_copy(open_recorder: OpenRecorder) -> None:
    """The removal of one of two copies is not published."""
    trace, recorder, ledger = _begin("A block is published until its last copy is removed", open_recorder)
    for _ in range(2):
        trace.call("stored a copy of a chain of two", lambda: recorder.store((_A, _B), _PROMPT[:4]))
    _read(trace, recorder, ledger, {_A, _B})
    trace.call("removed one copy of each", lambda: recorder.remove((_B, _A)))
    _read(trace, recorder, ledger, {_A, _B})
    trace.call("removed the other copies", lambda: recorder.remove((_B, _A)))
    _read(trace, recorder, ledger, set())


def check_children_are_removed_before_parents(open_recorder: OpenRecorder) -> None:
    """The order holds for every order of the engine's removals, also over several calls."""
    trace, recorder, ledger = _begin("No block is removed before its children", open_recorder)
    trace.call("stored a chain of three", lambda: recorder.store((_A, _B, _C), _PROMPT))
    trace.call("removed the root alone", lambda: recorder.remove((_A,)))
    _read(trace, recorder, ledger, set())
    trace.call("removed the others, parents first", lambda: recorder.remove((_B, _C)))
    _read(trace, recorder, ledger, set())
    trace.call("stored the chain again", lambda: recorder.store((_A, _B, _C), _PROMPT))
    _read(trace, recorder, ledger, {_A, _B, _C})


def check_orphans_wait_for_their_parent(open_recorder: OpenRecorder) -> None:
    """A block without its parent is published together with the parent."""
    trace, recorder, ledger = _begin("No block is published before its parent", open_recorder)
    trace.call("stored the third block alone", lambda: recorder.store((_C,), _PROMPT[4:], _B))
    _read(trace, recorder, ledger, set())
    trace.call("stored the second below a root that is unknown", lambda: recorder.store((_B,), _PROMPT[2:4], _A))
    _read(trace, recorder, ledger, set())
    trace.call("stored the root", lambda: recorder.store((_A,), _PROMPT[:2]))
    _read(trace, recorder, ledger, {_A, _B, _C})


def check_hashes_are_signed(open_recorder: OpenRecorder) -> None:
    """Unsigned 64-bit hashes and bytes become signed 64-bit integers in every field."""
    trace, recorder, ledger = _begin("Hashes are published as signed 64-bit integers", open_recorder)
    trace.call("stored an unsigned hash", lambda: recorder.store((2**64 - 5,), (1, 2)))
    long = bytes(24) + (2**64 - 9).to_bytes(8, "big")
    trace.call("stored 32 bytes below it", lambda: recorder.store((long,), (3, 4), 2**64 - 5))
    _read(trace, recorder, ledger, {-5, -9})
    trace.call("removed both", lambda: recorder.remove((long, 2**64 - 5)))
    _read(trace, recorder, ledger, set())


def check_groups_and_media_are_separate(open_recorder: OpenRecorder) -> None:
    """One hash in two groups, or on two media, is two blocks."""
    trace, recorder, ledger = _begin("A block of another group or medium is another block", open_recorder)
    places: tuple[BlockLocation, ...] = ((None, 0), (None, 1), ("CPU", 0))
    for medium, group in places:
        trace.call(
            f"stored a block on {medium}, group {group}",
            lambda medium=medium, group=group: recorder.store((_A,), (1, 2), medium=medium, group_idx=group),  # type: ignore[misc]
        )
    for index, (medium, group) in enumerate(places):
        _read(trace, recorder, ledger, {_A}, (medium, group))
        trace.call(
            f"removed it from {medium}, group {group}",
            lambda medium=medium, group=group: recorder.remove((_A,), medium=medium, group_idx=group),  # type: ignore[misc]
        )
        _read(trace, recorder, ledger, set(), (medium, group))
        for other in places[index + 1 :]:
            trace.expect({_A}, ledger.hashes(*other), f"the blocks in {other}")


def check_chain_may_span_media(open_recorder: OpenRecorder) -> None:
    """A block on the host with a parent on the device is published, and remains if the parent moves."""
    trace, recorder, ledger = _begin("A chain may span several media", open_recorder)
    trace.call("stored a chain of two on the device", lambda: recorder.store((_A, _B), _PROMPT[:4]))
    trace.call("stored a third on the host", lambda: recorder.store((_C,), _PROMPT[4:], _B, medium="CPU"))
    _read(trace, recorder, ledger, {_A, _B})
    _read(trace, recorder, ledger, {_C}, ("CPU", None))
    trace.call("stored the root on the host too", lambda: recorder.store((_A,), _PROMPT[:2], medium="CPU"))
    trace.call("removed it from the device", lambda: recorder.remove((_A,)))
    _read(trace, recorder, ledger, {_B})
    _read(trace, recorder, ledger, {_A, _C}, ("CPU", None))


def check_clear_removes_everything(open_recorder: OpenRecorder) -> None:
    """A clear removes every block, also orphans, and is published."""
    trace, recorder, ledger = _begin("clear() removes every block and is published", open_recorder)
    for _ in range(2):
        trace.call("stored a copy of a chain of two", lambda: recorder.store((_A, _B), _PROMPT[:4]))
    _read(trace, recorder, ledger, {_A, _B})
    trace.call("stored the root on the host too", lambda: recorder.store((_A,), (1, 2), medium="CPU"))
    trace.call("stored an orphan", lambda: recorder.store((_C,), _PROMPT[4:], 99))
    trace.call("clear()", recorder.clear)
    events = tuple(recorder.take_events())
    trace.require(AllBlocksCleared() in events, "AllBlocksCleared among the events", events)
    trace.expect([], ledger.apply_all(events), "broken rules of the wire")
    trace.expect({}, ledger.blocks(), "the remaining blocks")
    trace.call("stored the chain again", lambda: recorder.store((_A, _B), _PROMPT[:4]))
    _read(trace, recorder, ledger, {_A, _B})
    trace.call("removed it", lambda: recorder.remove((_B, _A)))
    _read(trace, recorder, ledger, set())


def check_identity_is_published(open_recorder: OpenRecorder) -> None:
    """Adapter, salt and extra keys are published, also of blocks that waited for a parent."""
    trace, recorder, _ = _begin("The identity of a block is published with it", open_recorder)
    space = PrefixNamespace(lora_id=3, lora_name="poems", cache_salt="tenant")

    def store_late() -> None:
        recorder.store((_B,), _PROMPT[2:4], _A, namespace=space, extra_keys=[("image", 7)])
        recorder.store((_A,), _PROMPT[:2], namespace=space, extra_keys=[None])

    trace.call("stored a block with extra keys, then its parent without", store_late)
    published: dict[int, object] = {}
    for event in trace.call("took its events", recorder.take_events):
        if isinstance(event, BlockStored):
            keys = event.extra_keys or (None,) * len(event.block_hashes)
            for block_hash, key in zip(event.block_hashes, keys, strict=True):
                published[block_hash] = (event.lora_id, event.lora_name, event.cache_salt, key and tuple(key))
    trace.expect({_A: (3, "poems", "tenant", None), _B: (3, "poems", "tenant", ("image", 7))}, published)


def check_unknown_block_is_not_removed(open_recorder: OpenRecorder) -> None:
    """Removals of unknown blocks change nothing and are not published."""
    trace, recorder, ledger = _begin("The removal of an unknown block is not published", open_recorder)
    trace.call("stored a block", lambda: recorder.store((_A,), (1, 2)))
    trace.call("removed another", lambda: recorder.remove((_B,)))
    trace.call("removed it from the host", lambda: recorder.remove((_A,), medium="CPU"))
    trace.call("removed it from another group", lambda: recorder.remove((_A,), group_idx=1))
    _read(trace, recorder, ledger, {_A})


def check_random_history_matches_the_table(open_recorder: OpenRecorder) -> None:
    """Five hundred random calls: the events break no rule and add up to the blocks that can be reached."""
    trace, recorder, ledger = _begin("A reader of the events has the table's blocks", open_recorder)
    table, random = CopyCountingTable(), Random(12)
    places: tuple[BlockLocation, ...] = ((None, None), ("CPU", None), (None, 1))
    for number in range(500):
        place = random.choice(places)
        prompt = random.choices((0, 1), k=2 * BLOCK_SIZE * random.randint(1, 2))
        hashes = hash_pages(prompt, BLOCK_SIZE)
        first = random.choice((0, 0, 0, 1))
        if random.random() < 0.5:
            parent = hashes[first - 1] if first else None
            table.store(hashes[first:], parent, place)
            tokens = prompt[first * BLOCK_SIZE :]
            recorder.store(hashes[first:], tokens, parent, medium=place[0], group_idx=place[1])
        else:
            table.remove(gone := random.sample(hashes, random.randint(1, 2)), place)
            recorder.remove(gone, medium=place[0], group_idx=place[1])
        if number % 3 == 2:  # One drain has several calls.
            for each in places:
                _read(trace, recorder, ledger, table.reachable_hashes(each), each)


def _begin(title: str, open_recorder: OpenRecorder) -> tuple[CheckTrace, BlockTableRecorder, EventLedger]:
    trace = CheckTrace(title)
    recorder = trace.call(f"opened a recorder of blocks of {BLOCK_SIZE} tokens", open_recorder)
    return trace, recorder, EventLedger(block_size=BLOCK_SIZE)


def _read(
    trace: CheckTrace,
    recorder: BlockTableRecorder,
    ledger: EventLedger,
    expected: set[int],
    place: BlockLocation = (None, None),
) -> None:
    """Apply the new events; they must break no rule and leave ``expected``."""
    events = trace.call("took its events", recorder.take_events)
    trace.expect([], ledger.apply_all(events), "broken rules of the wire")
    trace.expect(sorted(expected), sorted(ledger.hashes(*place)), f"the blocks in {place}")


RECORDER_CHECKS: tuple[Callable[[OpenRecorder], None], ...] = checks_in(globals())
"""All checks of a recorder."""
