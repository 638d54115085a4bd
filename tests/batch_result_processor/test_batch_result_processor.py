"""Each request gets its tokens and one end, its pages are freed once, and a failure affects one request."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_components import RequestResult

EOS, STOP = 1, 2  # what ends a request of the bench


def result(request: Any, end: int | None = None, *tokens: int, **facts: object) -> RequestResult[Any]:
    end = len(request.token_ids) if end is None else end
    return RequestResult(request, request.num_computed_tokens, end, tokens, **facts)  # type: ignore[arg-type]


def test_a_chunked_prefill_caches_each_chunk_and_adds_its_token_with_the_last(bench: Any) -> None:
    processor, request = bench.processor(), bench.add("a")
    assert processor.process([result(request, 4, 77, is_prefill=True)]) == []
    assert (request.num_computed_tokens, bench.pages.shared["a"], request.output) == (4, 4, [])
    assert processor.process([result(request, 10, 50, is_prefill=True)]) == [request]
    assert (request.num_computed_tokens, bench.pages.shared["a"], request.output) == (10, 10, [50])


def test_a_decode_computes_the_last_token_and_appends_the_next(bench: Any) -> None:
    processor, request = bench.processor(), bench.add("a")
    processor.process([result(request, None, 50, is_prefill=True)])
    processor.process([result(request, None, 51)])
    assert (request.num_computed_tokens, request.output, bench.pages.shared["a"]) == (11, [50, 51], 10)


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ((50, 51, 52), [50, 51, 52], None),
        ((50, STOP, 52), [50, STOP], "stop"),
        ((50, EOS, 52), [50, EOS], "stop"),
        ((50, 51, 52, 53, 54), [50, 51, 52, 53], "length"),
        ((50, 51, 52, STOP), [50, 51, 52, STOP], "stop"),
    ],
)
def test_accepted_drafts_become_tokens_up_to_the_one_that_ends_the_request(
    bench: Any, tokens: tuple[int, ...], kept: list[int], reason: str | None
) -> None:
    processor, request = bench.processor(), bench.add("a", max_new=4)
    processor.process([result(request, None, *tokens, is_prefill=True)])
    assert (request.output, request.finish_reason) == (kept, reason)
    assert request.num_computed_tokens == len(request.token_ids) - 1
    assert bench.observer.num_tokens == len(kept)
    assert bench.pages.shared["a"] == len(request.token_ids) - 1


def test_an_abort_frees_the_pages_immediately_and_is_streamed_with_the_next_step(bench: Any) -> None:
    processor, aborted, other = bench.processor(), bench.add("a"), bench.add("b")
    assert processor.abort(aborted)
    assert not processor.abort(aborted)
    assert bench.pages.releases == {"a": 1}
    assert processor.has_pending_outputs
    late = result(aborted, None, 50)  # the device had it in hand
    assert processor.process([late, result(other, None, 51)]) == [aborted, other]
    assert (aborted.output, aborted.finish_reason) == ([], "abort")
    assert bench.streamer.steps == [["a", "b"]]
    assert not processor.has_pending_outputs


def test_a_failed_batch_fails_its_requests_only(bench: Any) -> None:
    processor, other = bench.processor(), bench.add("other")
    batch = [bench.add("a"), bench.add("b")]
    processor.abort(batch[1])
    assert processor.fail(batch, RuntimeError("out of memory")) == [batch[1], batch[0]]
    assert [request.finish_reason for request in batch] == ["error", "abort"]
    assert (other.finish_reason, list(bench.register.running)) == (None, ["other"])
    assert bench.pages.releases == {"a": 1, "b": 1}
    assert bench.pages.shared == {"a": 0, "b": 0}, "nothing of the failed step may be cached"
    assert sorted(bench.observer.ends) == ["abort", "error"]


@pytest.mark.parametrize(
    "bad",
    [
        {"error": "NaN in the logits"},
        {"token_ids": ()},
        {"token_ids": (2**32,)},  # no u32
        {"token_ids": (-1,)},
        {"start": 3},
        {"end": 0},
        {"end": 99},
    ],
)
def test_a_bad_result_ends_its_request_only(bench: Any, bad: dict[str, object]) -> None:
    processor, sick, well = bench.processor(), bench.add("sick"), bench.add("well")
    facts: dict[str, object] = {"request": sick, "start": 0, "end": 10, "token_ids": (50,), "is_prefill": True, **bad}
    assert processor.process([RequestResult(**facts), result(well, None, 51)]) == [sick, well]  # type: ignore[arg-type, type-var]
    assert (sick.finish_reason, sick.output, bench.pages.shared["sick"]) == ("error", [], 0)
    assert (well.finish_reason, well.output) == (None, [51])
    assert (bench.pages.releases, processor.failures.total) == ({"sick": 1}, 1)


def test_a_cache_failure_ends_its_request_only(bench: Any) -> None:
    processor, sick, well = bench.processor(), bench.add("sick"), bench.add("well")
    bench.pages.broken_rids.add("sick")
    results = [result(request, 4, is_prefill=True) for request in (sick, well)]
    assert processor.process(results) == [sick]
    assert (sick.finish_reason, well.finish_reason, well.num_computed_tokens) == ("error", None, 4)
    assert list(bench.register.running) == ["well"]


def test_the_observer_gets_the_tokens_of_a_step_in_one_call_and_then_its_ends(bench: Any) -> None:
    processor = bench.processor()
    first, second, chunk, sick = (bench.add(rid, max_new=2) for rid in ("first", "second", "chunk", "sick"))
    bench.pages.broken_rids.add("sick")
    processor.process(
        [
            result(first, None, 50, 51),
            result(sick, 4, is_prefill=True),
            result(chunk, 4, is_prefill=True),
            result(second, None, 52),
        ]
    )
    processor.process([result(chunk, 8, is_prefill=True)])
    assert bench.observer.calls == ["first+2 second+1", "first length", "sick error"]


def test_a_failing_observer_loses_no_token(bench: Any) -> None:
    bench.observer.broken = True
    processor, request = bench.processor(), bench.add("a", max_new=1)
    processor.process([result(request, None, 50)])
    assert (request.output, request.finish_reason, processor.failures.total) == ([50], "length", 2)


def test_the_pages_of_a_request_are_freed_if_finishing_it_fails(bench: Any) -> None:
    processor, request = bench.processor(), bench.add("a")
    bench.register.running.clear()
    processor.abort(request)
    assert bench.pages.releases == {"a": 1}
    assert processor.failures.total == 1


def test_a_step_without_changes_is_streamed_once(bench: Any) -> None:
    bench.processor().process()
    assert bench.streamer.steps == [[]]


@pytest.mark.parametrize(
    "activity", ["finishing a request", "freeing a request's pages", "observing results", "computing a batch"]
)
def test_each_episode_of_failures_ends_with_the_next_success(
    bench: Any, activity: str, caplog: pytest.LogCaptureFixture
) -> None:
    processor = bench.processor()
    sick, well = bench.add("sick"), bench.add("well", max_new=1)
    if activity == "computing a batch":
        processor.fail([sick], RuntimeError("out of memory"))
    else:
        bench.register.running.pop("sick") if activity == "finishing a request" else None
        bench.pages.broken_rids.add("sick")
        bench.observer.broken = activity == "observing results"
        processor.abort(sick)
    assert processor.failures.counts[activity] == 1
    bench.observer.broken = False
    processor.process([result(well, None, 50)])
    assert f"{activity} works again after 1 failures" in caplog.text
