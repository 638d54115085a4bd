"""What a step may still admit: each limit refuses with its reason, and estimates of pages are never too large."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import ConfigError
from scheduler_components.scheduling.admission_budget import (
    AdmissionBudget,
    AdmissionDemand,
    BatchLimits,
    estimate_pages,
    estimate_pages_to_allocate,
    prefill_chunk,
)
from scheduler_components.scheduling.request_kv_cache import pages_for
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.scheduler.request import EngineRequest

checked = settings(deadline=None, max_examples=num_examples(8))

sizes = st.integers(1, 40)


def a_request(num_prompt: int, num_output: int, max_new: int) -> EngineRequest:
    request = EngineRequest("r", range(num_prompt), SamplingLimits(max_new_tokens=max_new))
    request.token_ids.extend(range(num_output))
    return request


@pytest.mark.soak
@checked
@given(sizes, sizes, st.integers(1, 100), st.integers(0, 50), st.integers(1, 50), st.floats(0, 1))
@example(page_size=1, num_pages=2, num_prompt=1, num_output=0, num_left=2, ratio=1.0)
def test_the_estimate_of_a_request_that_fits_never_exceeds_the_pool(
    page_size: int, num_pages: int, num_prompt: int, num_output: int, num_left: int, ratio: float
) -> None:
    """So a request that is alone can always be admitted, also after a retraction."""
    assume(pages_for(num_prompt + num_output + num_left - 1, page_size) <= num_pages)
    request = a_request(num_prompt, num_output, num_output + num_left)
    expected = estimate_pages(request, page_size=page_size, new_token_ratio=ratio)
    assert pages_for(num_prompt + num_output, page_size) <= expected <= num_pages


@pytest.mark.soak
@checked
@given(st.lists(st.integers(1, 50), max_size=5), sizes, st.floats(0, 1))
def test_the_estimate_of_pages_shrinks_as_pages_are_allocated(prompts: list[int], page_size: int, ratio: float) -> None:
    requests = [a_request(num_prompt, 0, 10) for num_prompt in prompts]
    before = estimate_pages_to_allocate(requests, page_size=page_size, new_token_ratio=ratio)
    for request in requests:
        request.pages = list(range(pages_for(request.num_input_tokens, page_size)))
    after = estimate_pages_to_allocate(requests, page_size=page_size, new_token_ratio=ratio)
    assert before - after == sum(len(request.pages) for request in requests)
    assert after >= 0


@pytest.mark.soak
@checked
@given(sizes, sizes, st.integers(0, 40))
def test_a_chunk_is_the_least_of_its_limits(left: int, chunk: int, budget: int) -> None:
    num_tokens = prefill_chunk(left, chunk_tokens=chunk, budget_tokens=budget)
    assert num_tokens <= left and num_tokens <= chunk and num_tokens <= budget
    assert num_tokens in (left, chunk, budget)


def a_budget(**changes: int) -> AdmissionBudget:
    numbers = {
        "tokens": 10,
        "slots": 2,
        "available_pages": 8,
        "reserved_pages": 3,
        "watermark_pages": 2,
        "num_running": 1,
    }
    return AdmissionBudget(**{**numbers, **changes})


@pytest.mark.parametrize(
    ("budget", "demand", "reason"),
    [
        (a_budget(), AdmissionDemand(num_tokens=10, num_pages=3), None),
        (a_budget(tokens=0), AdmissionDemand(), "tokens"),
        (a_budget(), AdmissionDemand(num_tokens=11), "tokens"),
        (a_budget(slots=0), AdmissionDemand(), "slots"),
        (a_budget(), AdmissionDemand(num_pages=6), "pages"),
        (a_budget(), AdmissionDemand(num_pages=4), "watermark"),
        (a_budget(num_running=0), AdmissionDemand(num_pages=5), None),
        (a_budget(available_pages=3), AdmissionDemand(num_pages=0), "watermark"),
        (a_budget(available_pages=2), AdmissionDemand(num_pages=0), "pages"),
        (a_budget(available_pages=2), AdmissionDemand(), None),
    ],
)
def test_each_limit_refuses_with_its_reason(
    budget: AdmissionBudget, demand: AdmissionDemand, reason: str | None
) -> None:
    assert budget.refusal_of(demand) == reason


def test_a_budget_is_spent_request_by_request() -> None:
    budget = a_budget(tenant_cap=1, tokens=9, slots=3, available_pages=100)
    budget.spend(AdmissionDemand(num_tokens=4, tenant="a"), reserved_pages=5)
    assert (budget.tokens, budget.slots, budget.reserved_pages, budget.num_running) == (5, 2, 8, 2)
    assert budget.refusal_of(AdmissionDemand(tenant="a")) == "tenant"
    assert budget.refusal_of(AdmissionDemand(tenant="b")) is None
    budget.spend(AdmissionDemand(num_tokens=5, tenant="b"))
    assert budget.refusal_of(AdmissionDemand(tenant="c")) == "tokens"


@pytest.mark.parametrize("name", ["tokens", "slots", "available_pages", "reserved_pages", "watermark_pages"])
def test_a_negative_budget_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=-1: is negative"):
        a_budget(**{name: -1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_running_requests", 0),
        ("max_prefill_tokens", -5),
        ("chunk_tokens", 2**31),
        ("watermark_pages", -1),
        ("max_running_per_tenant", 0),
        ("mode", "decode_first"),
    ],
)
def test_a_limit_out_of_its_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        BatchLimits(**{name: value})
