"""Compare the cost of a pass of SGLang's loop with the decision log, with SGLang's checker, with both and with none.

No test asserts a time. `make engines ENGINES=sglang TEST_ARGS='-k decision_log_cost -s'` prints the figures. Four
servers of two TP ranks serve the same requests in turns: 64 requests run and compute tokens, then short ones come and
go. Each turn takes a second or two, so that other work of the machine disturbs all servers alike.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from statistics import mean, median

import pytest

pytest.importorskip("sglang", reason="`make engines` makes an environment with sglang")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines_only,
    pytest.mark.timing,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]

RUNNING, TURNS, TOKENS = 64, 16, 20
ARGS = ("--tp-size", "2", "--max-running-requests", str(RUNNING), "--max-total-tokens", "16384")
THEIRS = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
OURS = {"SCHEDULER_COMPONENTS_DECISION_LOG": "stop"}
PLUGINS = "scheduler_components,probe,cost"
KINDS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "off": ({}, {}),
    "theirs": (THEIRS, {}),
    "ours": ({}, OURS),
    "both": (THEIRS, OURS),
}


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 1_000) for _ in range(48)] for _ in range(count)]


def new_passes(server, seen: int) -> list[list]:
    """Return the passes of rank 0 after the first ``seen`` ones."""
    return server.ask([])[0, 0]["passes"][seen:]


def test_the_cost_of_a_pass_in_turns(forked_sglang_servers: Callable) -> None:
    servers = {
        name: forked_sglang_servers(
            *ARGS, imported=imported, SGLANG_PLUGINS=PLUGINS, SGLANG_CPU_OMP_THREADS_BIND="0|1", **own
        )
        for name, (imported, own) in KINDS.items()
    }
    seen = dict.fromkeys(servers, 0)
    decodes: dict[str, list[list[list]]] = {name: [] for name in servers}
    prefills: dict[str, list[list[list]]] = {name: [] for name in servers}
    for turn in range(TURNS + 1):
        for name, server in servers.items():
            server.generate(prompts(RUNNING, seed=turn), max_new_tokens=TOKENS)
            server.generate(prompts(2 * RUNNING, seed=1_000 + turn), max_new_tokens=2)
            passes = new_passes(server, seen[name])
            seen[name] += len(passes)
            if turn:  # the first one is slower
                decodes[name].append([each for each in passes if each[0] == "DECODE" and each[1] == RUNNING])
                prefills[name].append([each for each in passes if each[0] == "EXTEND"])
    for title, found in ((f"decode of {RUNNING} requests", decodes), ("prefill", prefills)):
        assert all(all(turns) for turns in found.values())
        sys.stdout.write(f"\n{title}: us per pass, median; ratio to off per turn, median\n")
        for name, turns in found.items():
            sys.stdout.write(f"  {name:7}" + "".join(column(turns, found["off"], at) for at in (2, 3, 4)) + "\n")
        for name in ("ours", "both"):
            parts = [median(each[at] for turn in found[name] for each in turn) for at in (5, 6, 7)]
            sys.stdout.write("  {}: notes {:.1f}, agreement {:.1f} processor, {:.1f} clock\n".format(name, *parts))


def column(turns: Sequence[list], off: Sequence[list], at: int) -> str:
    name = {2: "thread", 3: "process", 4: "clock"}[at]
    center = mean if at == 3 else median
    ratios = [
        center([p[at] for p in turn]) / center([p[at] for p in base]) for turn, base in zip(turns, off, strict=True)
    ]
    return f"  {name} {median(center([p[at] for p in turn]) for turn in turns):8.0f} ({median(ratios):.3f}x)"
