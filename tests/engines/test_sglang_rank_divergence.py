"""Inside a real SGLang with two TP ranks: one rank decides by a fact of its own, and the decision log names it.

Each divergence runs once with the log, and once with SGLang's own checker (``SGLANG_ENABLE_RANK_CONSENSUS_CHECKER=1``).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with sglang")

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

TWO_RANKS = ("--max-running-requests", "4", "--tp-size", "2")
OURS = {"SCHEDULER_COMPONENTS_DECISION_LOG": "log", "SGLANG_PLUGINS": "scheduler_components,probe,divergence"}
THEIRS = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

OURS_NAMED = re.compile(
    r"TP(?P<rank>\d)\] (?P<sentence>step (?P<step>\d+): the ranks decided differently at decision \d+: "
    r"rank 0: (?P<first>.*); rank 1: (?P<second>.*); no majority .* \(found at step (?P<found>\d+)\))"
)
THEIRS_NAMED = re.compile(r"Found rank divergence for .*")
DEADLINE_S = 120.0


def prompt(seed: int, length: int = 80) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 1_000) for _ in range(length)]


class Client:
    """Sends requests on threads, because ranks that have diverged may never answer."""

    def __init__(self, server) -> None:
        self._server = server

    def send(self, *prompts: list[int], tokens: int = 8, wait_s: float = 60.0, **options: object) -> list | None:
        """Send prompts in one request. Return the answers, or None if there are none within ``wait_s``."""
        return self._call(lambda: self._server.generate(list(prompts), tokens, **options), wait_s)

    def post(self, path: str, wait_s: float = 60.0, **body: object) -> None:
        self._call(lambda: self._server.post(path, **body), wait_s)

    @staticmethod
    def _call(call: Callable[[], list | None], wait_s: float) -> list | None:
        answers: list = []

        def run() -> None:
            with contextlib.suppress(OSError, KeyError, ValueError):
                answers.append(call())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(wait_s)
        return answers[0] if answers else None


def act_session(client: Client) -> None:
    client.post("/open_session", session_id="victim", capacity_of_str_len=10_000, timeout=100.0)
    for seed in range(4):  # SGLang looks for idle sessions once per second
        client.send(prompt(seed), tokens=30)
    client.send(prompt(9), wait_s=5, session_params={"id": "victim", "rid": None})


def act_flush(client: Client) -> None:
    client.send(prompt(1))
    client.send(prompt(2), tokens=200, wait_s=0.2)
    client.post("/flush_cache?timeout=100")
    client.send(prompt(1), wait_s=5)


def act_expiry(client: Client) -> None:
    client.send(*map(prompt, range(4)), tokens=100, wait_s=0.5)
    client.send(prompt(5), rid="victim", wait_s=20)


def act_admission(client: Client) -> None:
    client.send(*map(prompt, range(2)), tokens=50, wait_s=0.2)
    client.send(prompt(5), rid="victim", wait_s=10)


def act_eviction(client: Client) -> None:
    for seed in [*range(40), *range(4)]:
        if client.send(prompt(seed), wait_s=10) is None:
            return


def act_retraction(client: Client) -> None:
    client.send(*map(prompt, range(4)), tokens=40, wait_s=15)


def act_token(client: Client) -> None:
    answers = client.send(prompt(1), tokens=40, rid="victim")
    if answers:
        client.send([*prompt(1), *answers[0], *prompt(2)], wait_s=5)


def act_grammar(client: Client) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 8, "regex": "(w1|w2)+"}
    client.post("/generate", wait_s=15, input_ids=prompt(1), sampling_params=sampling, rid="victim")


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """One decision that rank 1 takes by a fact of its own.

    Attributes:
        act: lets the ranks diverge, and then uses what differs.
        first, second: patterns of the decision of rank 0 and rank 1 in the first report.
        is_theirs: whether SGLang's checker always reports it; None if that depends on which thread is faster, its own
            or the one whose collective aborts the process.
        imported: variables that SGLang reads at its import.
    """

    act: Callable[[Client], None]
    first: str
    second: str
    is_theirs: bool | None
    imported: tuple[tuple[str, str], ...] = ()


DIVERGENCES = {
    "session": Divergence(
        act=act_session, first=r"(?!session)\w.*", second=r"session\(closed='victim'\)", is_theirs=None
    ),
    "flush": Divergence(
        act=act_flush, first=r"(?!flush)\w.*", second=r"flush\(what='answered', done=0\)", is_theirs=None
    ),
    "expiry": Divergence(act=act_expiry, first=r"(?!abort)\w.*", second=r"abort\(rid='victim.*", is_theirs=True),
    "admission": Divergence(
        act=act_admission, first=r"batch\(mode='extend', 'victim.*", second=r"batch\(mode='decode', .*", is_theirs=False
    ),
    "eviction": Divergence(
        act=act_eviction, first=r"evict\(component=0, node=\d+\)", second=r"evict\(component=0, node=\d+\)",
        is_theirs=None,
    ),
    "retraction": Divergence(
        act=act_retraction, first=r"queue\(rid='\w+', output tokens=\d\)",
        second=r"queue\(rid='\w+', output tokens=\d\)", is_theirs=True, imported=(("SGLANG_TEST_RETRACT", "1"),),
    ),
    "token": Divergence(
        act=act_token, first=r"token\(rid\[0\]='victim.*", second=r"token\(rid\[0\]='victim.*", is_theirs=None
    ),
    "grammar": Divergence(
        act=act_grammar, first=r"no decision", second=r"grammar\(rid\[0\]='victim.*", is_theirs=False
    ),
}  # fmt: skip


def start_diverging(start: Callable, name: str, **env: str):
    imported = dict(DIVERGENCES[name].imported)
    if "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER" in env:
        imported |= THEIRS
    has_tokenizer = name == "grammar"
    return start(
        *TWO_RANKS,
        *(("--grammar-backend", "xgrammar") if has_tokenizer else ()),
        without=("--skip-tokenizer-init",) if has_tokenizer else (),
        imported=imported,
        **{"SGLANG_PLUGINS": "probe,divergence", "SGLANG_DIVERGENCE": name} | CORES | env,
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_both_ranks_name_the_step_and_both_decisions(forked_sglang_servers: Callable, name: str) -> None:
    expected = DIVERGENCES[name]
    server = start_diverging(forked_sglang_servers, name, **OURS)
    expected.act(Client(server))
    of_rank: dict[str, re.Match[str]] = {}
    deadline_s = time.monotonic() + DEADLINE_S
    while len(of_rank) < 2:
        for found in OURS_NAMED.finditer(server.log):
            of_rank.setdefault(found["rank"], found)
        assert time.monotonic() < deadline_s, server.log[-4000:]
        time.sleep(0.05)
    server.stop()
    first = of_rank["0"]
    sys.stdout.write(f"\n{name}: {first['sentence']}\n")
    assert first["sentence"] == of_rank["1"]["sentence"]
    assert int(first["found"]) == int(first["step"]) + 1
    assert re.fullmatch(expected.first, first["first"]), first["first"]
    assert re.fullmatch(expected.second, first["second"]), first["second"]
    assert first["first"] != first["second"]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_sglangs_own_checker_names_what_reaches_its_cache_in_time(forked_sglang_servers: Callable, name: str) -> None:
    expected = DIVERGENCES[name]
    server = start_diverging(forked_sglang_servers, name, **THEIRS)
    expected.act(Client(server))
    time.sleep(3)  # its thread compares in the background
    log = server.log
    server.stop()
    found = THEIRS_NAMED.findall(log)
    sys.stdout.write(
        f"\n{name}: {len(found)} ranks; {'aborted; ' * ('Fatal Python error' in log)}{' | '.join(found)[:600]}\n"
    )
    if expected.is_theirs is not None:
        assert bool(found) == expected.is_theirs, log[-4000:]


def act_mixed(client: Client, seed: int) -> None:
    """Serve shared prefixes, evictions, retractions, aborts, sessions, a grammar and a flush at the same time."""
    rng = random.Random(seed)
    heads = [prompt(at, 96) for at in range(4)]
    session = f"session{seed}"
    client.post("/open_session", session_id=session, capacity_of_str_len=10_000)
    workers = []
    for at in range(12):
        head = rng.choice(heads)[: rng.choice((16, 48, 96))]
        texts = [[*head, *prompt(rng.randrange(10_000), rng.randrange(16, 90))] for _ in range(rng.randrange(1, 6))]
        options: dict[str, object] = {"rid": [f"r{seed}.{at}.{each}" for each in range(len(texts))]}
        if at % 4 == 3:
            options = {"session_params": {"id": session, "rid": None}}
            texts = texts[:1]
        workers.append(
            threading.Thread(target=client.send, args=texts, kwargs={"tokens": rng.randrange(4, 30)} | options)
        )
        workers[-1].start()
        if at % 3 == 2:
            client.post("/abort_request", rid=f"r{seed}.{at}.0")
    sampling = {"temperature": 0, "max_new_tokens": 6, "regex": f"(w{rng.randrange(5, 900)}|w2)+"}
    client.post("/generate", input_ids=prompt(seed), sampling_params=sampling)
    for worker in workers:
        worker.join()
    client.post("/close_session", session_id=session)
    client.post("/flush_cache?timeout=5" if seed % 3 == 0 else "/flush_cache")


@pytest.mark.parametrize("overlap", [False, True], ids=["normal loop", "overlap loop"])
def test_ranks_that_agree_are_never_reported(forked_sglang_servers: Callable, overlap: bool) -> None:
    """With the policy that stops, next to SGLang's checker, which stops too. ``SOAK_SECONDS`` makes it longer."""
    server = forked_sglang_servers(
        *TWO_RANKS,
        *("--grammar-backend", "xgrammar", "--schedule-policy", "lpm"),
        without=("--skip-tokenizer-init", *(("--disable-overlap-schedule",) if overlap else ())),
        imported=THEIRS | {"SGLANG_TEST_RETRACT": "1"},
        **OURS | {"SCHEDULER_COMPONENTS_DECISION_LOG": "stop"} | CORES,
    )
    client, end_s = Client(server), time.monotonic() + float(os.environ.get("SOAK_SECONDS", "0"))
    for seed in itertools.count():
        if seed >= 8 and time.monotonic() >= end_s:
            break
        act_mixed(client, seed)
    info = json.loads(server.get("/server_info"))
    (found,) = [each["decision_log"] for each in info["internal_states"]]
    sys.stdout.write(f"\n{found}\n")
    assert "decided differently" not in server.log
    assert not THEIRS_NAMED.search(server.log)
    assert found["num_steps"] > 500
    assert found["num_decisions"] > 3 * found["num_steps"]
    assert (found["num_divergences"], found["first_divergence"]) == (0, None)
    assert (found["num_unregistered"], found["num_replaced_values"], found["num_failures"]) == (0, 0, 0)
    server.stop()


def test_the_policy_stop_ends_the_server_with_the_report(forked_sglang_servers: Callable, tmp_path: Path) -> None:
    stop = {"SCHEDULER_COMPONENTS_DECISION_LOG": "stop", "SCHEDULER_COMPONENTS_DECISION_LOG_DIRECTORY": str(tmp_path)}
    server = start_diverging(forked_sglang_servers, "eviction", **OURS | stop)
    act_eviction(Client(server))
    server.wait_until_ended()
    assert "DecisionDivergenceError: " in server.log
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.partition("-step")[0] for name in names] == ["decisions-rank0", "decisions-rank1"]


def test_a_server_that_is_started_as_usual_compares_its_ranks(sglang_servers: Callable) -> None:
    """The other tests fork their servers."""
    server = sglang_servers(*TWO_RANKS, **OURS | CORES)
    server.generate([prompt(seed) for seed in range(6)])
    (state,) = json.loads(server.get("/server_info"))["internal_states"]
    assert "compares the decisions of 2 ranks, policy log" in server.log
    assert state["decision_log"]["num_steps"] > 8
    assert state["decision_log"]["num_divergences"] == 0
    server.stop()
