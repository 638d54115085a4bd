"""`docs/examples/transformers_engine.py` inside real continuous batching.

At every turn of the engine's loop its events and its load report agree with the engine's own tables. The engine
computes the same tokens with and without them.
"""

from __future__ import annotations

import random
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kit.imported_later import ImportedLater

from observability.kv_stream import BlockView, open_subscriber, static_address
from scheduler_components import ParallelState
from scheduler_components.cache import signed_block_hash
from scheduler_components.kv_events import KVEventsConfig, open_event_publisher
from scheduler_components.ports import KvEventSink
from scheduler_components.testing import EventLedger, ListEventSink
from scheduler_components.values import SchedulerStats

REASON = "`make engines` makes an environment with transformers 5.23"
INSIDE = "transformers.generation.continuous_batching"
transformers = ImportedLater("transformers", "5.23", reason=REASON)
batching = ImportedLater(f"{INSIDE}.scheduler", reason=REASON)
blocks = ImportedLater(f"{INSIDE}.cache_allocators.cache_allocator", reason=REASON)

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # the engine's own

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "transformers_engine.py"
PAGE = 16
NEW_TOKENS = 24


def hash_of(prefix: Sequence[int]) -> int:
    """Return the engine's hash of the last block of a prefix."""
    parent = None
    for start in range(0, len(prefix), PAGE):
        parent = blocks.compute_block_hash(parent, list(prefix[start : start + PAGE]))
    return signed_block_hash(parent)


@dataclass
class Checkpoints:
    """A metrics sink that compares the published events and load with the engine's tables after every turn."""

    scheduler: Any = None
    sink: ListEventSink | None = None
    on_turn: Callable[[int], None] = lambda turn: None
    view: BlockView = field(default_factory=BlockView)
    ledger: EventLedger = field(default_factory=lambda: EventLedger(block_size=PAGE))
    problems: list[object] = field(default_factory=list)
    turns: int = 0
    most_waiting: int = 0
    blocks_seen: set[int] = field(default_factory=set)

    def found(self) -> list[object]:
        """Return every difference, and the failures that the components counted instead of raising them."""
        components = (self.scheduler.metrics, self.scheduler.kv_events)
        return [*self.problems, *(each for part in components for each in part.failures.counts.items())]

    def record(self, stats: SchedulerStats) -> None:
        self.turns += 1
        allocator, load = self.scheduler.allocator, stats.load
        table = {signed_block_hash(each) for each in allocator.ledger.hash_to_block}
        new, self.blocks_seen = table - self.blocks_seen, self.blocks_seen | table
        if self.sink is not None:
            events, self.sink.batches[:] = self.sink.events, []
            self.problems += self.ledger.apply_all(events)
            self.view.apply(0, events)
            if self.view.blocks(0) != table:
                self.problems.append((self.turns, self.view.blocks(0) ^ table))
            # The published tokens of a block are those of its hash: all tokens up to its end.
            self.problems += [(self.turns, each) for each in new if hash_of(self.ledger.prefix(each)) != each]
        used_blocks = {block for held in allocator.block_table.values() for block in held}
        truth = (len(self.scheduler.active_requests), len(self.scheduler.waiting_requests), len(used_blocks) * PAGE)
        reported = (load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens)
        if reported != truth:
            self.problems.append((self.turns, reported, truth))
        self.most_waiting = max(self.most_waiting, load.num_waiting_reqs)
        self.on_turn(self.turns)


Attach = Callable[[KvEventSink, Checkpoints], None]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(tiny_llama).eval()


@pytest.fixture
def attach() -> Iterator[Attach]:
    """Return the example's ``attach`` with checkpoints as its metrics sink."""
    example = runpy.run_path(str(EXAMPLE))

    def attach_with(sink: KvEventSink, checkpoints: Checkpoints) -> None:
        example["attach"](sink, checkpoints, ParallelState.trivial())
        make = batching.SCHEDULER_MAPPING["attached"]

        def make_watched(**of_engine: Any) -> Any:
            checkpoints.scheduler = make(**of_engine)
            return checkpoints.scheduler

        batching.SCHEDULER_MAPPING["attached"] = make_watched

    yield attach_with
    batching.SCHEDULER_MAPPING.pop("attached", None)


def run(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    scheduler_type: str,
    num_blocks: int = 40,
    copies: int = 1,
    before_start: Callable[[Any], None] = lambda manager: None,
    cancelled: Sequence[str] = (),
) -> dict[str, list[int]]:
    """Compute prompts that are queued before the engine starts; return the tokens of the requests not cancelled."""
    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=copies > 1, num_return_sequences=copies, eos_token_id=-1
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=num_blocks, max_batch_tokens=96, scheduler_type=scheduler_type, seed=11
        ),
    )
    names = [str(manager.add_request(list(prompt))) for prompt in prompts]
    names += [f"{name}__child#{number}" for name in names for number in range(copies - 1)]
    before_start(manager)
    manager.start()
    try:
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(set(names) - set(cancelled)):
            output = manager.get_result(timeout=1)
            assert output is not None or manager.is_running(), "the engine has stopped"
            if output is not None and output.is_finished():
                assert output.error is None
                outputs[output.request_id] = output.generated_tokens
    finally:
        manager.stop(block=True, timeout=60)
        manager.destroy()
    return outputs


def prompts_of(seed: int, count: int = 12) -> list[list[int]]:
    """Return prompts over three shared prefixes. Some are equal, some end at the end of a block."""
    choose = random.Random(seed)
    prefixes = [[choose.randrange(3, 1_000) for _ in range(choose.choice((32, 48, 80)))] for _ in range(3)]
    prompts = [
        [*choose.choice(prefixes), *(choose.randrange(3, 1_000) for _ in range(choose.choice((0, 5, 16, 40))))]
        for _ in range(count)
    ]
    return [*prompts, prompts[0], prompts[1]]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.engines_only) for seed in range(1, 6))])
def test_view_and_load_equal_the_engines_tables_and_the_tokens_do_not_change(
    model: Any, attach: Attach, seed: int
) -> None:
    sink = ListEventSink()
    checkpoints = Checkpoints(sink=sink)
    attach(sink, checkpoints)
    prompts = prompts_of(seed)
    outputs = run(model, prompts, scheduler_type="attached")
    assert checkpoints.found() == []
    assert checkpoints.turns > NEW_TOKENS and checkpoints.most_waiting > 0
    assert outputs == run(model, prompts, scheduler_type="fifo")


@pytest.mark.engines_only
def test_a_pool_under_pressure_evicts_and_resets_requests(model: Any, attach: Attach) -> None:
    """Blocks are removed in both ways: all cached blocks together, and the blocks of a request that is reset."""
    sink = ListEventSink()
    checkpoints = Checkpoints(sink=sink)
    attach(sink, checkpoints)
    prompts = prompts_of(7, count=24)
    outputs = run(model, prompts, scheduler_type="attached", num_blocks=14)
    assert checkpoints.found() == []
    assert len(checkpoints.blocks_seen) > 2 * 14  # the pool was filled more than twice
    assert checkpoints.scheduler.allocator.ledger.recorder.num_unreachable_blocks == 0
    assert outputs == run(model, prompts, scheduler_type="fifo", num_blocks=14)


@pytest.mark.engines_only
def test_forked_requests_share_their_prompt_blocks(model: Any, attach: Attach) -> None:
    sink = ListEventSink()
    checkpoints = Checkpoints(sink=sink)
    attach(sink, checkpoints)
    prompts = prompts_of(3, count=4)
    outputs = run(model, prompts, scheduler_type="attached", copies=3)
    assert checkpoints.found() == []
    assert len(outputs) == 3 * len(prompts) and len({tuple(tokens) for tokens in outputs.values()}) > len(prompts)
    assert outputs == run(model, prompts, scheduler_type="fifo", copies=3)


@pytest.mark.engines_only
def test_full_blocks_of_cancelled_requests_stay_cached(model: Any, attach: Attach) -> None:
    """One request is cancelled while it runs, one while it waits."""
    sink = ListEventSink()
    checkpoints = Checkpoints(sink=sink)
    attach(sink, checkpoints)
    prompts = prompts_of(5, count=16)
    cancelled = ("req_1", f"req_{len(prompts) - 1}")
    states: list[tuple[bool, ...]] = []

    def cancel_at_turn_4(manager: Any) -> None:
        def on_turn(turn: int) -> None:
            if turn == 4:
                scheduler = checkpoints.scheduler
                states.append(tuple(name in scheduler.active_requests for name in cancelled))
                states.append(tuple(name in scheduler.waiting_requests for name in cancelled))
                for name in cancelled:
                    manager.cancel_request(name)

        checkpoints.on_turn = on_turn

    outputs = run(model, prompts, scheduler_type="attached", cancelled=cancelled, before_start=cancel_at_turn_4)
    assert checkpoints.found() == []
    assert states == [(True, False), (False, True)]
    alone = run(model, prompts, scheduler_type="fifo")
    assert outputs == {name: tokens for name, tokens in alone.items() if name not in cancelled}


@pytest.mark.engines_only
def test_a_late_reader_gets_all_blocks_beyond_the_replay_buffer(model: Any, attach: Attach, tmp_path: Path) -> None:
    """The sockets are real, and the replay buffer has four batches. The table of a second engine replaces the first."""
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(publisher="zmq", endpoint=events, replay_endpoint=replay, buffer_steps=4)
    sink = open_event_publisher(config, parallel=ParallelState.trivial())
    try:
        for seed in (1, 2):
            checkpoints = Checkpoints()
            attach(sink, checkpoints)
            run(model, prompts_of(seed), scheduler_type="attached")
            assert sink.stats().batches_sent > 10 * seed
            table = {signed_block_hash(each) for each in checkpoints.scheduler.allocator.ledger.hash_to_block}
            with open_subscriber([static_address(events, replay=replay)]) as reader:
                assert reader.wait_until(0, sink.stats().batches_sent - 1, timeout_s=30)
                assert (reader.stats()[0].state.value, reader.blocks(0)) == ("live", table)
    finally:
        sink.shutdown()


@pytest.mark.engines_only
def test_the_example_runs_as_a_program(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "8 requests, 13 blocks, live"
