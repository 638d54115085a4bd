"""``dp-attn-sim`` reports the gain and the cost of delaying prefill."""

from __future__ import annotations

import re
from collections.abc import Callable


def test_both_runs_serve_the_same_requests_and_show_the_difference(command_line: Callable) -> None:
    found = command_line("dp-attn-sim", "--dp-size", "3", "--requests", "60", "--rate", "30", "--output-tokens", "40")
    assert found.code == 0
    assert "prefills do not wait" in found.out and "prefills wait at most 10 steps" in found.out
    assert len(set(re.findall(r": ([\d,]+) tokens in", found.out))) == 1
    between = [float(p90) for p90 in re.findall(r"between tokens: .*p90 ([\d.]+) ms", found.out)]
    first = [float(p50) for p50 in re.findall(r"to the first token: p50 ([\d.]+) ms", found.out)]
    assert between[1] < between[0] and first[1] > first[0]
