"""What the dashboard shows, in which order: rows of panels, which name metrics of the catalogue and nothing else."""

from __future__ import annotations

import attrs

__all__ = ["ROWS", "Panel", "Row"]


@attrs.frozen
class Panel:
    """One panel: its title, the catalogue's names of the metrics that it draws, and its width of the grid's 24."""

    title: str
    metrics: tuple[str, ...]
    width: int = 8


@attrs.frozen
class Row:
    """Panels under one heading; a closed row costs no query until somebody opens it."""

    title: str
    panels: tuple[Panel, ...]
    is_open: bool = False


ROWS = (
    Row(
        "Load",
        (
            Panel("Running requests, and slots", ("num_running_reqs", "max_running_requests")),
            Panel("Waiting requests", ("num_queue_reqs",)),
            Panel("KV tokens in use", ("token_usage",)),
            Panel("Prefix cache hit rate", ("cache_hit_rate",)),
            Panel("Generated tokens a second", ("gen_throughput",)),
            Panel("Age of the load report", ("load_age_seconds",)),
        ),
        is_open=True,
    ),
    Row(
        "Latency",
        (
            Panel("Time to first token", ("time_to_first_token_seconds",)),
            Panel("Between tokens", ("inter_token_latency_seconds",)),
            Panel("End to end", ("e2e_request_latency_seconds",)),
            Panel("In the queue", ("queue_time_seconds",)),
            Panel("In prefill", ("prefill_time_seconds",)),
            Panel("In decode", ("decode_time_seconds",)),
        ),
        is_open=True,
    ),
    Row(
        "Work",
        (
            Panel("Tokens waiting for prefill", ("num_pending_tokens", "num_waiting_uncached_tokens")),
            Panel("KV pool", ("num_used_tokens", "num_total_tokens", "max_total_num_tokens")),
            Panel("Fuller of slots and tokens", ("utilization",)),
            Panel("Requests a second", ("num_requests_total", "num_aborted_requests_total")),
            Panel("Prompt tokens a second", ("prompt_tokens_total", "cached_tokens_total")),
            Panel("Tokens a second", ("generation_tokens_total", "prefill_uncached_tokens_total")),
            Panel("Retractions a second", ("num_retracted_requests_total",)),
            Panel("Evicted tokens a second", ("evicted_tokens_total",)),
            Panel("Held back requests", ("num_grammar_queue_reqs", "num_paused_reqs", "num_retracted_reqs")),
            Panel(
                "Metric reports refused, and pages unread, a second",
                ("metrics_reports_refused_total", "metrics_pages_unread_total"),
            ),
        ),
    ),
    Row(
        "Hierarchical cache",
        (
            Panel(
                "Prompt tokens a second, and where they were found",
                (
                    "hicache_prompt_tokens_total",
                    "hicache_device_hit_tokens_total",
                    "hicache_host_hit_tokens_total",
                    "hicache_storage_hit_tokens_total",
                ),
                16,
            ),
            Panel("Pages lost by eviction a second", ("hicache_pages_dropped_total",)),
            Panel("Pages to the host a second", ("hicache_pages_written_total", "hicache_pages_not_written_total")),
            Panel("Pages to the device a second", ("hicache_pages_loaded_total", "hicache_pages_not_loaded_total")),
            Panel("Pages to storage a second", ("hicache_pages_backed_up_total", "hicache_pages_not_backed_up_total")),
            Panel("Pages from storage a second", ("hicache_pages_prefetched_total", "hicache_pages_revoked_total")),
            Panel("Prefetches a second", ("hicache_prefetches_total", "hicache_prefetches_revoked_total")),
        ),
    ),
    Row(
        "KV events",
        (
            Panel("Batches and events a second", ("kv_events_batches_sent_total", "kv_events_sent_total")),
            Panel("Bytes a second", ("kv_events_bytes_sent_total",)),
            Panel("Lag", ("kv_events_lag_seconds",)),
            Panel(
                "Batches lost, events refused, a second", ("kv_events_batches_dropped_total", "kv_events_refused_total")
            ),
            Panel(
                "Batches pending, and collapsed a second",
                ("kv_events_batches_pending", "kv_events_batches_collapsed_total"),
            ),
            Panel("Last sequence", ("kv_events_last_sequence",)),
            Panel("Replays a second", ("kv_events_replays_served_total", "kv_events_batches_replayed_total")),
            Panel(
                "Replays cut or refused a second",
                ("kv_events_replays_truncated_total", "kv_events_replays_refused_total"),
            ),
            Panel("Open replays", ("kv_events_replays_open",)),
            Panel("Batches kept, and blocks in the base", ("kv_events_batches_buffered", "kv_events_blocks_in_base")),
            Panel("Bytes kept for replay", ("kv_events_bytes_buffered",)),
            Panel(
                "Connections and refusals a second",
                ("kv_events_subscribers_seen_total", "kv_events_peers_refused_total"),
            ),
            Panel("Open to the network without keys", ("kv_events_open_bind_without_auth",)),
        ),
    ),
    Row(
        "Outputs",
        (
            Panel("Tokens sent a second", ("output_tokens_sent_total",)),
            Panel("Messages and news sent a second", ("output_batches_sent_total", "output_deltas_sent_total")),
            Panel("Steps delayed a second", ("output_steps_delayed_total",)),
            Panel("Requests that wait for the receiver", ("output_requests_waiting", "output_ends_held")),
            Panel("Bytes held for the receiver", ("output_bytes_held",)),
            Panel("Ends and tokens dropped a second", ("output_ends_dropped_total", "output_tokens_dropped_total")),
        ),
    ),
    Row(
        "Engine parts",
        (
            Panel("Prefill instance", ("num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs")),
            Panel(
                "Decode instance",
                (
                    "num_decode_prealloc_queue_reqs",
                    "num_decode_transfer_queue_reqs",
                    "num_decode_retracted_queue_reqs",
                ),
            ),
            Panel("KV transfer speed", ("kv_transfer_speed_gb_s",), 4),
            Panel("KV transfer latency", ("kv_transfer_latency_ms",), 4),
            Panel("LoRA slots", ("lora_pool_slots_used", "lora_pool_slots_total")),
            Panel("Speculation: accepted a step", ("spec_accept_length",), 4),
            Panel("Speculation: accepted share", ("spec_accept_rate",), 4),
            Panel("Device memory", ("weight_memory_usage_gb", "kv_cache_memory_usage_gb", "graph_memory_usage_gb")),
        ),
    ),
)
