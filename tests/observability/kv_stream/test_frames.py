"""The parser returns a stream's own messages, counts all others, and never raises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from observability.kv_stream import FrameParser

NUMBERS = st.integers(-(2**63), 2**63 - 1).map(lambda number: number.to_bytes(8, "big", signed=True))
TOPICS = st.sampled_from([b"", b"kv", b"kv@pod1", b"kv@pod10"])
ANY_FRAME = st.one_of(st.binary(max_size=12), NUMBERS, TOPICS)


@given(topic=TOPICS, frames=st.one_of(st.tuples(TOPICS, NUMBERS, st.just(b"p")), st.lists(ANY_FRAME, max_size=5)))
def test_a_live_message_needs_the_exact_topic(topic: bytes, frames: list[bytes]) -> None:
    reader = FrameParser(topic)
    read = reader.parse_live(frames)
    is_frame = len(frames) == 3 and len(frames[1]) == 8 and frames[1][0] < 0x80
    is_own = is_frame and topic in (b"", frames[0])
    assert read == ((int.from_bytes(frames[1], "big"), frames[2]) if is_own else None)
    assert reader.bad_frames + reader.other_topics == (not is_own)
    if is_frame:
        assert reader.other_topics == (not is_own)


@given(frames=st.lists(ANY_FRAME, max_size=5))
def test_a_replay_message_is_parsed_from_its_last_two_frames(frames: list[bytes]) -> None:
    reader = FrameParser(b"kv")
    number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) > 1 and len(frames[-2]) == 8 else -2
    assert reader.parse_replay(frames) == (None if number < -1 else (number, frames[-1]))
    assert reader.bad_frames == (number < -1)
