"""The truth about a publisher: its blocks after every number, whatever was merged, restarted or unreadable."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.kv_stream import BlockView, Tier
from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored
from scheduler_components.kv_events import BatchDecoder
from worlds import BrokenPromise, LiveFrame, PublisherActor, PublisherShape

BLOCKS = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True).map(tuple)
MEDIUM = st.sampled_from([None, "CPU"])
EVENTS = st.one_of(
    st.builds(lambda blocks, medium: BlockStored(blocks, None, blocks, 1, None, medium), BLOCKS, MEDIUM),
    st.builds(BlockRemoved, BLOCKS, MEDIUM),
    st.just(AllBlocksCleared()),
)
STEPS = st.lists(st.one_of(EVENTS, st.sampled_from(["send", "send", "drain", "poison", "restart"])), max_size=30)


def publisher(sent: list[LiveFrame], **shape: object) -> PublisherActor:
    return PublisherActor(
        PublisherShape(**shape),  # type: ignore[arg-type]
        broadcast=sent.append,
        first_sequence=lambda epoch: 100 * epoch,
        clock=lambda: 0.0,
    )


@given(steps=STEPS, max_pending=st.integers(1, 4))
def test_the_state_of_each_number_is_what_a_reader_of_all_frames_has(steps: list[Any], max_pending: int) -> None:
    sent = list[LiveFrame]()
    actor = publisher(sent, max_pending=max_pending)
    for step in steps:
        match step:
            case "send":
                actor.idle()
            case "drain":
                actor.sender.send_pending(0.0)
            case "poison":
                actor.send_poison()
            case "restart":
                actor.start_epoch()
            case _:
                actor.publish_events((step,))
    actor.idle()
    view, epoch = BlockView(), 0
    for frame in sent:
        assert frame.epoch is not None
        if frame.epoch != epoch:
            view, epoch = BlockView(), frame.epoch
        view.apply(0, BatchDecoder().decode(frame.frames[2]).events)
        blocks = {(each, tier) for tier in Tier for each in view.blocks(0, tier)}
        assert actor.states[frame.epoch, frame.sequence] == blocks
        assert (frame.epoch, frame.sequence) in actor.stamps
    assert actor.states[actor.epoch, actor.stream.next_sequence - 1] == actor.held


def test_a_hole_in_the_numbers_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[LiveFrame]()
    actor = publisher(sent)
    append = type(actor.stream).append

    def burn(stream: object, payload: bytes, changes: object = None) -> int:
        append(stream, payload, changes)  # type: ignore[arg-type]
        return append(stream, payload, changes)  # type: ignore[arg-type]

    monkeypatch.setattr(type(actor.stream), "append", burn)
    actor.publish_events((AllBlocksCleared(),))
    with pytest.raises(BrokenPromise, match="numbers have no gaps"):
        actor.idle()
