"""A plugin of the tests: says from inside SGLang's scheduler process what its cache holds.

A question is a file in the folder that ``SGLANG_PROBE`` names; each rank answers when its scheduler has nothing to do.
"""

import json
import os
from array import array
from pathlib import Path

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

FOLDER = Path(os.environ["SGLANG_PROBE"])
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
answered = set()


def load_plugin():
    HookRegistry.register(f"{SCHEDULER}.on_idle", answer, HookType.AFTER)


def answer(_, scheduler):
    for question in FOLDER.glob("*.question"):
        if question in answered or not scheduler.is_fully_idle():
            continue
        answered.add(question)
        parallel = get_parallel()
        tell(f"{question.stem}.{parallel.dp_rank or 0}.{parallel.tp_rank}", resident(scheduler, question))


def tell(name, what):
    unfinished = FOLDER / f"{name}.unfinished"
    unfinished.write_text(json.dumps(what))
    unfinished.rename(FOLDER / f"{name}.answer")


def resident(scheduler, question):
    """How many tokens of each prompt are cached, and how many tokens are cached altogether."""
    core = scheduler.tree_cache.tree_core
    prompts = json.loads(question.read_text())
    found = [core.match_full_device_prefix(RadixKey(array("q", prompt)))[0] for prompt in prompts]
    return {"prompts": found, "total": core.total_size()[0]}
