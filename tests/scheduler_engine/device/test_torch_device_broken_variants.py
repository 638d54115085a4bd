"""Variants of the kit that are broken on purpose: the comparison with ``generate`` finds each of them.

The same history without the fault passes, so the comparison finds the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from kit.model_bench import PROMPTS, LastMomentMover, ModelBench, Tiers

from scheduler_components.hicache import HiCachePolicy, MemoryPageStore, TorchDeviceMemory
from scheduler_components.ports import CopyEvent, NullCopyEvent
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.testing import ConformanceError
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_components.values.page_operations import CopyToDevice, CopyToHost, Instruction, IoEvent, LoadBackDone
from scheduler_engine.device.device import ScheduledBatch
from scheduler_engine.device.torch_device import TorchDevice
from scheduler_engine.engine.scheduler.request import EngineRequest

pytestmark = [pytest.mark.model, pytest.mark.broken_variants]

_MOST_STEPS = 300  # of a wave; without a fault it takes some forty, with one it may go on for ever

Break = Callable[[pytest.MonkeyPatch], None]


def play(bench: ModelBench) -> None:
    """Waves of prompts that share beginnings, more than the device holds, with aborts and follow-ups."""
    for wave in range(3):
        requests = [bench.submit(prompt, 6) for prompt in PROMPTS[wave::4]]
        for _ in range(4):
            bench.scheduler.step()
        bench.abort(requests[1])
        bench.drain(_MOST_STEPS)
        first = requests[0]
        bench.submit((*first.input_ids, *first.output_ids, 40, 41), 4)
        bench.drain(_MOST_STEPS)


def free_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page that a decode fills is free for other requests immediately."""
    grow = RequestKvCache.grow

    def grow_and_free(self: RequestKvCache, request: EngineRequest, num_tokens: int) -> bool:
        num_pages = len(request.pages)
        has_room = grow(self, request, num_tokens)
        if len(request.pages) > num_pages and not request.num_prefill_tokens_left:
            self.cache.free(request.pages[-1:])
        return has_room

    monkeypatch.setattr(RequestKvCache, "grow", grow_and_free)


def forget_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached prefix is used without holding it."""
    match = RequestKvCache.match

    def match_unlocked(self: RequestKvCache, request: EngineRequest) -> None:
        match(self, request)
        if request.node is not None:
            self.cache.unlock(request.node)
            request.node = None

    monkeypatch.setattr(RequestKvCache, "match", match_unlocked)


def skip_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk behind others begins one position too late."""
    launch = TorchDevice.launch

    def launch_late(self: TorchDevice, batch: ScheduledBatch[Any]) -> None:
        chunks = [
            msgspec.structs.replace(chunk, start=chunk.start + 1) if chunk.start and chunk.num_tokens > 1 else chunk
            for chunk in batch.chunks
        ]
        launch(self, msgspec.structs.replace(batch, chunks=tuple(chunks)))

    monkeypatch.setattr(TorchDevice, "launch", launch_late)


def leave_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host is reported as done before its last layer was copied."""
    copy = TorchDeviceMemory.copy_to_host

    def copy_most(self: TorchDeviceMemory, layer: int, *pages: Any) -> CopyEvent:
        return NullCopyEvent() if layer == len(self.keys) - 1 else copy(self, layer, *pages)

    monkeypatch.setattr(TorchDeviceMemory, "copy_to_host", copy_most)


def overwrite_under_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied to the host may be evicted, and its pages written to, before the copy has ended."""
    submit = LastMomentMover.submit

    def submit_and_spoil(self: LastMomentMover, instructions: Any) -> None:
        submit(self, instructions)
        for instruction in instructions:
            if isinstance(instruction, CopyToHost):
                self.spoil(instruction.device_pages[-1:])

    monkeypatch.setattr(LastMomentMover, "submit", submit_and_spoil)


class WrongPages(LastMomentMover):
    """Loads each page to the place of the next one."""

    def carry_out(self, instruction: Instruction) -> list[IoEvent]:
        if isinstance(instruction, CopyToDevice):
            pages = instruction.host_pages
            instruction = CopyToDevice(instruction.op, pages[1:] + pages[:1], instruction.device_pages)
        return super().carry_out(instruction)


class EarlyEnd(LastMomentMover):
    """Says of copies to the device that they have ended, and carries them out some steps later."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.early: list[IoEvent] = []

    def submit(self, instructions: Any) -> None:
        super().submit(instructions)
        self.early += [LoadBackDone(each.op, True) for each in instructions if isinstance(each, CopyToDevice)]

    def poll(self) -> list[IoEvent]:
        early, self.early = self.early, []
        return early + [event for event in super().poll() if not isinstance(event, LoadBackDone)]


class NoWait(LastMomentMover):
    """Lets the forward begin a layer of which the pages are still to come."""

    def bring_layer(self) -> None:
        pass


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def run_history(
    paged_model: Any, judge: GreedyTextVerifier, *, make_mover: Any = LastMomentMover, load: Any = "whole"
) -> None:
    policy = HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1, load=load)
    tiers = Tiers(host_pages=40, store=MemoryPageStore(1 << 24), make_mover=make_mover, policy=policy)
    bench = ModelBench(paged_model, judge, tiers=tiers)
    try:
        play(bench)
    finally:
        bench.verify_texts()
        bench.judge_pages()
        bench.close()


FAULTS: dict[str, tuple[Break, Any]] = {
    "a page freed early": (free_too_early, LastMomentMover),
    "a lock forgotten": (forget_a_lock, LastMomentMover),
    "a chunk off by one": (skip_a_position, LastMomentMover),
    "a wrong page after load-back": (nothing, WrongPages),
    "read before its copy ended": (nothing, EarlyEnd),
    "a layer read before it came": (nothing, NoWait),
    "reported before its copy ended": (leave_a_layer, LastMomentMover),
    "written before its copy ended": (overwrite_under_a_copy, LastMomentMover),
}


@pytest.mark.parametrize("load", ["whole", "by_layer"])
def test_without_a_fault_the_history_passes(load: str, paged_model: Any, judge: GreedyTextVerifier) -> None:
    run_history(paged_model, judge, load=load)


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found(
    name: str, paged_model: Any, judge: GreedyTextVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it, make_mover = FAULTS[name]
    break_it(monkeypatch)
    with pytest.raises(ConformanceError, match="greedy text"):
        run_history(paged_model, judge, make_mover=make_mover, load="by_layer" if make_mover is NoWait else "whole")
