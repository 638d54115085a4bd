"""The reasons for missed goals, by row: ``benchmarks.tables`` prints each reason next to its figures."""

from __future__ import annotations

__all__ = ["REASONS"]

REASONS: tuple[tuple[str, str], ...] = (
    (
        "publish: CPU of a step",
        "Each value is looked at before it may go out, 4 ns a token and 200 ns an event (`codec`); the peers look at "
        "none, and their encoder takes 120 ns an event. Each block enters the base, and leaves it again, 0.2 to 0.3 us "
        "each in a loop that sleeps in between; the peers have no base: a step of 512 blocks pays that 1,024 times. "
        "Without the fold, 64 events take 0.94 times SGLang's, and 8,192 tokens 1.4 times (by hand, the same loops).",
    ),
    (
        "publish: loop iteration p99",
        "A table of Python's that takes and loses blocks is copied once in some 300 steps: 4 to 10 ms at 131,072 "
        "blocks. One that grows is copied whenever it doubles: 20 ms at half a million. Sixteen small tables halve "
        "the stall, and cost every step 16 to 20 % more. Sorted arrays of numpy, into which 4,096 changes were merged "
        "at once, stalled for less, but once in some thirty steps: p99 2.6 to 3.4 ms instead of 1.3 (both by hand, "
        "the same loops). Of small batches it is the thread, which has the GIL when the step wants it back.",
    ),
    (
        "publish: publish.. p",
        "Without `idle()`, p99 is a call that sends what the thread came too late for. SGLang's calls never send.",
    ),
    (
        "publish: loop excess",
        "See CPU of a step's publishing: without `idle()` a step of 8,192 tokens encodes, sends and folds for "
        "longer than the 0.2 ms for which its loop lets the GIL go. With `idle()`, SGLang's excess at 256 events "
        "is 1.5 times as long.",
    ),
    (
        "throughput: ",
        "A batch in a burst is encoded, numbered and digested, and folds one that leaves the window; the peers' "
        "is encoded and sent. Two cores carry the publisher, libzmq's thread and the subscriber.",
    ),
    (
        "intake: a step, 64 running, input from a socket",
        "1.01 to 1.07 beside a poll and the sends alone in five runs. These sends, to three other ranks, were "
        "1.16 times a step without input in this one: what comes after eight decode steps pays them, too.",
    ),
    (
        "model: output, 1 at once",
        "A run of it takes a second, so single ones scatter: of twelve pairs the ratio of the medians was 1.04.",
    ),
    (
        "step: emit",
        "The load inquiry is more than half of it, see there.",
    ),
    (
        "step: get_loads",
        "It is flat: 0.98 to 1.02 us in quiet runs.",
    ),
    (
        "codec: encode",
        "Events that are made by hand are looked at value by value. Those of the kit's own caches are not; as "
        "maps they are made into structs without the fields that are not told, which the bare encoder does not "
        "do.",
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
        "0.23 to 0.63 times SGLang's in six runs. What is left is SHA-256, 0.5 us a page, and the tokens.",
    ),
    (
        "view: ",
        "12.7 and 12.9 us in the last two runs.",
    ),
    (
        "start: memory of publisher's base",
        "48 bytes are the integer of a hash, 30 to 60 its entry in the table, and 89 the event: 16 tokens of five "
        "bytes, as they were sent. Less takes a table that is not Python's, or native code. Sorted arrays of "
        "numpy took 163 and 130 bytes, see `publish`.",
    ),
)
"""A pattern for ``section: what`` and the reason. Exactly one pattern matches each missed row."""
