"""The tokens of a simulated request are made when they are read, and their number survives them."""

from __future__ import annotations

from scheduler_components.values import RequestState
from scheduler_engine.simulation import TraceRequest
from scheduler_engine.simulation.request import SimulatedRequest
from scheduler_engine.simulation.trace import prompt_tokens


def a_request() -> SimulatedRequest:
    recorded = TraceRequest(index=3, arrival_s=0.0, input_length=700, output_length=4, hash_ids=(5, 6))
    return SimulatedRequest(recorded)


def test_counts_are_known_before_the_tokens_are_made() -> None:
    request = a_request()
    assert (request.rid, request.num_input_tokens, request.num_output_tokens_left) == ("r3", 700, 4)
    assert request.token_ids.tobytes() == prompt_tokens(request.recorded)
    assert request.num_input_tokens == len(request.token_ids) == 700


def test_the_number_of_tokens_survives_the_tokens() -> None:
    request = a_request()
    request.token_ids.extend([1, 2, 3])
    request.drop_tokens()
    assert (request.num_input_tokens, request.num_output_tokens, request.num_output_tokens_left) == (703, 3, 1)


def test_a_request_of_a_failed_replica_keeps_its_tokens_and_loses_its_pages() -> None:
    request = a_request()
    request.token_ids.append(7)
    request.pages, request.num_computed_tokens, request.state = [1, 2], 32, RequestState.RUNNING
    request.ticket = ("router", 1)
    request.reset()
    assert request.token_ids[-1] == 7
    assert (request.pages, request.num_computed_tokens, request.state) == ([], 0, RequestState.WAITING)
    assert request.ticket is None
    assert request.num_uncomputed_tokens == 701


def test_equal_prompts_have_equal_texts() -> None:
    assert a_request().text_hash == a_request().text_hash
    other = TraceRequest(index=9, arrival_s=1.0, input_length=700, output_length=4, hash_ids=(5, 7))
    assert SimulatedRequest(other).text_hash != a_request().text_hash
