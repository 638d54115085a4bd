"""The grammar queue of a rank."""

from __future__ import annotations

from pathlib import Path

from scheduler_components.ports import DecisionSink, GrammarBackend
from scheduler_components.waiting.agreed_queue import AgreedQueue
from scheduler_components.waiting.grammar_queue import GrammarQueue
from scheduler_components.waiting.thread_grammar_compiler import ThreadGrammarCompiler
from scheduler_engine.device.model_spec import TokenSpec
from scheduler_engine.engine.config import GrammarConfig
from scheduler_engine.engine.scheduler.request import EngineRequest


def open_grammar_queue(
    config: GrammarConfig, tokens: TokenSpec, tokenizer: Path, decisions: DecisionSink
) -> GrammarQueue[EngineRequest]:
    """Open the queue of requests with a grammar. The first of them starts the thread, which reads the tokenizer.

    Args:
        config: its limits.
        tokens: the model's vocabulary and end-of-sequence tokens.
        tokenizer: JSON of the model's tokenizer, from ``EnginePaths.tokenizer``.
        decisions: where the queue notes who enters and who leaves.
    """

    def open_backend() -> GrammarBackend:
        # Imported here, because only a rank that compiles needs the extra `grammar`.
        from scheduler_components.waiting.llguidance_backend import open_llguidance_backend

        return open_llguidance_backend(
            tokenizer.read_text(encoding="utf-8"), vocab_size=tokens.vocab_size, eos_token_ids=tokens.eos_token_ids
        )

    compiler = ThreadGrammarCompiler(open_backend=open_backend, max_cached=config.max_cached)
    waits = AgreedQueue[EngineRequest](
        name="grammar", max_wait_s=config.timeout_s, max_waiting=config.max_waiting, decisions=decisions
    )
    return GrammarQueue(compiler=compiler, queue=waits)
