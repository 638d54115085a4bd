"""The numbered rules of KV events: reports, JUnit files and the specification come from this one table.

A rule has a condition, the harm of a violation, a repair, and the test that verifies it. ``stream_verifier`` verifies
most rules on a live stream. Checks of a publisher, a subscriber or a recorder, or golden bytes verify the others. Every
rule is a measured requirement of a released consumer: Dynamo's indexer (ai-dynamo-runtime 1.6.1), the smg gateway
1.13.0, or the readers of SGLang 0.5.23 and vLLM 0.33.0.

An id never changes its meaning. The id of a removed rule is not used again.
"""

from __future__ import annotations

from typing import Literal, get_args

import attrs
import msgspec

__all__ = ["RULES", "SPECIFICATION", "Chapter", "Rule", "Violation", "RuleSeverity"]


RuleSeverity = Literal["error", "warning"]
"""Severity of a violation: an error loses blocks or whole streams at some consumer, a warning loses cache hits."""

Chapter = Literal[
    "frames", "sequence", "batches", "events", "identity", "places", "replay", "proof", "discovery", "load", "pool"
]
"""Subject of a rule. The hundreds of a rule's id are the number of its chapter."""

LIVE_STREAM_VERIFIER = "conformance"
"""``scheduler-components conformance`` and ``verify_stream`` verify the rule on any live stream."""


@attrs.frozen(kw_only=True)
class Rule:
    """One rule.

    Attributes:
        id: ``KVE-`` and a number whose hundreds are the chapter.
        name: the name in reports.
        weight: the severity of a violation.
        holds: the condition.
        harms: the consumer that a violation harms, and the harm.
        hint: the repair.
        verified_by: ``conformance``; ``X_CHECKS: check_name`` of the test kit; or a test of this repository.
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
        chapters: tuple[Chapter, ...] = get_args(Chapter)
        return chapters[int(self.id.removeprefix("KVE-")) // 100 - 1]


class Violation(msgspec.Struct, frozen=True):
    """One violation: the name of the rule, and the observation."""

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
    weight: RuleSeverity = "error" if is_error else "warning"
    return Rule(id=id, name=name, weight=weight, holds=holds, harms=harms, hint=hint, verified_by=verified_by)


# fmt: off
_TABLE = (
    # discovery and reachability
    _rule("KVE-901", "descriptor", "/server_info describes the streams",
          "routers that discover workers by URL never find the stream",
          "publish kv_events with endpoint, topic and sizes"),
    _rule("KVE-902", "reachable", "every advertised port accepts connections",
          "a router waits on a port without a listener", "check that each rank binds its offset port"),
    _rule("KVE-201", "speaks", "the publisher sends at least one batch, live or by replay",
          "a router treats the worker as empty forever",
          "send requests to the engine during the check, or listen longer"),
    # frames
    _rule("KVE-101", "live-frames", "a live message is (topic, sequence, payload)",
          "llm-d's router reads exactly three frames and drops any other count",
          "send exactly three frames"),
    _rule("KVE-102", "topic", "the first frame begins with the advertised topic",
          "a subscriber to the advertised topic receives nothing, and no error",
          "advertise the topic that the publisher sends"),
    _rule("KVE-103", "sequence-frame", "the sequence is 8 bytes, big-endian and not negative",
          "readers take -1 for the end marker of a replay, and drop frames of other lengths",
          "send 8 bytes; reserve -1 for the end marker of replays"),
    _rule("KVE-202", "order", "sequence numbers only grow",
          "consumers drop every batch at or below the last number that they saw",
          "use one publisher and one counter per stream; restart above the last number"),
    _rule("KVE-203", "no-gap", "no number is skipped: every batch arrives live or by replay",
          "a reader requests the missing batch again and again, or its view stays wrong",
          "take a number only when its payload is sent"),
    # batches
    _rule("KVE-301", "batch", "a payload is msgpack [time, events, rank]",
          "Dynamo loses a whole batch that has two or four elements, or that is a map",
          "send exactly three elements"),
    _rule("KVE-302", "batch-time", "the time is a finite number", "Dynamo loses the whole batch if the time is nil",
          "stamp every batch with seconds since the epoch"),
    _rule("KVE-303", "batch-rank", "the batch names the rank of its stream",
          "readers credit the blocks to another rank, which does not hold them",
          "offset each rank's endpoint and stamp its rank"),
    _rule("KVE-304", "event", "every event can be decoded",
          "one event that Dynamo cannot decode costs it the whole batch",
          "send only BlockStored, BlockRemoved and AllBlocksCleared"),
    # values
    _rule("KVE-501", "hash-type", "hashes are integers of 64 bits",
          "readers fold bytes in different ways, so a store and its removal may not match",
          "send signed int64", is_error=False),
    _rule("KVE-401", "block-size", "all blocks have the advertised size",
          "routers split prompts by the advertised size, so every lookup misses",
          "advertise the cache's page size"),
    _rule("KVE-402", "root-parent", "the parent of a root is nil, not 0",
          "readers look for a block 0, and drop the chain as orphans", "send nil"),
    _rule("KVE-403", "parents-first", "a parent is stored before its children",
          "Dynamo drops an orphan and every block below it", "store parents first"),
    _rule("KVE-502", "one-content", "one hash identifies one content",
          "a router sends a prompt to the pages of another tenant or adapter",
          "chain the parent, the tokens and the identity (LoRA, salt) into the hash"),
    _rule("KVE-404", "stored-once", "a stored block is not stored again",
          "readers that count copies keep a block after its removal", "record transitions of the cache, not requests",
          is_error=False),
    _rule("KVE-405", "removed-stands", "a removed block was stored before",
          "the store was never published, so readers missed hits until then",
          "publish stores and removals of every tier", is_error=False),
    _rule("KVE-406", "children-first", "children are removed before their parents",
          "radix-tree readers lose the children, although the pool still holds them",
          "evict leaves first", is_error=False),
    _rule("KVE-601", "medium", "the medium is one that readers know",
          "readers drop the event and never find the blocks of that tier",
          "send GPU, CPU, CPU_PINNED, DISK, EXTERNAL, STORAGE, FS or OBJ", is_error=False),
    # replay
    _rule("KVE-701", "replay-answers", "the publisher answers a replay request",
          "Dynamo has no replay timeout: its listener blocks forever", "bind a ROUTER at the replay endpoint"),
    _rule("KVE-702", "replay-frames", "a reply is (sequence, payload), with or without a topic before them",
          "sgl-router accepts one form and llm-d the other; no reader accepts a third",
          "send those frames after the empty delimiter"),
    _rule("KVE-703", "replay-end", "every reply ends with the end marker", "Dynamo waits for the marker forever",
          "always send it, also without any batch"),
    _rule("KVE-704", "replay-order", "replayed numbers grow without gaps",
          "an old batch after a newer one restores removed blocks", "reply in order, from the requested start"),
    _rule("KVE-705", "replay-same", "a replayed payload equals the live one",
          "late joiners hold another state than earlier readers", "keep the bytes that were sent"),
    _rule("KVE-706", "replay-past-end", "a request from beyond the end gets a bare end marker",
          "a reader that is up to date waits for its reply forever", "reply with the end marker"),
    _rule("KVE-707", "replay-malformed", "a malformed request gets a bare end marker",
          "its client waits forever, and so does the probe for the extension (KVE-801)",
          "reply to it as to any other request", is_error=False),
    _rule("KVE-708", "late-joiner", "a replay from 0 begins with an empty cache or a whole state",
          "a reader that joins after the replay buffer has moved on lacks blocks forever",
          "offer replay, and fold what leaves the replay buffer into a snapshot", is_error=False),
    # the pool itself, if it can be read
    _rule("KVE-1101", "pool-missing", "the stream contains every block that the pool holds",
          "routers send prompts elsewhere, and the pages are computed again",
          "publish every store, and a removal only with the last copy"),
    _rule("KVE-1102", "pool-extra", "the pool holds every block that the stream contains",
          "routers send prompts to workers without the cached pages", "publish every removal, on every tier"),
)
# fmt: on

RULES = {rule.name: rule for rule in _TABLE}
"""The rules of live streams by name, in the order of a report."""

# fmt: off
_BEYOND = (
    # of publishers
    _rule("KVE-204", "no-burnt-number", "an event that cannot be encoded takes no number and no other event with it",
          "readers see a gap that no replay can fill", "encode before you take the number",
          verified_by="PUBLISHER_CHECKS: check_unencodable_event_takes_no_sequence"),
    _rule("KVE-205", "whole-tail", "every batch that was published before a shutdown is sent or counted as dropped",
          "the last removals before a restart are lost, and views stay wrong",
          "drain until a deadline before the sockets close",
          verified_by="PUBLISHER_CHECKS: check_shutdown_flushes_and_releases"),
    _rule("KVE-206", "restart-above", "a restarted publisher numbers above every earlier epoch, and clears first",
          "Dynamo ignores a stream that begins at 0 again until it passes the old number",
          "start at the wall clock in microseconds or above; keep a floor in a file if clocks may be set back",
          verified_by="tests/kv_events/test_file_sequence_floor.py: "
          "test_every_epoch_starts_above_all_numbers_of_all_earlier_ones", is_error=False),
    _rule("KVE-407", "optional-fields",
          "an optional field that is None is omitted from maps and trimmed from the end of arrays",
          "typed readers of other versions lose the batch because of an unexpected field",
          "vLLM's own reader is the exception: it needs medium and lora_name as nil (dialect vllm)",
          verified_by="tests/kv_events/test_codec.py: test_writes_the_golden_bytes"),
    _rule("KVE-408", "unknown-fields", "a reader keeps the fields that it knows and ignores the others",
          "each new field of an engine would cost every reader the batch, as it did five times",
          "decode each event separately, and skip unknown fields",
          verified_by="tests/kv_events/test_codec.py: test_dialects_may_mix_and_unknown_fields_are_skipped"),
    _rule("KVE-409", "last-copy", "a removal is published when the last copy of a block is freed",
          "the pool still has the block and no reader knows it: measured with vLLM 0.32",
          "count copies per hash, or check the pool's table before you publish",
          verified_by="RECORDER_CHECKS: check_removal_is_published_with_the_last_copy"),
    _rule("KVE-503", "page-chain", "the plain hash is SGLang's chain, so that it equals the hashes of routers",
          "routers that hash prompts find no block",
          "SHA-256 over the parent's digest and the tokens as u32 little-endian; 8 bytes, big-endian, signed",
          verified_by="tests/cache/test_block_hash.py: test_golden_page_hashes", is_error=False),
    _rule("KVE-504", "namespace", "adapter, salt and every other identity change the hash",
          "tenants share a hash, and a router sends one tenant to the pages of another",
          "seed the chain with the identity of the prefix",
          verified_by="tests/cache/test_block_hash.py: test_seeds_are_equal_only_for_equal_identities"),
    _rule("KVE-505", "hash-folding",
          "a reader accepts signed and unsigned integers and the last eight bytes of bytes as one signed hash",
          "a store and its removal do not match after an engine changes its form",
          "fold hashes to signed 64 bits when you read them", verified_by="RECORDER_CHECKS: check_hashes_are_signed"),
    _rule("KVE-506", "sglang-namespaces",
          "SGLang publishes the plain hash, hashed with the seed of its extra key and salt",
          "an adapter that folds it in another way asks for blocks that no worker has",
          "compare with the golden bytes",
          verified_by="tests/testing/test_rules.py: test_namespaced_hashes_follow_the_specification", is_error=False),
    _rule("KVE-602", "places", "one hash on two media, or in two KV-cache groups, is two blocks",
          "the removal from the device also removes the copy on the host", "key blocks by hash, medium and group",
          verified_by="RECORDER_CHECKS: check_groups_and_media_are_separate"),
    _rule("KVE-603", "chain-over-media", "a block may be on another medium than its parent",
          "readers that chain within one medium drop blocks that were offloaded",
          "look for a parent on every medium", verified_by="RECORDER_CHECKS: check_chain_may_span_media"),
    _rule("KVE-604", "remote", "a block whose locality is REMOTE does not belong to this worker",
          "a router sends the prompt to a worker that does not hold the pages",
          "ignore events with that locality when you count a worker's blocks",
          verified_by="tests/testing/test_pool_verifier.py: test_remote_blocks_are_ignored"),
    _rule("KVE-709", "replay-whole", "a request from 0 gets the whole state, byte for byte as it was sent",
          "a router that restarts is wrong until every block has been replaced",
          "keep a snapshot and a replay buffer: fold batches that leave the buffer",
          verified_by="PUBLISHER_CHECKS: check_replay_from_0_returns_the_whole_stream"),
    # of readers
    _rule("KVE-104", "topic-equal", "a reader compares the topic for equality",
          "a subscription is a prefix: kv@pod1 receives kv@pod10's blocks behind a proxy",
          "drop and count messages of another topic",
          verified_by="tests/observability/kv_stream/test_zmq_subscriber_proxy.py: "
          "test_each_view_has_only_the_blocks_of_its_own_pod"),
    _rule("KVE-207", "stale-batches", "a batch at or below the last applied number changes nothing",
          "removed blocks return", "compare the number before you apply",
          verified_by="SUBSCRIBER_CHECKS: check_duplicate_batch_is_ignored"),
    _rule("KVE-208", "gaps-filled", "a reader that sees a gap requests the missing batches",
          "the view lacks blocks forever", "request from the number after the last applied one",
          verified_by="SUBSCRIBER_CHECKS: check_gaps_are_filled"),
    _rule("KVE-209", "lost-end", "a reader detects a lost last batch although no batch follows it",
          "after a lost clear the view keeps all blocks until the next batch, for minutes",
          "request the end of the stream after a silence",
          verified_by="SUBSCRIBER_CHECKS: check_lost_last_batch_is_detected"),
    _rule("KVE-210", "restart-seen", "a reader detects that the publisher began a new epoch",
          "every block of the old epoch stays in the view",
          "compare epochs; without them, compare fingerprints of the last batch",
          verified_by="SUBSCRIBER_CHECKS: check_publisher_restart_is_detected"),
    _rule("KVE-211", "honest-reader", "a reader with an open gap does not report that it is live",
          "operators trust a wrong view", "report partial until a digest or a whole replay has verified the view",
          verified_by="SUBSCRIBER_CHECKS: check_not_live_while_a_gap_is_open"),
    _rule("KVE-305", "bad-event-alone",
          "a bad event costs a reader that event, a bad batch costs that batch, and nothing more",
          "one engine's bug stops the routing of a fleet",
          "decode each event separately; limit sizes, depth and counts",
          verified_by="SUBSCRIBER_CHECKS: check_malformed_messages_are_ignored"),
    # the extension
    _rule("KVE-801", "extension-probe",
          "a publisher without the extension replies to its 37 bytes with a bare end marker",
          "readers cannot detect which publishers have the extension",
          "reply with the end marker to any unknown request",
          verified_by="tests/kv_events/test_replay_messages.py: test_requests_are_the_golden_bytes", is_error=False),
    _rule("KVE-802", "digest-chain", "the digest is chained over each number and payload since the start of the epoch",
          "a loss, a restart or a splice of two histories stays undetected",
          "BLAKE2b of 8 bytes over the previous digest, the number, and the payload's CRC-32",
          verified_by="tests/kv_events/test_stream.py: test_digests_are_the_golden_bytes"),
    _rule("KVE-803", "sync-or-snapshot",
          "batches are sent from a number only if epoch and digest match there; otherwise a snapshot is sent",
          "a reader of an earlier epoch continues from a state that never existed",
          "compare both before you reply",
          verified_by="tests/kv_events/test_replay.py: test_otherwise_sync_is_the_snapshot_and_then_the_buffer"),
    _rule("KVE-804", "snapshot-whole",
          "a reader replaces its state by a snapshot as a whole, after its digest matches",
          "queries during a recovery see half a cache", "build the snapshot separately, then swap",
          verified_by="tests/observability/kv_stream/test_zmq_subscriber_snapshot.py: "
          "test_a_query_of_another_thread_is_answered_between_two_messages"),
    # discovery and load
    _rule("KVE-903", "port-plan", "stream r is at base port + r, for events, replay and load",
          "a router dials another rank's stream, or a port without a listener",
          "derive the descriptor and the binding from one plan",
          verified_by="tests/test_server_info_endpoints.py: "
          "test_every_advertised_endpoint_listens_and_serves_its_rank"),
    _rule("KVE-904", "wildcard-host", "for a wildcard host a reader dials the host at which it reached the worker",
          "a router dials itself", "substitute the worker's own host",
          verified_by="tests/observability/kv_stream/test_discovery.py: test_a_wildcard_becomes_the_host_of_the_url"),
    _rule("KVE-1001", "load-stat",
          'a load sample is ("load", sequence, LoadStat), whose first fields never change their place',
          "sgl-router reads by position: a new field in the middle shifts every count",
          "append only", verified_by="tests/load/test_load_stat.py: test_the_array_starts_with_sglangs_fields"),
    _rule("KVE-1002", "newest-load", "a reader takes the newest sample of each rank, and knows its age",
          "reports that were 140 s old sent all prompts to one rank",
          "send sequence and time with each sample, and compare them",
          verified_by="tests/load/test_load_stat_view.py: test_the_newest_of_each_rank_is_kept"),
    _rule("KVE-1103", "pool-route", "/kv_pool names the last batch before the state that it shows, or null",
          "a comparison with another state reports errors of a correct engine",
          "read the pool between two steps, after the recorded events are sent",
          verified_by="tests/scheduler_engine/engine/test_http_app_kv_pool.py: "
          "test_the_streams_of_a_serving_engine_match_its_pools"),
)
# fmt: on

SPECIFICATION = tuple(sorted((*_TABLE, *_BEYOND), key=lambda rule: int(rule.id.removeprefix("KVE-"))))
"""Every rule, also those that no live stream can show, in the order of their ids."""
