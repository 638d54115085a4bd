"""The kit's view of a request of vLLM, over a double of it."""

from __future__ import annotations

import logging

import pytest
from vllm_request_double import Lora, Params, make_double

from scheduler_components.engines.vllm_request import VllmRequests, hints_of
from scheduler_components.values import RequestHints


def test_a_view_reads_vllms_request_late() -> None:
    theirs = make_double("a", [1, 2, 3], max_tokens=5)
    view = VllmRequests(max_model_len=100).of(theirs)
    theirs._all_token_ids += [9, 9]
    assert (view.rid, view.num_input_tokens, view.num_output_tokens, view.num_output_tokens_left) == ("a", 5, 2, 3)
    assert list(view.token_ids) == [1, 2, 3, 9, 9]
    theirs.max_tokens = 10**6
    assert view.num_output_tokens_left == 95, "the context has 100 tokens"
    theirs._all_token_ids[-1:] = [8]
    view.reread_tokens()
    assert list(view.token_ids) == [1, 2, 3, 9, 8]
    view.prefill_end, view.num_computed_tokens = 5, 2
    assert (view.num_prefill_tokens_left, view.num_uncomputed_tokens) == (3, 3)


def test_hints_have_the_kits_order_of_priorities() -> None:
    theirs = make_double("a", priority=-3, lora=Lora("poems"), extra={"tenant": "acme", "deadline_s": 12.5})
    assert hints_of(theirs) == RequestHints(priority=3, tenant="acme", deadline_s=12.5, lora="poems")
    theirs.sampling_params = Params({"deadline_s": 10**400})
    assert hints_of(theirs).deadline_s == 10**400, "too large for a float, and comparable"
    theirs.sampling_params = Params({"tenant": "a" * 10**6})
    assert len(hints_of(theirs).tenant) == 128, "policies remember the names of tenants"
    theirs.sampling_params = None
    theirs.lora_request = None
    assert hints_of(theirs) == RequestHints(priority=3)
    theirs.sampling_params = Params(None)
    assert hints_of(theirs) == RequestHints(priority=3)


@pytest.mark.parametrize("deadline_s", ["soon", float("nan"), float("inf"), True, [1]])
def test_an_invalid_deadline_is_logged_and_left_out(deadline_s: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert hints_of(make_double("a", extra={"deadline_s": deadline_s})).deadline_s is None
    assert "request a: deadline_s=" in caplog.text


def test_arrivals_are_numbered_once() -> None:
    views = VllmRequests(max_model_len=100)
    first, second = make_double("a"), make_double("b")
    assert [views.of(each).arrival for each in (first, second, first)] == [0, 1, 0]
    views.forget(["a", "b", "unknown"])
    assert len(views) == 2, "requests that have not finished were forgotten"
    first.is_done = True
    views.forget(["a"])
    assert len(views) == 1


def test_a_new_request_may_have_the_id_of_a_finished_one() -> None:
    views = VllmRequests(max_model_len=100)
    old, new = make_double("a"), make_double("a")
    views.of(old)
    old.is_done = True
    view = views.of(new)
    views.forget(["a"])
    assert (views.of(new), view.arrival) == (view, 1)
