"""Inside a real SGLang: this kit's policy sorts the waiting list, and its budget answers the adder.

In each step the probe sorts a copy of the same list by SGLang's own functions, and asks SGLang's own adder the same
questions with the same accounts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with sglang")

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

SMALL = ("--max-running-requests", "4", "--chunked-prefill-size", "64")


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of 32 to 200 tokens; half of them begin as one of four others do, for 16 to 96 tokens."""
    rng = random.Random(seed)
    heads = [[rng.randrange(10, 1_000) for _ in range(96)] for _ in range(4)]
    made = []
    for at in range(count):
        head = rng.choice(heads)[: rng.choice((16, 48, 96))] if at % 2 else []
        made.append([*head, *(rng.randrange(10, 1_000) for _ in range(rng.randrange(32, 104)))])
    return made


def serve(
    start: Callable, settings: dict[str, object], *args: str, **env: str
) -> tuple[list[list[int]], list[dict[str, object]], str]:
    """Serve two bursts of prompts; return the tokens, what the probe of each TP rank has seen, and the log."""
    own = {"SGLANG_PLUGINS": "scheduler_components,probe"}
    if settings:
        own["SCHEDULER_COMPONENTS_SCHEDULING"] = json.dumps(settings)
    server = start(*SMALL, *args, **(own | env))
    answers = server.generate(prompts(40, seed=1), max_new_tokens=12)
    answers += server.generate(prompts(150, seed=2), max_new_tokens=4)
    ranks = server.ask([])
    return answers, [ranks[key] for key in sorted(ranks)], server.log


@pytest.fixture(scope="module")
def stock(sglang_servers: Callable) -> list[list[int]]:
    return serve(sglang_servers, {})[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_first_come_first_served_decides_as_sglang_does(
    sglang_servers: Callable, stock: list[list[int]], ranks: int
) -> None:
    many = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}
    settings = {"policy": "fcfs", "admission": True}
    answers, seen, log = serve(sglang_servers, settings, "--tp-size", str(ranks), SGLANG_TEST_RETRACT="1", **many)
    assert "orders the waiting requests by policy 'fcfs'" in log
    assert answers == stock or ranks == 2  # two ranks add floats in another order
    for rank in seen:
        assert rank["sorts"] > 50
        assert rank["verdicts"] > 200
        assert rank["most_waiting"] > 128
        assert rank["other_order"] == []
        assert rank["other_verdicts"] == []
        assert rank["admitted"] == seen[0]["admitted"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_longest_prefix_match_orders_as_sglang_does_where_a_prefix_is_cached(
    sglang_servers: Callable, stock: list[list[int]], ranks: int
) -> None:
    """The rules differ in three places: beyond 128 waiting requests SGLang keeps the list as it is; it leaves ties in
    the order of the last sort; and of requests with up to 32 cached tokens that begin alike, it lets the first of the
    list go first, and this kit's policy the one with most cached tokens.
    """
    many = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}
    args = ("--schedule-policy", "lpm", "--tp-size", str(ranks))
    answers, seen, _ = serve(sglang_servers, {"policy": "lpm", "admission": True}, *args, **many)
    assert answers == stock or ranks == 2
    for rank in seen:
        assert rank["sorts"] > 50
        assert rank["other_verdicts"] == []
        assert rank["admitted"] == seen[0]["admitted"]
        for each in rank["other_order"]:
            if each["waiting"] > 128:
                continue
            theirs, ours = ([length for length, _ in order if length > 32] for order in (each["theirs"], each["ours"]))
            assert theirs == ours, each
            assert sorted(each["theirs"]) == sorted(each["ours"])


def test_a_watermark_leaves_pages_free_and_loses_no_request(sglang_servers: Callable, stock: list[list[int]]) -> None:
    answers, (seen,), _ = serve(sglang_servers, {"admission": True, "watermark_pages": 100})
    assert answers == stock
    assert seen["other_verdicts"], "the pool of 128 pages never came near its watermark"
    assert all("NO_TOKEN" in ours or "False" in ours for _, ours, _ in seen["other_verdicts"])
