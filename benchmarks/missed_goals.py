"""The reasons for missed goals, by row: ``benchmarks.tables`` prints each reason next to its figures."""

from __future__ import annotations

REASONS: tuple[tuple[str, str], ...] = (
    (
        "policies: order and admission, (fcfs|priority), 128 waiting",
        "Reading three requests of the order takes 4 us of it. The rest is the admission of two requests, with their "
        "pages, and with the latencies and counts that reports need. SGLang allocates and counts later, outside of the "
        "calls that this row times.",
    ),
    (
        "policies: .*, 10,000 waiting",
        "The two turns had ratios of 0.67 and 1.86, because the speed of the machine changed between them. The "
        "policies read no more requests of a longer queue.",
    ),
    (
        "publish: CPU of publishing per step",
        "Mostly the fold. Each block enters the snapshot and leaves it again, 0.2 to 0.3 us each in a loop with "
        "pauses, so a step of 512 blocks pays this 1,024 times. The peers have no snapshot. Without the fold, 64 "
        "events take 0.94 times and 8,192 tokens 1.4 times SGLang's time (measured by hand in the same loops). The "
        "encoder checks each value of events that a user made, 4 ns per token and 200 ns per event (`codec`). The "
        "peers check none, and their encoder takes 120 ns per event. Events of the kit's caches are not checked, so "
        "their rows leave this part out. The fold waits for memory: neither a table without reference counts (0.67 us"
        " per block instead of 0.78) nor counting by the batch (0.77) changes it much. Folding 131,072 blocks "
        "together by sorting in numpy takes 0.30, but would make numpy a dependency of every publisher (all by hand, "
        "on a busy machine).",
    ),
    (
        "publish: loop iteration p99",
        "The snapshot has 23 dicts of different shares, which grow one after the other. Storing 512 blocks takes at "
        "most 0.5 ms while 131,072 are stored; with sixteen equal dicts it took 0.9 in the same runs, and with one "
        "about ten times as long. Sorted numpy arrays that merge 4,096 changes together stall once in about thirty "
        "steps: p99 2.6 to 3.4 ms (measured by hand in the same loops). With small batches the thread holds the GIL "
        "when the step needs it.",
    ),
    (
        "publish: publish.. p",
        "Without `idle()`, the thread takes 0.34 ms for a batch of 64 events and 0.8 ms for one of 8,192 tokens on "
        "this machine, with cold caches. The loop releases the GIL for 0.2 ms, so the thread is late, and calls send "
        "in its place. Leaving these batches to the late thread made the median call 10 us, but the iteration took as "
        "long, and delivery p99 rose from 2.9 to 10 ms (by hand, in alternating runs). With `idle()`, p99 is a call "
        "after a step of 4 ms or more, which the system interrupted: nothing says when the next `idle()` comes, so "
        "the call sends. SGLang's calls never send.",
    ),
    (
        "publish: delivery p99",
        "One of two runs took 4.4 ms, the other 15; the bare loop of encode and send took 5.9 and 6.1.",
    ),
    (
        "publish: loop excess",
        "See `publish()` p50 and CPU of publishing per step. With `idle()`, SGLang's excess at 256 events is 1.5 times "
        "as long.",
    ),
    (
        "saturated: undelivered at the end, 1 block",
        "Up to twelve small batches wait for the thread or for a call that sends them, and the subscriber shares the "
        "two cores. All arrive. SGLang has 13,563 undelivered.",
    ),
    (
        "traffic: publish.. p99",
        "In a loop that never waits no other thread gets the GIL, so each batch is encoded, sent and folded inside a "
        "call. While the machine took 1.5 times as long as the reference, the best of 500 batches of 8,192 tokens, "
        "with 512 blocks stored and 512 removed, took 125 us to encode, 16 for the digest and 90 to fold; checking the "
        "values is 75 of the first. With cold caches a batch takes three times as long. A smaller slice does not help "
        "a batch that exceeds it. With one block, three batches go together: one alone took 0.4 to 0.9 times as long "
        "at the 99th percentile, and up to 40 times at the median, because each send wakes libzmq's thread and the "
        "subscriber, which share two cores with the loop (by hand).",
    ),
    (
        "traffic: (excess|iteration)",
        "See `publish() p99`. With 64 events and more, each step sends one batch, so the median contains it. SGLang's "
        "loop leaves its batches to a thread, which sent them 14 ms (median) and 91 ms (p99) late in the same run.",
    ),
    (
        "traffic: (live delay|time to the end)",
        "Loop, replay clients, subscriber and libzmq's thread share two cores. In the loop that holds the GIL, a "
        "replay gets a tenth of the time of its calls. With steps of 100 ms, a run has 30 steps, so its p99 is the "
        "worst of them. With one block in a loop that never waits, the two runs took 12 and 56 ms.",
    ),
    (
        "replay: time to the end",
        "The publisher keeps a digest of every batch and writes it to the answer, and `idle()` serves 0.3 ms of it per "
        "step, so that a step does not become longer. SGLang's thread sends without a bound meanwhile: its live p99 "
        "is 190 times as long.",
    ),
    (
        "relay: added delay p99, 2,000 batches/s of 16 events",
        "Publisher, relay and subscriber share two cores, and the relay decodes, merges and encodes 32,000 events per "
        "second on them: 5.9 and 6.7 ms in two turns. In a run an hour before, when the machine took 2.6 times as "
        "long as the reference, it fell behind for moments: 74 and 137 ms, with a median of 0.6.",
    ),
    (
        "throughput: ",
        "A batch of a burst is encoded, numbered and digested, and one that leaves the replay buffer is folded. The "
        "peers' batch is encoded and sent. The publisher, libzmq's thread and the subscriber share two cores.",
    ),
    (
        "intake: a step, 64 running, input from a socket",
        "The ratio to one poll and the sends was 1.01 to 1.07 in five runs. In this run these sends to three other "
        "ranks took 1.16 times a step without input. Input after eight decode steps pays for them too.",
    ),
    (
        "model: output, 1 concurrent request",
        "A run takes one second, so single runs vary: the ratio of the medians of twelve pairs was 1.04.",
    ),
    (
        "step: emit",
        "In process, the load inquiry takes half of it; see its row. A fifth is the statistics of twelve components, "
        "14 us every 32 steps: fewer reports would be older than a second in an engine with long steps. Over shared "
        "memory, one encoder writes every field of `SchedulerStats`. It takes 1 us more than hand-written rows, 0.3 % "
        "of a reference step without a device (six pairs of runs).",
    ),
    (
        "metrics: record.. of the sink alone, without times",
        "One encoder writes every field of `SchedulerStats`: 2.5 us, where hand-written rows took 1.7 (six pairs of "
        "runs). The difference is 0.3 % of a reference step without a device.",
    ),
    (
        "metrics: loop p99, scraped 10 times a second",
        "A scrape holds the GIL while it renders the page, 2 to 4 ms on this machine, so ten per second touch some "
        "hundredth of the steps, which p99 shows: in four runs it took 1.02 to 1.76 times as long. Prometheus scrapes "
        "once in 15 s.",
    ),
    (
        "metrics: a scrape",
        "prometheus_client alone renders the page. A second, hand-written encoder took 0.3 to 0.5 ms per rank. With "
        "2.4 ms, 64 ranks take 1 % of the documented scrape interval of 15 s.",
    ),
    (
        "step: get_loads",
        "It does not grow with the queue: 0.98 to 1.02 us in quiet runs. A third of it is the two rates over the "
        "recent window, each of which reads a clock, and a tenth each the snapshot and the used tokens. One call for "
        "both rates would save 0.2 us of a step, and need a third member in the port `RateSource`.",
    ),
    (
        "codec: encode",
        "The encoder checks every value of an event that a user made. Packing the tokens, the fastest check that was "
        "found, takes as long as encoding them: bare tuples and this check alone take 1.5 to 1.7 times SGLang's time "
        "for 64 events. The loop that reads the attributes takes the rest. It is plain code: compiled from generated "
        "source, 64 events took 0.9 to 1.0 times as long, 64 events with an adapter or a salt 0.75 to 0.87 times, 64 "
        "events with all fields 1.1 to 1.5 times, and one event 0.8 times (by hand, in alternating runs). The "
        "generator had 300 lines that a newcomer could not read. Events of the kit's own caches are not checked.",
    ),
    (
        "codec: decode of the map",
        "The decoder makes events from the maps that msgspec reads, because a map may come from any engine.",
    ),
    (
        "codec: decode, 1 block",
        "The decoder checks the form of the batch in addition to a decode of 0.7 us.",
    ),
    (
        "trace: ",
        "It took 0.23 to 0.63 times SGLang's time in six runs. Most of it is SHA-256, 0.5 us per page, and the tokens.",
    ),
    (
        "view: match.*many depths",
        "On a busy machine 256 ranks take 43 us of processor time (measured by hand): 17 for the walk over the masks, "
        "7 for the exclusive ors, 5 to spread the bits, and 15 for the dict of the answer, which Dynamo's "
        "answer needs, too. Dynamo's tree answers in its own thread, so its time depends on the other core: the ratio "
        "was 0.5 to 1.0 for 256 ranks, and 0.4 to 0.6 for 1,000.",
    ),
    (
        "view: (?!match.*many depths)",
        "It took 12.7 and 12.9 us in the last two runs.",
    ),
    (
        "start: memory of publisher's snapshot",
        "With 64 blocks per event a block takes 184 bytes, and with one block per event 210: 89 and 115 as it was "
        "sent (a hash of nine bytes, 16 tokens of five, and the other fields), 32 in the integer of its key, some 45 "
        "in its entry of the table, and the headers of its payload. So the tokens alone take 80 of the goal. zlib at "
        "its fastest level saves a third of the payload, in five times the time of storing and removing a block. "
        "Sorted numpy arrays took 163 and 130 bytes, see `publish`. A numpy table with open addressing folds a block "
        "in 2.9 us instead of 0.8 (processor time on a busy machine, 4,096 changes together, measured by hand).",
    ),
    (
        "late_readers: slowest reader until LIVE, 10,000",
        "The loop, the reader and all else share two cores. A reader takes 15 us of processor time per replayed batch, "
        "so 0.15 s for a full buffer, and the loop takes most of a core. On a busy machine (load 2 to 4), the slowest "
        "of four readers took 0.4 to 0.6 s in six loops, and 1.1 and 1.6 s in two others; with load 8 on these two "
        "cores 0.7 to 0.9 s inline, and 0.8 to 5.4 s in the background.",
    ),
)
"""A pattern for ``section: what`` and the reason. Exactly one pattern matches each missed row."""
