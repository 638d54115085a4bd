"""The findings of the page: sentences with figures of the results, each with the condition that makes it true."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from benchmarks.studies.policies.study import Study

REPORTED_TAX = {44_800: 0.0, 25_600: 0.322, 12_800: 0.579, 6_400: 0.788}
"""The recompute tax that vLLM's issue #54644 reports, by tokens of the pool: 2,800, 1,600, 800 and 400 blocks of 16."""


@attrs.frozen
class Finding:
    """A statement about the results.

    Attributes:
        text: Markdown, with the figures. Line breaks have no meaning.
        holds: whether the results show it.
    """

    text: str
    holds: bool


def _policies(study: Study) -> Finding:
    trace = {str(run.varied["schedule_policy"]): run.figures for run in study.of("policies", workload="trace")}
    fcfs, lpm, shortest = trace["fcfs"], trace["lpm"], trace["shortest-prefill-first"]
    idle = [run.figures["ttft_mean_s"] for run in study.of("policies", workload="conversations")]
    return Finding(
        f"""On the trace `shortest-prefill-first` has a mean TTFT of {shortest["ttft_mean_s"]:.1f} s, half of the
        {fcfs["ttft_mean_s"]:.1f} s of `fcfs`. The price is the longest wait: {shortest["queue_max_s"]:.0f} s
        instead of {fcfs["queue_max_s"]:.0f} s. `lpm` gains little there ({lpm["ttft_mean_s"]:.1f} s), because few
        prompts share anything: its hit rate is {lpm["hit_rate"]:.1%}, that of `fcfs` {fcfs["hit_rate"]:.1%}. On
        the conversations nearly nothing waits, and a policy that has nothing to choose from changes nothing: all
        mean TTFTs are between {min(idle):.3f} and {max(idle):.3f} s.""",
        shortest["ttft_mean_s"] < 0.6 * fcfs["ttft_mean_s"]
        and shortest["queue_max_s"] > 1.5 * fcfs["queue_max_s"]
        and 0.8 < lpm["ttft_mean_s"] / fcfs["ttft_mean_s"] < 1
        and max(idle) < 1.05 * min(idle),
    )


def _seeds(study: Study) -> Finding:
    fcfs, lpm = (
        [run.figures["ttft_mean_s"] for run in study.of("seeds", schedule_policy=name)] for name in ("fcfs", "lpm")
    )
    gains = [1 - mine / theirs for mine, theirs in zip(lpm, fcfs, strict=True)]
    return Finding(
        f"""How much of a difference is chance? With three other seeds of the conversations, at speed 0.4 where
        requests wait, the mean TTFT of `fcfs` is between {min(fcfs):.1f} and {max(fcfs):.1f} s. So compare rows
        of one workload only. On each seed `lpm` is better, by {min(gains):.0%} to {max(gains):.0%}.""",
        min(gains) > 0 and max(fcfs) > 1.5 * min(fcfs),
    )


def _load(study: Study) -> Finding:
    fcfs, lpm, hrrn = (study.pick("load", schedule_policy=name, speed=0.5) for name in ("fcfs", "lpm", "hrrn"))
    calm = [run.figures["ttft_mean_s"] for run in study.of("load", speed=1.0)]
    return Finding(
        f"""At speed 1 the policies differ by {max(calm) / min(calm) - 1:.1%} in their mean TTFT. At speed 0.5
        requests arrive faster than they are served. Under `fcfs` all of them wait:
        {fcfs["continued_queue_p50_s"]:.0f} s at the median with a known document and
        {fcfs["new_queue_p50_s"]:.0f} s without. Under `lpm` a request with a known document waits
        {lpm["continued_queue_p50_s"]:.1f} s, and one without waits {lpm["new_queue_p50_s"]:.0f} s, as long as
        there are others with a longer cached prefix. It still has the better average: mean TTFT
        {lpm["ttft_mean_s"]:.1f} s instead of {fcfs["ttft_mean_s"]:.1f} s. `hrrn` lets a request that waits gain
        on the others: {hrrn["new_queue_p50_s"]:.0f} s at the median without a document, at a mean TTFT of
        {hrrn["ttft_mean_s"]:.1f} s. Its longest wait is the longest of the three, {hrrn["queue_max_s"]:.0f} s.""",
        max(calm) < 1.1 * min(calm)
        and lpm["new_queue_p50_s"] > 10 * lpm["continued_queue_p50_s"]
        and lpm["new_queue_p50_s"] > 1.2 * fcfs["new_queue_p50_s"]
        and lpm["ttft_mean_s"] < fcfs["ttft_mean_s"]
        and hrrn["new_queue_p50_s"] < lpm["new_queue_p50_s"]
        and hrrn["queue_max_s"] > max(fcfs["queue_max_s"], lpm["queue_max_s"]),
    )


def _pool(study: Study) -> Finding:
    sizes = sorted({int(run.varied["kv_tokens"]) for run in study.of("pool")})
    small, large = sizes[0], sizes[-1]
    fcfs, lpm = (study.pick("pool", schedule_policy=name, kv_tokens=small) for name in ("fcfs", "lpm"))
    fcfs_large, lpm_large = (study.pick("pool", schedule_policy=name, kv_tokens=large) for name in ("fcfs", "lpm"))
    more = fcfs["prefill_tokens"] / lpm["prefill_tokens"]
    return Finding(
        f"""With a pool of {small:,} tokens, which holds {small // 8192} of the 32 documents, `fcfs` evicts documents
        that waiting requests need: its hit rate is {fcfs["hit_rate"]:.1%}, that of `lpm` {lpm["hit_rate"]:.1%},
        and it prefills {more:.1f} times as many tokens. With {large:,} tokens all documents fit, and the hit
        rates are {fcfs_large["hit_rate"]:.1%} and {lpm_large["hit_rate"]:.1%}.""",
        fcfs["hit_rate"] < lpm["hit_rate"]
        and more > 1.1
        and abs(fcfs_large["hit_rate"] - lpm_large["hit_rate"]) < 0.03,
    )


def _blocking(study: Study) -> Finding:
    fcfs, shortest = (study.pick("blocking", schedule_policy=name) for name in ("fcfs", "shortest-prefill-first"))
    return Finding(
        f"""The request that is next blocks all others while it does not fit. One expects that this leaves more of the
        pools unused under `fcfs`, where a large request is next more often. It does not. The trace over pools of
        131,072 tokens: while requests wait, {fcfs["idle_pool_share"]:.0%} of the pools are held by no request, and
        {shortest["idle_pool_share"]:.0%} with the shortest prefill first. The mean TTFT is
        {shortest["ttft_mean_s"]:.1f} s instead of {fcfs["ttft_mean_s"]:.1f} s, the longest wait
        {shortest["queue_max_s"]:.0f} s instead of {fcfs["queue_max_s"]:.0f} s.""",
        abs(shortest["idle_pool_share"] - fcfs["idle_pool_share"]) < 0.03
        and shortest["ttft_mean_s"] < fcfs["ttft_mean_s"],
    )


def _preemption(study: Study) -> Finding:
    latest = {
        pool: study.pick("preemption", preemption_policy="latest-arrival", kv_tokens=pool) for pool in REPORTED_TAX
    }
    ours = ", ".join(f"{figures['recompute_tax']:.0%}" for figures in latest.values())
    theirs = ", ".join(f"{tax:.0%}" for tax in REPORTED_TAX.values())
    small = latest[12_800]
    least = study.pick("preemption", preemption_policy="least-recomputation", kv_tokens=12_800)
    waste, least_waste = (each["recomputed_tokens"] / each["preemptions"] for each in (small, least))
    return Finding(
        f"""The tax grows with the pressure on the pool, as reported: {ours} for the four pools. The reported values
        are {theirs}. Ours are lower: the lengths of its requests are not known here, and a victim's pages stay in
        the radix cache until they are evicted, so positions that are found again are not computed again. This
        shows the effect, and not its size on that model. Contrary to the issue, the victim with the fewest
        computed positions (`least-recomputation`) gains nothing here: with 12,800 tokens a preemption costs
        {least_waste:.0f} positions instead of {waste:.0f}, but there are {least["preemptions"]:,.0f} instead of
        {small["preemptions"]:,.0f}, and the tax is {least["recompute_tax"]:.1%} instead of
        {small["recompute_tax"]:.1%}.""",
        [each["recompute_tax"] for each in latest.values()] == sorted(each["recompute_tax"] for each in latest.values())
        and latest[44_800]["preemptions"] == 0
        and all(latest[pool]["recompute_tax"] <= tax for pool, tax in REPORTED_TAX.items())
        and least_waste < waste
        and least["recompute_tax"] > small["recompute_tax"],
    )


def _reservation(study: Study) -> Finding:
    none, adaptive, full = (
        study.pick("reservation", reservation=name) for name in ("none", "adaptive from 0.7", "full")
    )
    return Finding(
        f"""What avoids the tax is the admission, and not the victim. SGLang's new-token ratio, which starts at 0.7,
        shrinks and learns from each preemption, lowers the tax from {none["recompute_tax"]:.0%} to
        {adaptive["recompute_tax"]:.1%}. The time to serve all is {adaptive["duration_s"]:.1f} s instead of
        {none["duration_s"]:.1f} s: a tax of {none["recompute_tax"]:.0%} costs far less time, because a prefill
        computes positions faster than decodes do. Reserving the whole output preempts nothing and takes
        {full["duration_s"]:.1f} s, the longest: pages that wait for tokens are not used.""",
        adaptive["recompute_tax"] < 0.5 * none["recompute_tax"]
        and full["preemptions"] == 0
        and full["duration_s"] > max(none["duration_s"], adaptive["duration_s"]),
    )


def _routers(study: Study) -> Finding:
    turns, loaded, kv, alone = (
        study.pick("routers", workload="conversations", router=name)
        for name in ("round-robin", "least-loaded", "kv", "kv without load")
    )
    least, kv_trace, herd = (
        study.pick("routers", workload="trace", router=name) for name in ("least-loaded", "kv", "kv without load")
    )
    return Finding(
        f"""On the conversations the KV router raises the hit rate from {turns["hit_rate"]:.0%} to
        {kv["hit_rate"]:.0%}, and the mean TTFT falls from {turns["ttft_mean_s"]:.3f} to {kv["ttft_mean_s"]:.3f}
        s. `least-loaded` is worse there than taking turns, {loaded["ttft_mean_s"]:.3f} s. On the trace, where
        little is shared, nearly all of the gain comes from the load: `least-loaded` has
        {least["ttft_mean_s"]:.2f} s, `kv` {kv_trace["ttft_mean_s"]:.2f} s. A router that follows cached blocks
        alone (`kv without load`) finds most on the conversations, {alone["hit_rate"]:.0%}, and has the lowest
        mean TTFT, {alone["ttft_mean_s"]:.3f} s, but fewer requests are within the SLO:
        {alone["goodput_share"]:.1%} instead of {kv["goodput_share"]:.1%}. On the trace it fails: all prompts
        begin with the same block, so each request goes to the replica that had the first one. One of four
        replicas computes, and the mean TTFT is {herd["ttft_mean_s"]:.0f} s.""",
        kv["hit_rate"] > turns["hit_rate"]
        and kv["ttft_mean_s"] < turns["ttft_mean_s"]
        and 0.8 < kv_trace["ttft_mean_s"] / least["ttft_mean_s"] < 1
        and alone["hit_rate"] > kv["hit_rate"]
        and alone["ttft_mean_s"] < kv["ttft_mean_s"]
        and alone["goodput_share"] < kv["goodput_share"]
        and loaded["ttft_mean_s"] > turns["ttft_mean_s"]
        and herd["replica_fairness"] < 0.26,
    )


def _event_lag(study: Study) -> Finding:
    known, known_late, blind, blind_late = (
        study.pick("event-lag", router=router, event_lag_s=lag)
        for router in ("kv", "kv without speculation")
        for lag in (0.0, 1.0)
    )
    trace, trace_late = (study.pick("event-lag-trace", event_lag_s=lag) for lag in (0.0, 1.0))
    return Finding(
        f"""Little. `kv` counts the blocks of a request as cached from the moment it is sent, so it learns only
        evictions late. Between no lag and a second its hit rate goes from {known["hit_rate"]:.1%} to
        {known_late["hit_rate"]:.1%} and its mean TTFT from {known["ttft_mean_s"]:.3f} to
        {known_late["ttft_mean_s"]:.3f} s. Without these speculative entries a second costs more: the hit rate
        falls from {blind["hit_rate"]:.1%} to {blind_late["hit_rate"]:.1%}, and the mean TTFT rises from
        {blind["ttft_mean_s"]:.3f} to {blind_late["ttft_mean_s"]:.3f} s. Two turns of a conversation are 15 s
        apart on average, so most events are there in time even then. On the trace the mean TTFT of `kv` is
        {trace["ttft_mean_s"]:.2f} s without lag and {trace_late["ttft_mean_s"]:.2f} s with a second.""",
        abs(known["hit_rate"] - known_late["hit_rate"]) < 0.01
        and blind["hit_rate"] - blind_late["hit_rate"] > abs(known["hit_rate"] - known_late["hit_rate"])
        and blind_late["ttft_mean_s"] > blind["ttft_mean_s"]
        and abs(trace_late["ttft_mean_s"] / trace["ttft_mean_s"] - 1) < 0.05,
    )


def _tiers(study: Study) -> Finding:
    none, small, large = (
        study.pick("tiers", workload="conversations", host_tokens=tokens) for tokens in (0, 262_144, 1_048_576)
    )
    trace, trace_large = (study.pick("tiers", workload="trace", host_tokens=tokens) for tokens in (0, 1_048_576))
    return Finding(
        f"""A host tier as large as the device adds {small["hit_rate"] - none["hit_rate"]:.1%} of the prompt tokens to
        the hits: it holds what the device holds, because every page is copied when it is computed. Four times the
        size raises the hit rate from {none["hit_rate"]:.1%} to {large["hit_rate"]:.1%} and lowers the mean TTFT
        from {none["ttft_mean_s"]:.3f} to {large["ttft_mean_s"]:.3f} s. On the trace, four times the size raises
        the hit rate from {trace["hit_rate"]:.1%} to {trace_large["hit_rate"]:.1%}, and the mean TTFT falls from
        {trace["ttft_mean_s"]:.1f} to {trace_large["ttft_mean_s"]:.1f} s.""",
        small["hit_rate"] - none["hit_rate"] < 0.01
        and large["hit_rate"] > none["hit_rate"] + 0.03
        and trace_large["hit_rate"] > trace["hit_rate"]
        and trace_large["ttft_mean_s"] < trace["ttft_mean_s"],
    )


def _tier_bandwidth(study: Study) -> Finding:
    fast, slow = (study.pick("tier-bandwidth", load_gb_per_s=rate) for rate in (25.0, 1.0))
    none = study.pick("tiers", workload="conversations", host_tokens=0)
    return Finding(
        f"""A slow host tier is worse than none. A token has 131,072 bytes of KV, so 1 GB/s loads some 7,600 tokens
        per second, and the device computes 18,750 at speed 0.75. With 1 GB/s instead of 25 GB/s the mean TTFT is
        {slow["ttft_mean_s"]:.3f} s instead of {fast["ttft_mean_s"]:.3f} s, and {none["ttft_mean_s"]:.3f} s
        without a host tier.""",
        fast["ttft_mean_s"] < none["ttft_mean_s"] < slow["ttft_mean_s"],
    )


def _storage(study: Study) -> Finding:
    small, small_stored, large, large_stored = (
        study.pick("storage", workload="conversations", host_tokens=host, storage_tokens=storage)
        for host in (262_144, 1_048_576)
        for storage in (0, 4_194_304)
    )
    trace, trace_stored = (
        study.pick("storage", workload="trace", host_tokens=1_048_576, storage_tokens=storage)
        for storage in (0, 4_194_304)
    )
    shared = study.workloads["conversations"].shared_share
    return Finding(
        f"""Storage is shared: a replica finds there what any of the four has computed. With a host tier of 1,048,576
        tokens, storage of 4,194,304 raises the hit rate of the conversations from {large["hit_rate"]:.1%} to
        {large_stored["hit_rate"]:.1%}, of {shared:.1%} that an earlier prompt had, and lowers the mean TTFT from
        {large["ttft_mean_s"]:.3f} to {large_stored["ttft_mean_s"]:.3f} s. On the trace the hit rate rises from
        {trace["hit_rate"]:.1%} to {trace_stored["hit_rate"]:.1%}, and the mean TTFT falls from
        {trace["ttft_mean_s"]:.1f} to {trace_stored["ttft_mean_s"]:.1f} s. What comes from storage needs room on the
        host: with a host tier as large as the device, which is full of copies of the device's pages, the hit rate of
        the conversations rises from {small["hit_rate"]:.1%} to {small_stored["hit_rate"]:.1%} only.""",
        large_stored["hit_rate"] > large["hit_rate"] + 0.2
        and 0.85 * shared < large_stored["hit_rate"] < shared
        and large_stored["ttft_mean_s"] < 0.8 * large["ttft_mean_s"]
        and trace_stored["hit_rate"] > trace["hit_rate"] + 0.03
        and trace_stored["ttft_mean_s"] < trace["ttft_mean_s"]
        and small["hit_rate"] < small_stored["hit_rate"] < large_stored["hit_rate"] - 0.1,
    )


def _storage_prefetch(study: Study) -> Finding:
    effort, wait = (study.pick("storage-prefetch", prefetch=name) for name in ("best_effort", "wait_complete"))
    return Finding(
        f"""But only if requests wait for it. With `best_effort`, the default of `HiCachePolicy`, a request that could
        run takes what has arrived. Here nearly nothing waits, so {effort["hit_rate_storage"]:.1%} of the prompt tokens
        come from storage instead of {wait["hit_rate_storage"]:.1%}, and the mean TTFT is {effort["ttft_mean_s"]:.3f} s
        instead of {wait["ttft_mean_s"]:.3f} s.""",
        effort["hit_rate_storage"] < 0.01
        and wait["hit_rate_storage"] > 0.2
        and effort["ttft_mean_s"] > 1.2 * wait["ttft_mean_s"],
    )


def _storage_bandwidth(study: Study) -> Finding:
    free, same, slow = (study.pick("storage-bandwidth", storage_total_gb_per_s=rate) for rate in (0.0, 12.5, 2.5))
    none = study.pick("tiers", workload="conversations", host_tokens=1_048_576)
    return Finding(
        f"""Each replica reaches storage with 12.5 GB/s. If storage has no more than 12.5 GB/s for all four together,
        the mean TTFT is {same["ttft_mean_s"]:.3f} s instead of {free["ttft_mean_s"]:.3f} s. With 2.5 GB/s it reads and
        writes some 19,000 tokens per second, which is too slow for these requests. They wait for it, in turn: the mean
        TTFT is {slow["ttft_mean_s"]:.1f} s, and {none["ttft_mean_s"]:.3f} s without storage.""",
        free["ttft_mean_s"] <= same["ttft_mean_s"] < 1.1 * free["ttft_mean_s"]
        and slow["ttft_mean_s"] > 5 * none["ttft_mean_s"],
    )


def _prefill_delay(study: Study) -> Finding:
    now, later, latest = (study.pick("prefill-delay", rate_per_s=40.0, max_delay_steps=steps) for steps in (0, 10, 30))
    calm, calm_later = (study.pick("prefill-delay", rate_per_s=10.0, max_delay_steps=steps) for steps in (0, 10))
    return Finding(
        f"""At 40 requests per second a delay of at most 10 steps lowers the mean time between tokens from
        {1e3 * now["itl_mean_s"]:.1f} to {1e3 * later["itl_mean_s"]:.1f} ms, and the padding from
        {now["padded_tokens"]:,.0f} to {later["padded_tokens"]:,.0f} tokens. The median TTFT rises from
        {1e3 * now["ttft_p50_s"]:.0f} to {1e3 * later["ttft_p50_s"]:.0f} ms. 30 steps gain little more:
        {1e3 * latest["itl_mean_s"]:.1f} ms. At 10 requests per second the gain is smaller,
        {1e3 * calm["itl_mean_s"]:.1f} to {1e3 * calm_later["itl_mean_s"]:.1f} ms, and the price higher: the
        median TTFT rises from {1e3 * calm["ttft_p50_s"]:.0f} to {1e3 * calm_later["ttft_p50_s"]:.0f} ms.
        Throughput does not change: {now["output_tokens_per_s"]:,.0f} and {later["output_tokens_per_s"]:,.0f}
        tokens per second at 40 requests per second, because the arrivals bound it.""",
        later["itl_mean_s"] < now["itl_mean_s"]
        and later["ttft_p50_s"] > now["ttft_p50_s"]
        and latest["itl_mean_s"] > 0.8 * later["itl_mean_s"]
        and abs(later["output_tokens_per_s"] / now["output_tokens_per_s"] - 1) < 0.03,
    )


FINDINGS: dict[str, Callable[[Study], Finding]] = {
    "policies-finding": _policies,
    "seeds-finding": _seeds,
    "load-finding": _load,
    "pool-finding": _pool,
    "blocking-finding": _blocking,
    "preemption-finding": _preemption,
    "reservation-finding": _reservation,
    "routers-finding": _routers,
    "event-lag-finding": _event_lag,
    "tiers-finding": _tiers,
    "tier-bandwidth-finding": _tier_bandwidth,
    "storage-finding": _storage,
    "storage-prefetch-finding": _storage_prefetch,
    "storage-bandwidth-finding": _storage_bandwidth,
    "prefill-delay-finding": _prefill_delay,
}
"""Findings by the name of their marks."""
