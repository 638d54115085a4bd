"""Every rule of the wire that a stream can break: what it is, how bad, whom it harms, and what mends it.

The rules are what released consumers were measured to need: Dynamo's indexer (ai-dynamo-runtime 1.6.1), the smg
gateway 1.13.0, SGLang's 0.5.23 and vLLM's 0.33.0 readers.
"""

from __future__ import annotations

from enum import StrEnum

import attrs
import msgspec

__all__ = ["RULES", "Rule", "Violation", "Weight"]


class Weight(StrEnum):
    """How bad a broken rule is: an ERROR loses blocks or whole streams at some consumer, a WARNING costs hits."""

    ERROR = "error"
    WARNING = "warning"


@attrs.frozen
class Rule:
    """One rule.

    Attributes:
        name: in reports and JSON; never changes its meaning.
        weight: how bad it is to break it.
        holds: the rule as a sentence.
        mend: what its publisher can do; says who is harmed where that is not plain.
    """

    name: str
    weight: Weight
    holds: str
    mend: str


class Violation(msgspec.Struct, frozen=True):
    """One broken rule: its name, and what was seen."""

    rule: str
    seen: str


_E, _W = Weight.ERROR, Weight.WARNING

_TABLE = (
    # the engine
    Rule("descriptor", _E, "/server_info describes the streams", "publish kv_events with endpoint, topic, sizes"),
    Rule("reachable", _E, "every advertised port takes connections", "check that each rank binds its offset port"),
    Rule(
        "speaks",
        _E,
        "something is published or replayed",
        "send the engine requests while this listens, or listen longer",
    ),
    # frames
    Rule("live-frames", _E, "a live message is (topic, sequence, payload)", "send exactly three frames"),
    Rule("topic", _E, "the first frame begins with the advertised topic", "advertise the topic that is sent"),
    Rule(
        "sequence-frame",
        _E,
        "the sequence is 8 bytes, big-endian, never negative",
        "-1 is the end marker of replays; send 8 bytes",
    ),
    Rule(
        "order",
        _E,
        "sequence numbers only grow",
        "one publisher and one counter a stream; restart above the last number",
    ),
    Rule(
        "no-gap", _E, "no number is burnt: all come live or by replay", "take a number only when its payload goes out"
    ),
    # batches
    Rule(
        "batch",
        _E,
        "a payload is msgpack [time, events, rank]",
        "send exactly three elements; Dynamo drops the batch otherwise",
    ),
    Rule("batch-time", _E, "the time is a finite number", "stamp every batch with seconds since the epoch"),
    Rule("batch-rank", _E, "the batch names its stream's rank", "offset each rank's endpoint and stamp its rank"),
    Rule(
        "event",
        _E,
        "every event can be read",
        "send BlockStored, BlockRemoved or AllBlocksCleared; others cost Dynamo the batch",
    ),
    # values
    Rule(
        "hash-type", _W, "hashes are integers of 64 bits", "bytes are folded differently by readers: send signed int64"
    ),
    Rule(
        "block-size",
        _E,
        "all blocks have the advertised size",
        "advertise the cache's size: routers hash prompts by it",
    ),
    Rule("root-parent", _E, "the parent of a root is nil, not 0", "send nil"),
    Rule(
        "parents-first",
        _E,
        "a parent is stored before its children",
        "store parents first: Dynamo drops an orphan and all below it",
    ),
    Rule(
        "one-content",
        _E,
        "one hash means one content",
        "chain the parent, tokens and identity (LoRA, salt) into the hash",
    ),
    Rule("stored-once", _W, "a block that stands is not stored again", "record transitions of the cache, not requests"),
    Rule("removed-stands", _W, "what is removed was stored", "announce stores and removals of every tier alike"),
    Rule(
        "children-first",
        _W,
        "children are removed before their parents",
        "evict leaves first: readers lose what hangs below",
    ),
    Rule("medium", _W, "a medium is one that readers know", "send GPU, CPU, CPU_PINNED, DISK, EXTERNAL or STORAGE"),
    # replay
    Rule("replay-answers", _E, "a replay request is answered", "bind a ROUTER at the replay endpoint"),
    Rule(
        "replay-frames",
        _E,
        "an answer is (sequence, payload), with or without a topic before",
        "send those frames after the empty delimiter",
    ),
    Rule("replay-end", _E, "every answer ends with the end marker", "send it always: Dynamo waits for it for ever"),
    Rule("replay-order", _E, "replayed numbers grow, without holes", "answer in order, from the start asked for"),
    Rule("replay-same", _E, "a replayed payload is the live one", "keep the bytes that were sent"),
    Rule(
        "replay-past-end", _E, "a request from beyond the end gets a bare end marker", "answer it with the end marker"
    ),
    Rule(
        "replay-malformed",
        _W,
        "a malformed request gets a bare end marker",
        "answer it: a confused client must not hang",
    ),
)

RULES = {rule.name: rule for rule in _TABLE}
"""By name, in the order in which a report tells them."""
