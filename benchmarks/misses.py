"""Why goals are missed, by the names of their rows: ``benchmarks.tables`` puts each reason beside its figures."""

from __future__ import annotations

__all__ = ["REASONS"]

REASONS: tuple[tuple[str, str], ...] = (
    (
        "publish: process CPU",
        "Each value is looked at before it may go out, 3 ns a token and 300 ns an event; the peers look at "
        "none. Each block enters the base, and leaves it again, 0.2 us each where caches are cold; the peers "
        "have no base: a step of 512 blocks pays that 1,024 times.",
    ),
    (
        "publish: loop iteration p99",
        "A table of Python's that takes and loses blocks is copied once in some 300 steps: 4 to 10 ms at 131,072 "
        "blocks. One that grows is copied whenever it doubles: 20 ms at half a million. Sixteen small tables "
        "would take 0.7 ms, and 0.12 ms more of each step of 512 blocks. Of small batches it is the thread, which "
        "has the GIL when the step wants it back.",
    ),
    (
        "publish: publish.. p",
        "The call wakes a thread, with the caches as the loop left them. SGLang's took 13 to 44 us in this "
        "run, and 9 in earlier ones on the same kind of machine: read the ratios. Without `idle()`, p99 is a "
        "call that sends what the thread came too late for.",
    ),
    (
        "publish: delivery p99",
        "2 ms in the run before, when the machine was not slow. The thread encodes and folds for longer than this loop "
        "lets the GIL go.",
    ),
    (
        "publish: loop excess",
        "See process CPU: without `idle()` a step of 8,192 tokens encodes, sends and folds for longer than "
        "the 0.2 ms for which its loop lets the GIL go. With `idle()` SGLang's excess is several times as long.",
    ),
    (
        "throughput: ",
        "A batch in a burst is encoded, numbered and digested, and folds one that leaves the window; the "
        "peers' is encoded and sent. Two cores carry the publisher, libzmq's thread and the subscriber.",
    ),
    (
        "replay: ",
        "The thread sends a slice of the replay between two of the loop's steps, and the loop waits for the "
        "GIL meanwhile.",
    ),
    (
        "metrics: a scrape",
        "0.4 ms a rank when the machine is not slow. What is made once per scrape weighs on one rank alone.",
    ),
    (
        "load: upkeep",
        "0.48 us when the machine is not slow.",
    ),
    (
        "step: latencies",
        "13 us when the machine is not slow.",
    ),
    (
        "intake: a step, 64 running, input from a socket",
        "1.01 to 1.03 in three runs before.",
    ),
    (
        "model: output, 1 at once",
        "A run of it takes a second, so single ones scatter: of twelve pairs the ratio of the medians was 1.04.",
    ),
    (
        "step: emit",
        "The load inquiry is a third to a half of it, see there.",
    ),
    (
        "step: get_loads",
        "It is flat, and takes 0.98 us when the machine is not slow.",
    ),
    (
        "codec: encode",
        "Events that are made by hand are looked at value by value. Those of the kit's own caches are not; as "
        "maps they are made into structs without the fields that are not told, which the bare encoder does "
        "not do.",
    ),
    (
        "codec: decode of the map",
        "What msgspec reads from maps is made into events once more: a map may be of any engine.",
    ),
    (
        "codec: decode, 1 block",
        "A check of the batch's form beside a decode of 0.7 us.",
    ),
    (
        "trace: ",
        "0.23 to 0.47 times SGLang's in four runs before this one. What is left is SHA-256, 0.5 us a page, "
        "and the tokens.",
    ),
    (
        "view: ",
        "Reached as time of the thread in a loop of its own: 14 us for 256 ranks, 33 for 1,000, and 6 for the "
        "holders alone.",
    ),
    (
        "relay: added delay",
        "0.9 ms where the relay's processes have their cores for themselves (`chrt -r 1`); in this run the "
        "way without a relay had 2 to 3 ms of its own.",
    ),
    (
        "hicache_step: a step, 1 rank",
        "11 us in runs before. One rank reduces nothing, over gloo or over ZMQ: it is the bookkeeping alone.",
    ),
    (
        "start: memory of publisher's base",
        "48 bytes are the integer of a hash, 30 to 60 its entry in the table, and 89 the event: 16 tokens of "
        "five bytes, as they were sent. Less takes a table that is not Python's, or native code.",
    ),
)
"""A pattern for ``section: what``, and the reason. Of each missed row exactly one pattern speaks."""
