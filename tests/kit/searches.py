"""How many examples a search tries."""

from __future__ import annotations

from hypothesis import settings


def num_examples(times: int) -> int:
    """Return ``times`` the examples of the profile: all of them in ``make soak``, a third in ``make test``.

    Every known broken variant has a trace that exposes it, so it is found without a search.
    """
    examples = times * settings().max_examples
    return examples if settings.get_current_profile_name() == "soak" else examples // 3
