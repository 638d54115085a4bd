"""What the reference scheduler does with requests in single situations: refusals, sharing, retraction, aborts, ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_components import ConfigError
from scheduler_components.receiving.zmq_input_relay import StopRequestedError
from scheduler_components.values import FinishReason
from scheduler_engine.device.device import DeviceOutput, SimulatedModel
from scheduler_engine.device.model_spec import TokenSpec
from scheduler_engine.device.sampling import SamplingLimits, SamplingParams, TokenLogprobs
from scheduler_engine.engine.scheduler.request import EngineRequest

MODEL = SimulatedModel()  # what the bench's device computes with


@pytest.mark.parametrize(
    ("rid", "num_tokens", "max_new", "field"),
    [("long", 65, 1, "input_ids"), ("greedy", 10, 56, "input_ids"), ("first", 4, 4, "rid")],
)
def test_a_refused_request_costs_nothing_else(
    make_bench: Callable, rid: str, num_tokens: int, max_new: int, field: str
) -> None:
    bench = make_bench()
    first = bench.submit("first", range(10), 5)
    before = (bench.scheduler.state_digest, len(bench.scheduler.queues), bench.scheduler.request_metrics.stats())
    with pytest.raises(ConfigError) as refusal:
        bench.submit(rid, range(num_tokens), max_new)
    assert refusal.value.field == field
    assert before == (
        bench.scheduler.state_digest,
        len(bench.scheduler.queues),
        bench.scheduler.request_metrics.stats(),
    )
    bench.drain()
    assert first.output_ids == bench.foretold(first)


def test_a_request_object_is_served_once_and_its_id_may_come_again(make_bench: Callable) -> None:
    bench = make_bench()
    request = bench.submit("r", range(5))
    bench.drain()
    with pytest.raises(ConfigError, match="served before"):
        bench.scheduler.submit(request)
    bench.submit("r", range(5))
    bench.drain()
    assert [delta.finish_reason for delta in bench.outputs.deltas] == [FinishReason.LENGTH] * 2


def test_a_second_prompt_computes_only_what_the_first_did_not(make_bench: Callable) -> None:
    bench = make_bench()
    bench.submit("one", range(20))
    assert sum(result.num_prefill_tokens for result in bench.drain()) == 20
    bench.submit("two", [*range(18), 99, 98])
    assert bench.scheduler.load.get_loads().num_waiting_uncached_tokens == 4  # known before it runs
    (result,) = bench.drain()
    assert result.num_prefill_tokens == 4
    assert bench.outputs.deltas[-1].output.num_cached_tokens == 16
    assert bench.scheduler.request_metrics.stats().cached_tokens_total == 16


def test_prefills_and_decodes_share_a_batch_within_the_prefill_budget(make_bench: Callable) -> None:
    bench = make_bench(max_prefill_tokens=5)
    bench.submit("a", range(3), 10)
    bench.submit("b", range(100, 108), 10)
    shape = [(result.num_prefill_tokens, result.num_decode_tokens) for result in bench.drain()[:4]]
    assert shape == [(5, 0), (5, 1), (1, 1), (0, 2)]


def test_concurrent_prefills_share_the_budget(make_bench: Callable) -> None:
    bench = make_bench(max_prefill_tokens=8, chunk_tokens=5)
    bench.submit("a", range(15))
    bench.submit("b", range(100, 115))
    assert [result.num_prefill_tokens for result in bench.drain()] == [8, 8, 8, 5, 1]


def test_the_reserve_for_output_shrinks_without_retractions(make_bench: Callable) -> None:
    """Together they may need 86 of 82 positions. The second is admitted once the reserve of the first has shrunk."""
    bench = make_bench(page_size=1, kv_tokens=82, new_token_ratio=1.0, min_new_token_ratio=0.0)
    bench.submit("a", range(4), 50)
    bench.scheduler.step()
    bench.submit("b", range(100, 104), 30)
    admitted_at = [result.step for result in bench.drain() if result.num_admitted]
    assert 10 < admitted_at[0] < 50


def test_the_latest_arrival_is_retracted_and_loses_no_token(make_bench: Callable) -> None:
    bench = make_bench(kv_tokens=32, new_token_ratio=0.0, min_new_token_ratio=0.0)
    early = bench.submit("early", range(8), 20)
    late = bench.submit("late", range(50, 58), 20)
    results = bench.drain()
    assert sum(result.num_retracted for result in results) == late.num_retractions > 0
    assert early.num_retractions == 0
    assert (early.output_ids, late.output_ids) == (bench.foretold(early), bench.foretold(late))
    assert bench.scheduler.request_metrics.stats().cached_tokens_total == 0  # its own pages found again are no hit
    assert bench.scheduler.request_metrics.stats().num_retractions_total == late.num_retractions
    assert late.num_retractions == bench.outputs.deltas[-1].output.num_retractions


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_abort_frees_all_pages(make_bench: Callable, num_steps: int) -> None:
    """0: still waiting; 1: in the middle of a chunked prefill; 2 and 5: in decode."""
    bench = make_bench(chunk_tokens=8)
    bench.submit("r", range(12), 10)
    for _ in range(num_steps):
        bench.scheduler.step()
    assert bench.scheduler.abort("r")
    assert bench.scheduler.has_work  # the abort is not streamed yet
    bench.outputs.batches.clear()
    bench.drain()
    (delta,) = bench.outputs.deltas
    assert (delta.rid, delta.output.token_ids, delta.finish_reason) == ("r", (), FinishReason.ABORT)
    load = bench.sink.stats[-1].load
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_pending_tokens, load.num_used_tokens) == (0,) * 4
    assert bench.sink.kv_metrics[-1].request_active_slots == 0
    assert bench.sink.stats[-1].counters.num_aborted_requests_total == 1
    assert not bench.scheduler.abort("r")
    assert not bench.scheduler.abort("never seen")


def test_a_stop_token_ends_a_request_and_the_end_of_sequence_can_be_ignored(make_bench: Callable) -> None:
    bench = make_bench(tokens=TokenSpec(eos_token_ids=(5, MODEL.next_token("ends", 4))))
    ends = bench.submit("ends", range(4), 5)
    ignores = EngineRequest("ignores", range(4), SamplingLimits(max_new_tokens=3, ignore_eos=True))
    stops = EngineRequest("stops", range(4), SamplingLimits(5, stop_token_ids=(MODEL.next_token("stops", 5),)))
    bench.scheduler.submit(ignores)
    bench.scheduler.submit(stops)
    bench.device.answers = [(MODEL.next_token("ends", 4),) * 2 + (1,)]
    bench.drain()
    assert (ends.num_output_tokens, ends.finish_reason) == (1, FinishReason.STOP)
    assert (ignores.num_output_tokens, ignores.finish_reason) == (3, FinishReason.LENGTH)
    assert (stops.num_output_tokens, stops.finish_reason) == (2, FinishReason.STOP)


@pytest.mark.parametrize("answer", [RuntimeError("device lost"), (), (1, 2, 3)])
def test_a_batch_that_the_device_cannot_compute_fails_its_requests_and_nothing_else(
    make_bench: Callable, answer: tuple[int, ...] | Exception
) -> None:
    bench = make_bench(chunk_tokens=8, max_running_requests=1)
    bench.submit("failed", range(12), 4)
    waiting = bench.submit("waiting", range(12), 4)
    bench.submit("gone", range(30, 34))
    bench.scheduler.abort("gone")
    bench.device.answers = [answer]
    bench.scheduler.step()
    ends = {delta.rid: delta.finish_reason for delta in bench.outputs.deltas}
    assert ends == {"gone": FinishReason.ABORT, "failed": FinishReason.ERROR}  # an abort is not lost with the batch
    assert bench.scheduler.results.failures.total == 1
    assert not bench.stored_tokens()  # nothing was computed, so nothing is cached
    bench.drain()
    bench.scheduler.cache.check_integrity()
    assert waiting.output_ids == bench.foretold(waiting)
    assert bench.scheduler.cache.used_tokens == 0


def test_an_order_to_stop_during_a_sum_of_the_model_ends_no_request(
    make_bench: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait() -> DeviceOutput:
        raise StopRequestedError

    bench = make_bench()
    request = bench.submit("r", range(12), 4)
    monkeypatch.setattr(bench.device, "wait", wait)
    with pytest.raises(StopRequestedError):
        bench.scheduler.step()
    assert request.finish_reason is None
    assert bench.scheduler.results.failures.total == 0


def test_a_request_without_a_result_ends_alone(make_bench: Callable) -> None:
    bench = make_bench()
    broken, whole = bench.submit("broken", range(12), 4), bench.submit("whole", range(20, 32), 4)
    bench.device.answers = [DeviceOutput((0, MODEL.next_token("whole", 12)), errors={0: "its logits are not numbers"})]
    bench.drain()
    assert (broken.finish_reason, broken.num_output_tokens) == (FinishReason.ERROR, 0)
    assert whole.output_ids == bench.foretold(whole)
    assert bench.scheduler.cache.match_prefix(range(12)).num_tokens == 0  # its KV is not trusted
    bench.scheduler.cache.check_integrity()


def test_logprobs_are_streamed_to_requests_that_want_them(make_bench: Callable) -> None:
    bench = make_bench()
    asks = EngineRequest("asks", range(4), SamplingLimits(2), sampling=SamplingParams(logprobs=1))
    bench.scheduler.submit(asks)
    expected = [TokenLogprobs(-0.5, ((7, -0.25),)), TokenLogprobs(-1.5, ((8, -0.75),))]
    bench.device.answers = [DeviceOutput((place,), logprobs={0: each}) for place, each in enumerate(expected)]
    bench.submit("silent", range(10, 14), 1)
    bench.device.answers[0] = DeviceOutput((0, 1), logprobs={0: expected[0]})
    bench.drain()
    outputs = {rid: [delta.output for delta in bench.outputs.deltas if delta.rid == rid] for rid in ("asks", "silent")}
    assert [output.logprobs for output in outputs["asks"]] == [(-0.5,), (-1.5,)]
    assert [output.top_logprobs for output in outputs["asks"]] == [(((7, -0.25),),), (((8, -0.75),),)]
    assert [output.logprobs for output in outputs["silent"]] == [None]


def test_tokens_are_streamed_at_the_interval_of_the_request(make_bench: Callable) -> None:
    bench = make_bench()
    for rid, interval in (("each", 1), ("pairs", 2), ("whole", 0)):
        bench.scheduler.submit(EngineRequest(rid, range(4), SamplingLimits(max_new_tokens=6), stream_interval=interval))
    bench.drain()
    sizes: dict[str, list[int]] = {}
    for delta in bench.outputs.deltas:
        sizes.setdefault(delta.rid, []).append(len(delta.output.token_ids))
    assert sizes == {"each": [1] * 6, "pairs": [1, 2, 2, 1], "whole": [6]}


def test_a_slow_receiver_gets_merged_deltas_and_no_token_twice(
    make_bench: Callable,
) -> None:
    bench = make_bench(kv_tokens=32, new_token_ratio=0.0, min_new_token_ratio=0.0)
    requests = [bench.submit("early", range(8), 20), bench.submit("late", range(50, 58), 20)]
    for result in bench.scheduler.drain():
        bench.outputs.is_full = result.step % 3 != 0
    bench.outputs.is_full = False
    bench.scheduler.output.flush()
    assert requests[1].num_retractions
    for request in requests:
        deltas = [delta for delta in bench.outputs.deltas if delta.rid == request.rid]
        assert tuple(token for delta in deltas for token in delta.output.token_ids) == request.output_ids
        assert len(deltas) < 20


def test_each_episode_of_a_failing_device_is_logged_once(
    make_bench: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()
    for rid, answer in (("a", OSError()), ("b", OSError()), ("c", None), ("d", OSError())):
        bench.device.answers = [answer] if answer else []
        bench.submit(rid, range(4))
        bench.scheduler.step()
    logged = [record.levelname for record in caplog.records if "computing a batch" in record.getMessage()]
    assert logged == ["ERROR", "WARNING", "ERROR"]
    assert bench.scheduler.results.failures.total == 3


def test_an_id_is_in_use_until_its_abort_is_streamed(make_bench: Callable) -> None:
    bench = make_bench()
    bench.submit("r", range(5))
    bench.scheduler.abort("r")
    with pytest.raises(ConfigError, match="in flight"):
        bench.submit("r", range(5))
    bench.drain()
    bench.submit("r", range(5))
