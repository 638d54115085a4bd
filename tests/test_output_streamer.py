"""A client assembles the request's output with each token once, despite a slow receiver and retractions."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import OutputStreamer
from scheduler_components.output_streamer import FinalDeltaBuffer
from scheduler_components.values import OutputBatch, OutputDelta, TokenOutput


@dataclass
class StreamedRequest:
    rid: str
    stream_interval: int = 1
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_retractions: int = 0
    unreadable: bool = False

    @property
    def num_output_tokens(self) -> int:
        return len(self.output)

    def output_since(self, start: int) -> TokenOutput:
        if self.unreadable:
            raise RuntimeError("gone")
        tokens = tuple(self.output[start:])
        return TokenOutput(tokens, 10, 4, self.num_retractions, tuple(-float(token) for token in tokens))


@dataclass
class ScriptedOutputSink:
    """Takes a message or not, as a test wants; a "broken" one raises, before or after it took the message."""

    mode: str = "open"
    batches: list[OutputBatch] = field(default_factory=list)
    closes: int = 0

    def is_ready(self) -> bool:
        if self.mode == "broken":
            raise OSError("no way")
        return self.mode != "full"

    def send(self, batch: OutputBatch) -> bool:
        if self.mode == "refusing":
            return False
        self.batches.append(batch)
        if self.mode == "torn":
            raise OSError("taken, perhaps")
        return True

    def close(self) -> None:
        self.closes += 1


@dataclass
class Client:
    """Puts outputs together as a receiver would: by place, so that what comes twice is read once."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, list[str]] = field(default_factory=dict)

    def read(self, batches: list[OutputBatch]) -> Client:
        for batch in batches:
            assert len({delta.rid for delta in batch.deltas}) == len(batch.deltas)
            for delta in batch.deltas:
                self._read(delta)
        return self

    def _read(self, delta: OutputDelta) -> None:
        output = self.outputs.setdefault(delta.rid, [])
        assert delta.start <= len(output), "a token was skipped"
        assert delta.start + len(delta.output.token_ids) <= delta.num_output_tokens
        assert delta.output.logprobs is None or len(delta.output.logprobs) == len(delta.output.token_ids)
        output[delta.start :] = delta.output.token_ids
        if delta.finish_reason is not None:
            self.ends.setdefault(delta.rid, []).append(delta.finish_reason)


MODES = ["open", "open", "full", "refusing", "broken", "torn"]
GENERATE, RETRACT, FINISH, ABORT, QUIET = range(5)
steps = st.lists(
    st.tuples(
        st.sampled_from(MODES),
        st.booleans(),
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from([GENERATE, GENERATE, RETRACT, FINISH, ABORT, QUIET]))),
    ),
    max_size=25,
)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(2))
@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), steps)
@example([1] * 4, [("full", False, [(0, GENERATE)]), ("full", False, [(0, RETRACT)]), ("open", False, [(0, FINISH)])])
@example([1] * 4, [("torn", False, [(0, GENERATE)]), ("open", False, [(0, GENERATE)])])
@example([1] * 4, [("full", False, [(0, GENERATE)]), ("open", True, [(0, FINISH)])])
def test_each_client_reads_its_output_and_end_exactly_once(
    intervals: list[int], history: list[tuple[str, bool, list[tuple[int, int]]]]
) -> None:
    sink = ScriptedOutputSink()
    streamer = OutputStreamer(sink=sink)
    requests = [StreamedRequest(str(index), interval) for index, interval in enumerate(intervals)]
    for mode, flushes_before, actions in history:
        sink.mode = mode
        news: dict[str, StreamedRequest] = {}
        for index, action in actions:
            request = requests[index]
            if request.finish_reason is not None:
                continue
            if action == GENERATE:
                request.output += [len(request.output) * 10 + index] * (1 + index % 2)
            elif action == RETRACT:
                request.num_retractions += 1
                continue
            elif action != QUIET:
                request.finish_reason = "stop" if action == FINISH else "abort"
            news[request.rid] = request
        if flushes_before:
            streamer.flush()
        streamer.stream(news.values())
    sink.mode = "open"
    streamer.flush()
    assert not streamer.has_backlog
    read = Client().read(sink.batches)
    for request in requests:
        output = read.outputs.get(request.rid, [])
        assert output == request.output[: len(output)]
        is_over = request.finish_reason is not None
        assert set(read.ends.get(request.rid, [])) == ({request.finish_reason} if is_over else set())
        if is_over:
            assert output == request.output
        elif request.stream_interval:
            assert len(request.output) - len(output) < request.stream_interval
            assert bool(output) == bool(request.output)
        else:
            assert output == []
    if not any(mode == "torn" for mode, *_ in history):
        assert all(len(ends) == 1 for ends in read.ends.values())
        assert streamer.stats().tokens_sent == sum(map(len, read.outputs.values()))
        assert [batch.sequence for batch in sink.batches] == list(range(len(sink.batches)))


def test_the_first_token_is_sent_immediately_then_every_interval_then_the_remainder() -> None:
    sink, request = ScriptedOutputSink(), StreamedRequest("a", stream_interval=4)
    streamer = OutputStreamer(sink=sink)
    for token in range(11):
        request.output.append(token)
        streamer.stream([request])
    request.finish_reason = "length"
    streamer.stream([request])
    sizes = [len(batch.deltas[0].output.token_ids) for batch in sink.batches]
    assert sizes == [1, 4, 4, 2]


def test_a_step_sends_one_message_and_none_without_output() -> None:
    sink = ScriptedOutputSink()
    streamer = OutputStreamer(sink=sink)
    streamer.stream(
        [
            StreamedRequest("a", output=[1]),
            StreamedRequest("b", output=[2, 3]),
            StreamedRequest("c"),
            StreamedRequest("d", finish_reason="abort"),
        ]
    )
    streamer.stream([])
    assert [sorted(delta.rid for delta in batch.deltas) for batch in sink.batches] == [["a", "b", "d"]]


def test_no_output_is_read_while_the_receiver_is_slow() -> None:
    sink, request = ScriptedOutputSink(mode="full"), StreamedRequest("a", output=[1], unreadable=True)
    streamer = OutputStreamer(sink=sink)
    for _ in range(100):
        streamer.stream([request])
    assert streamer.failures.total == 0
    assert streamer.stats().steps_delayed == 100
    assert streamer.stats().requests_waiting == 1
    request.unreadable, sink.mode = False, "open"
    streamer.flush()
    assert streamer.stats().tokens_sent == 1


def test_without_a_receiver_ends_are_bounded_and_losses_counted() -> None:
    sink = ScriptedOutputSink(mode="full")
    streamer = OutputStreamer(sink=sink, held=FinalDeltaBuffer(max_ends=10, max_bytes=10_000))
    for number in range(50):
        streamer.stream([StreamedRequest(str(number), output=[1] * 20, finish_reason="stop")])
    stats = streamer.stats()
    assert (stats.ends_held, stats.ends_dropped) == (10, 40)
    streamer.close()
    streamer.close()
    assert (streamer.stats().ends_dropped, streamer.stats().tokens_dropped) == (50, 1000)
    assert sink.closes == 2


def test_unreadable_output_still_sends_the_end() -> None:
    sink = ScriptedOutputSink()
    streamer = OutputStreamer(sink=sink)
    bad, good = StreamedRequest("bad", output=[1], unreadable=True), StreamedRequest("good", output=[2])
    streamer.stream([bad, good])
    bad.finish_reason = "stop"
    streamer.stream([bad])
    assert [[delta.rid for delta in batch.deltas] for batch in sink.batches] == [["good"], ["bad"]]
    end = sink.batches[1].deltas[0]
    assert (end.finish_reason, end.output.token_ids, end.num_output_tokens) == ("stop", (), 1)


def test_a_reused_id_starts_at_its_first_token() -> None:
    sink, first = ScriptedOutputSink(), StreamedRequest("a", output=[1, 2])
    streamer = OutputStreamer(sink=sink)
    streamer.stream([first])
    first.finish_reason = "stop"
    streamer.stream([first])
    streamer.stream([StreamedRequest("a", output=[7])])
    assert [batch.deltas[0].start for batch in sink.batches] == [0, 2, 0]


def test_an_id_can_be_reused_while_its_end_waits() -> None:
    sink = ScriptedOutputSink(mode="full")
    streamer = OutputStreamer(sink=sink)
    streamer.stream([StreamedRequest("a", output=[1, 2], finish_reason="stop")])
    streamer.stream([StreamedRequest("a", output=[7])])
    sink.mode = "open"
    streamer.flush()
    deltas = [delta for batch in sink.batches for delta in batch.deltas]
    assert [(delta.start, delta.output.token_ids, delta.finish_reason) for delta in deltas] == [
        (0, (1, 2), "stop"),
        (0, (7,), None),
    ]


@pytest.mark.parametrize("mode", ["broken", "torn"])
def test_a_failing_sink_never_raises_and_is_counted(mode: str) -> None:
    streamer = OutputStreamer(sink=ScriptedOutputSink(mode=mode))
    streamer.stream([StreamedRequest("a", output=[1])])
    assert streamer.failures.total == 1
    assert streamer.has_backlog


def test_one_unreadable_request_among_others_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    streamer = OutputStreamer(sink=ScriptedOutputSink())
    requests = [StreamedRequest("good"), StreamedRequest("bad", unreadable=True), StreamedRequest("also good")]
    for _ in range(3):
        for request in requests:
            request.output.append(7)
        streamer.stream(requests)
    assert len(caplog.records) == 1
    requests[1].unreadable = False
    requests[1].output.append(7)
    streamer.stream(requests)
    assert "works again after 3 failures" in caplog.text


def test_a_flush_before_the_step_that_streams_an_end_leaves_the_end_to_it() -> None:
    sink = ScriptedOutputSink("full")
    streamer = OutputStreamer(sink=sink)
    request = StreamedRequest("a", output=[1, 2])
    streamer.stream([request])
    request.finish_reason = "abort"
    sink.mode = "open"
    streamer.flush()
    streamer.stream([request])
    sent = [
        (delta.start, delta.output.token_ids, delta.finish_reason) for batch in sink.batches for delta in batch.deltas
    ]
    assert sent == [(0, (1, 2), None), (2, (), "abort")]
    assert not streamer.has_backlog
