"""The rules of KV events, numbered: the one table from which reports, JUnit files and the specification are made.

A rule says what holds, whom it harms when it is broken, what repairs it, and what judges it. Most are judged on a live
stream (``stream_verifier``); others by checks of a publisher, a subscriber or a recorder, or by golden bytes. What
released consumers were measured to need is in it, and nothing for beauty's sake: Dynamo's indexer (ai-dynamo-runtime
1.6.1), the smg gateway 1.13.0, SGLang's 0.5.23 and vLLM's 0.33.0 readers.

An id never changes its meaning. A rule that goes leaves its number unused.
"""

from __future__ import annotations

from enum import StrEnum

import attrs
import msgspec

__all__ = ["RULES", "SPECIFICATION", "Chapter", "Rule", "Violation", "RuleSeverity"]


class RuleSeverity(StrEnum):
    """How bad a broken rule is: an ERROR loses blocks or whole streams at some consumer, a WARNING costs hits."""

    ERROR = "error"
    WARNING = "warning"


class Chapter(StrEnum):
    """What a rule is about; its number is the hundreds of the rule's id."""

    FRAMES = "frames"
    SEQUENCE = "sequence"
    BATCHES = "batches"
    EVENTS = "events"
    IDENTITY = "identity"
    PLACES = "places"
    REPLAY = "replay"
    PROOF = "proof"
    DISCOVERY = "discovery"
    LOAD = "load"
    POOL = "pool"


LIVE_STREAM_VERIFIER = "conformance"
"""Judged on any live stream: ``scheduler-components conformance``, ``verify_stream``."""


@attrs.frozen(kw_only=True)
class Rule:
    """One rule.

    Attributes:
        id: ``KVE-`` and a number whose hundreds are the chapter; never changes its meaning.
        name: for people, in reports.
        weight: how bad it is to break it.
        holds: the rule as a sentence.
        harms: who is harmed where it is broken, and how.
        hint: what repairs it.
        judge: ``conformance``; ``X_CHECKS: check_name`` of the test kit; or the test of this repository that holds it.
    """

    id: str
    name: str
    weight: RuleSeverity
    holds: str
    harms: str
    hint: str
    verified_by: str = LIVE_STREAM_VERIFIER

    @property
    def chapter(self) -> Chapter:
        """What the rule is about."""
        return tuple(Chapter)[int(self.id.removeprefix("KVE-")) // 100 - 1]


class Violation(msgspec.Struct, frozen=True):
    """One broken rule: its name, and what was seen."""

    rule: str
    seen: str


def _rule(
    id: str,
    name: str,
    holds: str,
    harms: str,
    hint: str,
    *,
    verified_by: str = LIVE_STREAM_VERIFIER,
    is_error: bool = True,
) -> Rule:
    weight = RuleSeverity.ERROR if is_error else RuleSeverity.WARNING
    return Rule(id=id, name=name, weight=weight, holds=holds, harms=harms, hint=hint, verified_by=verified_by)


_TABLE = (
    # the engine, before any frame
    _rule(
        "KVE-901",
        "descriptor",
        "/server_info describes the streams",
        "routers that discover workers by URL never find the stream",
        "publish kv_events with endpoint, topic, sizes",
    ),
    _rule(
        "KVE-902",
        "reachable",
        "every advertised port takes connections",
        "a router waits on a port where nobody is",
        "check that each rank binds its offset port",
    ),
    _rule(
        "KVE-201",
        "speaks",
        "something is published or replayed",
        "a router treats the worker as empty for ever",
        "send the engine requests while this listens, or listen longer",
    ),
    # frames
    _rule(
        "KVE-101",
        "live-frames",
        "a live message is (topic, sequence, payload)",
        "llm-d's router reads exactly three frames and drops any other count",
        "send exactly three frames",
    ),
    _rule(
        "KVE-102",
        "topic",
        "the first frame begins with the advertised topic",
        "who subscribes to the advertised topic receives nothing, without an error",
        "advertise the topic that is sent",
    ),
    _rule(
        "KVE-103",
        "sequence-frame",
        "the sequence is 8 bytes, big-endian, never negative",
        "readers take -1 for the end marker of a replay, and other lengths for garbage",
        "-1 is the end marker of replays; send 8 bytes",
    ),
    _rule(
        "KVE-202",
        "order",
        "sequence numbers only grow",
        "consumers drop everything at or below the last number that they saw",
        "one publisher and one counter per stream; restart above the last number",
    ),
    _rule(
        "KVE-203",
        "no-gap",
        "no number is skipped: every batch comes live or by replay",
        "a reader asks for the missing batch again and again, or stays wrong",
        "take a number only when its payload goes out",
    ),
    # batches
    _rule(
        "KVE-301",
        "batch",
        "a payload is msgpack [time, events, rank]",
        "Dynamo loses the whole batch when it has two or four elements, or is a map",
        "send exactly three elements",
    ),
    _rule(
        "KVE-302",
        "batch-time",
        "the time is a finite number",
        "Dynamo loses the whole batch when the time is nil",
        "stamp every batch with seconds since the epoch",
    ),
    _rule(
        "KVE-303",
        "batch-rank",
        "the batch names its stream's rank",
        "blocks are credited to another rank, which does not hold them",
        "offset each rank's endpoint and stamp its rank",
    ),
    _rule(
        "KVE-304",
        "event",
        "every event can be read",
        "one event that Dynamo cannot read costs it the whole batch",
        "send BlockStored, BlockRemoved or AllBlocksCleared, and nothing else",
    ),
    # values
    _rule(
        "KVE-501",
        "hash-type",
        "hashes are integers of 64 bits",
        "readers fold bytes differently, so a store and its removal may not meet",
        "send signed int64",
        is_error=False,
    ),
    _rule(
        "KVE-401",
        "block-size",
        "all blocks have the advertised size",
        "routers cut prompts by the advertised size: every lookup misses",
        "advertise the cache's page size",
    ),
    _rule(
        "KVE-402",
        "root-parent",
        "the parent of a root is nil, not 0",
        "readers look for a block 0, and drop the chain as orphans",
        "send nil",
    ),
    _rule(
        "KVE-403",
        "parents-first",
        "a parent is stored before its children",
        "Dynamo drops an orphan and everything below it",
        "store parents first",
    ),
    _rule(
        "KVE-502",
        "one-content",
        "one hash means one content",
        "a prompt is sent where another tenant's or adapter's pages lie",
        "chain the parent, tokens and identity (LoRA, salt) into the hash",
    ),
    _rule(
        "KVE-404",
        "stored-once",
        "a block that stands is not stored again",
        "readers that count copies keep a block after it is gone",
        "record transitions of the cache, not requests",
        is_error=False,
    ),
    _rule(
        "KVE-405",
        "removed-stands",
        "what is removed was stored",
        "a store was never told: the reader missed hits until then",
        "announce stores and removals of every tier alike",
        is_error=False,
    ),
    _rule(
        "KVE-406",
        "children-first",
        "children are removed before their parents",
        "radix-tree readers lose what hangs below, although the pool still holds it",
        "evict leaves first",
        is_error=False,
    ),
    _rule(
        "KVE-601",
        "medium",
        "a medium is one that readers know",
        "readers drop the event: blocks of that tier are never found",
        "send GPU, CPU, CPU_PINNED, DISK, EXTERNAL, STORAGE, FS or OBJ",
        is_error=False,
    ),
    # replay
    _rule(
        "KVE-701",
        "replay-answers",
        "a replay request is answered",
        "Dynamo has no replay timeout: its listener stays deaf",
        "bind a ROUTER at the replay endpoint",
    ),
    _rule(
        "KVE-702",
        "replay-frames",
        "an answer is (sequence, payload), with or without a topic before",
        "sgl-router takes the one form, llm-d the other, and nobody takes a third",
        "send those frames after the empty delimiter",
    ),
    _rule(
        "KVE-703",
        "replay-end",
        "every answer ends with the end marker",
        "Dynamo waits for the marker for ever",
        "send it always, also when there is nothing to send",
    ),
    _rule(
        "KVE-704",
        "replay-order",
        "replayed numbers grow, without holes",
        "an old batch after a newer one brings removed blocks back to life",
        "answer in order, from the start asked for",
    ),
    _rule(
        "KVE-705",
        "replay-same",
        "a replayed payload is the live one",
        "late joiners hold another state than those who were there",
        "keep the bytes that were sent",
    ),
    _rule(
        "KVE-706",
        "replay-past-end",
        "a request from beyond the end gets a bare end marker",
        "a reader that is up to date hangs on its own question",
        "answer it with the end marker",
    ),
    _rule(
        "KVE-707",
        "replay-malformed",
        "a malformed request gets a bare end marker",
        "a confused client hangs, and so does the probe for the extension (KVE-801)",
        "answer it as any other",
        is_error=False,
    ),
    _rule(
        "KVE-708",
        "late-joiner",
        "a replay from 0 begins with an empty cache or a whole state",
        "whoever joins after the window has passed lacks blocks for ever",
        "offer replay, and fold what leaves the window into a base",
        is_error=False,
    ),
    # the pool itself, where an oracle reads it
    _rule(
        "KVE-1101",
        "pool-missing",
        "a block that the pool holds stands in the stream",
        "routers send prompts elsewhere, and the pages are computed again",
        "tell every store, and a removal when the last copy goes",
    ),
    _rule(
        "KVE-1102",
        "pool-extra",
        "a block that stands in the stream is in the pool",
        "routers send prompts where nothing is cached",
        "tell every removal, on every tier",
    ),
)

RULES = {rule.name: rule for rule in _TABLE}
"""What is judged on a live stream, by name, in the order of a report."""

_BEYOND = (
    # of publishers
    _rule(
        "KVE-204",
        "no-burnt-number",
        "an event that cannot be encoded takes no number and no other event with it",
        "readers see a gap that nothing can fill",
        "encode before you take the number",
        verified_by="PUBLISHER_CHECKS: check_unencodable_event_takes_no_sequence",
    ),
    _rule(
        "KVE-205",
        "whole-tail",
        "what was published before a shutdown is sent, or counted as dropped",
        "the last removals before a restart are lost, and the view stays wrong",
        "drain until a deadline before the sockets close",
        verified_by="PUBLISHER_CHECKS: check_shutdown_flushes_and_releases",
    ),
    _rule(
        "KVE-206",
        "restart-above",
        "a publisher that restarts numbers above every earlier life, and clears first",
        "Dynamo ignores a stream that begins at 0 again until it passes the old number",
        "start at the wall clock in milliseconds or above; keep a floor where clocks may be set back",
        verified_by="tests/kv_events/test_file_sequence_floor.py: "
        "test_every_life_starts_above_all_numbers_of_all_earlier_ones",
        is_error=False,
    ),
    _rule(
        "KVE-407",
        "optional-fields",
        "an optional field that is None is left out of maps and trimmed from the tail of arrays",
        "typed readers of other versions lose the batch over a field that they do not expect",
        "vLLM's own reader is the exception: medium and lora_name are written as nil there (dialect vllm)",
        verified_by="tests/kv_events/test_codec.py: test_writes_the_golden_bytes",
    ),
    _rule(
        "KVE-408",
        "unknown-fields",
        "a reader keeps the fields that it knows and passes over the rest",
        "each new field of an engine would cost every reader the batch, as it did five times",
        "decode each event by itself, and skip what you do not know",
        verified_by="tests/kv_events/test_codec.py: test_dialects_may_mix_and_unknown_fields_are_skipped",
    ),
    _rule(
        "KVE-409",
        "last-copy",
        "a removal is told when the last copy of a block goes",
        "the pool still has the block and no reader knows: measured with vLLM 0.32",
        "count copies per hash, or ask the pool's table before you tell",
        verified_by="RECORDER_CHECKS: check_removal_is_published_with_the_last_copy",
    ),
    _rule(
        "KVE-503",
        "page-chain",
        "the plain hash is SGLang's chain, so that routers that hash prompts agree with it",
        "routers that hash for themselves find nothing",
        "SHA-256 over the digest before and the tokens as u32 little-endian; 8 bytes, big-endian, signed",
        verified_by="tests/cache/test_block_hash.py: test_golden_page_hashes",
        is_error=False,
    ),
    _rule(
        "KVE-504",
        "namespace",
        "adapter, salt and every other identity change the hash",
        "tenants share a hash, and a router sends one where the other's pages are",
        "seed the chain with what identifies the prefix",
        verified_by="tests/cache/test_block_hash.py: test_seeds_are_equal_only_for_equal_identities",
    ),
    _rule(
        "KVE-505",
        "hash-folding",
        "a reader takes signed and unsigned integers, and bytes by their last eight, as one signed hash",
        "a store and its removal do not meet where an engine changes its form",
        "fold to signed 64 bits where you read",
        verified_by="RECORDER_CHECKS: check_hashes_are_signed",
    ),
    _rule(
        "KVE-506",
        "sglang-namespaces",
        "SGLang's published hash is the plain one, hashed with the seed of its extra key and salt",
        "an adapter that folds it otherwise asks for blocks that nobody has",
        "take the golden bytes",
        verified_by="tests/test_spec.py: test_namespaced_hashes_are_what_the_specification_says",
        is_error=False,
    ),
    _rule(
        "KVE-602",
        "places",
        "a hash on two media, or in two KV-cache groups, is two blocks",
        "the removal from the device removes the host's copy, too",
        "key blocks by hash, medium and group",
        verified_by="RECORDER_CHECKS: check_groups_and_media_are_separate",
    ),
    _rule(
        "KVE-603",
        "chain-over-media",
        "a block may stand on another medium than its parent",
        "readers that chain within a medium drop what was offloaded below the device",
        "look for a parent on every medium",
        verified_by="RECORDER_CHECKS: check_chain_may_span_media",
    ),
    _rule(
        "KVE-604",
        "remote",
        "a block whose locality is REMOTE is not this worker's",
        "a router sends the prompt to a worker that has only heard of the pages",
        "pass over events with that locality where you count what a worker holds",
        verified_by="tests/testing/test_pool_verifier.py: test_a_remote_block_is_not_of_this_pool",
    ),
    _rule(
        "KVE-709",
        "replay-whole",
        "who asks from 0 gets the whole state, byte for byte as it was sent",
        "a router that restarts is wrong until every block has turned over",
        "keep base and window: what leaves the window is folded and not forgotten",
        verified_by="PUBLISHER_CHECKS: check_replay_from_0_returns_the_whole_stream",
    ),
    # of readers
    _rule(
        "KVE-104",
        "topic-equal",
        "a reader compares the topic for equality",
        "a subscription is a prefix: kv@pod1 receives kv@pod10's blocks behind a proxy",
        "drop, and count, what is of another topic",
        verified_by="tests/observability/kv_stream/test_zmq_subscriber_proxy.py: "
        "test_each_view_holds_its_own_pod_and_says_so",
    ),
    _rule(
        "KVE-207",
        "stale-batches",
        "a batch at or below the last applied number changes nothing",
        "removed blocks come back to life",
        "compare the number before you apply",
        verified_by="SUBSCRIBER_CHECKS: check_duplicate_batch_is_ignored",
    ),
    _rule(
        "KVE-208",
        "gaps-filled",
        "a reader that sees a gap asks for what is missing",
        "the view lacks blocks for ever",
        "ask from the number after the last applied",
        verified_by="SUBSCRIBER_CHECKS: check_gaps_are_filled",
    ),
    _rule(
        "KVE-209",
        "lost-end",
        "a reader finds a lost last batch although nothing follows it",
        "after a lost clear all blocks stand in the view until the next batch: minutes",
        "ask where the stream stands after a silence",
        verified_by="SUBSCRIBER_CHECKS: check_lost_last_batch_is_detected",
    ),
    _rule(
        "KVE-210",
        "restart-seen",
        "a reader notices that the publisher began a new life",
        "every block of the old life stays in the view",
        "compare epochs; without them, fingerprints of the last batch",
        verified_by="SUBSCRIBER_CHECKS: check_publisher_restart_is_detected",
    ),
    _rule(
        "KVE-211",
        "honest-reader",
        "a reader with a gap that nothing filled does not say that it is live",
        "operators trust a view that is wrong",
        "say partial until a digest or a whole replay has proved the view",
        verified_by="SUBSCRIBER_CHECKS: check_not_live_while_a_gap_is_open",
    ),
    _rule(
        "KVE-305",
        "bad-event-alone",
        "a bad event costs a reader that event, a bad batch that batch, and nothing else",
        "one engine's bug stops the routing of a fleet",
        "decode each event by itself; bound sizes, depth and counts",
        verified_by="SUBSCRIBER_CHECKS: check_malformed_messages_are_ignored",
    ),
    # the extension
    _rule(
        "KVE-801",
        "extension-probe",
        "a publisher without the extension answers its 37 bytes with a bare end marker",
        "readers cannot tell who has the extension",
        "answer any request that you do not understand with the end marker",
        verified_by="tests/kv_events/test_replay.py: test_requests_are_the_golden_bytes",
        is_error=False,
    ),
    _rule(
        "KVE-802",
        "digest-chain",
        "the digest is chained over each number and payload, from the epoch on",
        "a loss, a restart or a splice of two histories stays unseen",
        "BLAKE2b of 8 bytes over the digest before, the number, and the payload's CRC-32",
        verified_by="tests/kv_events/test_stream.py: test_digests_are_the_golden_bytes",
    ),
    _rule(
        "KVE-803",
        "sync-or-snapshot",
        "batches are sent from a number only when epoch and digest agree there; otherwise a snapshot is",
        "a reader of an earlier life goes on from a state that never was",
        "compare both before you answer",
        verified_by="tests/kv_events/test_replay.py: test_otherwise_sync_is_base_then_window",
    ),
    _rule(
        "KVE-804",
        "snapshot-whole",
        "a reader puts a snapshot in place as a whole, once its digest agrees",
        "queries during a recovery see half a cache",
        "build it aside, then swap",
        verified_by="tests/observability/kv_stream/test_zmq_subscriber_snapshot.py: "
        "test_another_thread_is_answered_between_two_messages",
    ),
    # discovery and load
    _rule(
        "KVE-903",
        "port-plan",
        "stream r is at base port + r, for events, replay and load alike",
        "a router dials another rank's stream, or nobody's",
        "make the descriptor and the binding from one plan",
        verified_by="tests/test_server_info_endpoints.py: test_every_advertised_endpoint_listens_and_serves_its_rank",
    ),
    _rule(
        "KVE-904",
        "wildcard-host",
        "for a wildcard host a reader dials the host at which it reached the worker",
        "a router dials itself",
        "substitute the worker's own host",
        verified_by="tests/observability/kv_stream/test_discovery.py: test_a_wildcard_becomes_the_host_of_the_url",
    ),
    _rule(
        "KVE-1001",
        "load-stat",
        'a load sample is ("load", sequence, LoadStat), whose first fields never change their place',
        "sgl-router reads by position: one field more in the middle, and every count is another",
        "append only",
        verified_by="tests/load/test_load_stat.py: test_the_array_is_sglangs_with_this_kits_facts_after_it",
    ),
    _rule(
        "KVE-1002",
        "newest-load",
        "a reader takes the newest sample of each rank, and knows its age",
        "reports that were 140 s old sent all prompts to one rank",
        "send sequence and time with each sample; compare them",
        verified_by="tests/load/test_load_view.py: test_the_newest_of_each_rank_is_kept",
    ),
    _rule(
        "KVE-1103",
        "pool-route",
        "where /kv_pool is served, it names the last batch that tells of what it shows, or null",
        "a comparison at another moment accuses a sound engine",
        "read the pool between two steps, after what was recorded went out",
        verified_by="tests/reference/engine/frontend/test_http_kv_pool.py: "
        "test_the_streams_of_a_serving_engine_tell_what_its_pools_hold",
    ),
)

SPECIFICATION = tuple(sorted((*_TABLE, *_BEYOND), key=lambda rule: int(rule.id.removeprefix("KVE-"))))
"""Every rule, those that no live stream can be judged by included, in the order of their ids."""
