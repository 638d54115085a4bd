"""What a hierarchical cache came to, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler_components.hicache.tier_stats import TierStats

__all__ = ["tier_facts"]


def tier_facts(replicas: Sequence[TierStats]) -> Iterator[tuple[str, str]]:
    """Name and facts of each line of a summary over all replicas; nothing for none."""
    if not replicas:
        return

    def total(name: str) -> int:
        return sum(getattr(stats, name) for stats in replicas)

    prompt_tokens = max(1, total("prompt_tokens"))
    names = ("device", "host", "storage")
    rates = [f"{name} {total(f'{name}_hit_tokens') / prompt_tokens:.1%}" for name in names]
    yield "hits by tier", f"{', '.join(rates)} of the prompt tokens"
    yield (
        "pages moved",
        f"{total('pages_written'):,} to the host, {total('pages_loaded'):,} back, "
        f"{total('pages_backed_up'):,} to storage, {total('pages_prefetched'):,} from it",
    )
    given_up = [total(name) for name in ("pages_not_written", "pages_not_loaded", "pages_not_backed_up")]
    yield (
        "pages given up",
        f"{given_up[0]:,} to the host, {given_up[1]:,} back, {given_up[2]:,} to storage, "
        f"{total('pages_revoked'):,} from it; {total('pages_dropped'):,} evicted without a copy",
    )
