"""The arrivals of the study: a recorded trace, generated conversations, and requests that all arrive together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from random import Random

import attrs
import msgspec

from scheduler_engine.simulation import (
    TRACE_BLOCK_TOKENS,
    ConversationWorkload,
    TraceRequest,
    generate_conversations,
    open_trace,
)
from scheduler_engine.simulation.conversations import draw_tokens

CONVERSATIONS = ConversationWorkload(
    seed=27,
    conversations_per_s=2.0,
    mean_turns=5.0,
    mean_think_s=15.0,
    mean_message_tokens=1500.0,
    mean_output_tokens=250.0,
    num_system_prompts=6,
    system_prompt_tokens=512,
)
"""Three requests per second with growing prompts: the message of each turn follows all turns before it."""

_NUM_DOCUMENTS, _DOCUMENT_BLOCKS, _DOCUMENT_SHARE, _QUESTIONS_PER_S = 32, 16, 0.9, 6.0
_QUESTION_TOKENS, _OTHER_TOKENS, _ANSWER_TOKENS = 200.0, 4000.0, 150.0
_NUM_OFFLINE, _OFFLINE_PROMPT_TOKENS, _OFFLINE_OUTPUT_TOKENS = 300, (70, 210), (210, 630)
_CONTINUED_SHARE = 0.5


class WorkloadFacts(msgspec.Struct, frozen=True):
    """The size of a workload.

    Attributes:
        num_requests, duration_s: until the last arrival.
        mean_prompt_tokens, max_prompt_tokens, mean_output_tokens: per request.
        shared_share: share of the prompt tokens in blocks that an earlier prompt began with. No cache has a higher hit
            rate, save for partial blocks.
        continued_share: share of the requests of which at least half of the prompt is such.
        digest: SHA-256 of all requests, 16 digits.
    """

    num_requests: int
    duration_s: float
    mean_prompt_tokens: float
    max_prompt_tokens: int
    mean_output_tokens: float
    shared_share: float
    continued_share: float
    digest: str


def make_workload(name: str, *, trace: Path, num_requests: int) -> list[TraceRequest]:
    """Return the first requests of a workload.

    Args:
        name: ``trace``, ``documents``, ``offline`` or ``conversations``; with another seed ``conversations:SEED``.
        trace: a file in Mooncake's format, of which ``trace`` is the beginning.
        num_requests: most requests.

    Raises:
        ConfigError: the trace cannot be read, or a line is wrong.
    """
    kind, _, seed = name.partition(":")
    if kind == "trace":
        return list(open_trace(trace, limit=num_requests))
    if kind == "offline":
        return _arrive_together(min(_NUM_OFFLINE, num_requests))
    if kind == "documents":
        return _ask_documents(num_requests)
    chosen = attrs.evolve(CONVERSATIONS, num_requests=num_requests, seed=int(seed) if seed else CONVERSATIONS.seed)
    return list(generate_conversations(chosen))


def _arrive_together(num_requests: int) -> list[TraceRequest]:
    """Return requests that arrive together, with 280 tokens of prompt and of output on average, and share nothing."""
    random, ids = Random(54644), count()
    return [
        TraceRequest(
            index=index,
            arrival_s=0.0,
            input_length=random.randint(*_OFFLINE_PROMPT_TOKENS),
            output_length=random.randint(*_OFFLINE_OUTPUT_TOKENS),
            hash_ids=(next(ids),),
        )
        for index in range(num_requests)
    ]


def _ask_documents(num_requests: int) -> list[TraceRequest]:
    """Return questions about documents, some popular, and one request in ten that is about no document."""
    random, ids = Random(27), count()
    documents = [tuple(next(ids) for _ in range(_DOCUMENT_BLOCKS)) for _ in range(_NUM_DOCUMENTS)]
    weights = [1 / rank for rank in range(1, _NUM_DOCUMENTS + 1)]
    requests, arrival_s = [], 0.0
    for index in range(num_requests):
        arrival_s += random.expovariate(_QUESTIONS_PER_S)
        document = random.choices(documents, weights)[0] if random.random() < _DOCUMENT_SHARE else ()
        num_own = draw_tokens(random, _QUESTION_TOKENS if document else _OTHER_TOKENS)
        num_blocks = -(-num_own // TRACE_BLOCK_TOKENS)
        requests.append(
            TraceRequest(
                index=index,
                arrival_s=arrival_s,
                input_length=len(document) * TRACE_BLOCK_TOKENS + num_own,
                output_length=draw_tokens(random, _ANSWER_TOKENS),
                hash_ids=(*document, *(next(ids) for _ in range(num_blocks))),
            )
        )
    return requests


def describe(requests: Sequence[TraceRequest]) -> WorkloadFacts:
    """Return the size of a workload."""
    num_requests = len(requests)
    prompt_tokens = sum(request.input_length for request in requests)
    shared = _shared_tokens(requests)
    digest = hashlib.sha256()
    for request in requests:
        digest.update(repr((request.arrival_s, request.input_length, request.output_length, request.hash_ids)).encode())
    return WorkloadFacts(
        num_requests=num_requests,
        duration_s=requests[-1].arrival_s,
        mean_prompt_tokens=prompt_tokens / num_requests,
        max_prompt_tokens=max(request.input_length for request in requests),
        mean_output_tokens=sum(request.output_length for request in requests) / num_requests,
        shared_share=sum(shared) / prompt_tokens,
        continued_share=len(continued(requests)) / num_requests,
        digest=digest.hexdigest()[:16],
    )


def continued(requests: Iterable[TraceRequest]) -> frozenset[int]:
    """Return the indices of the requests that continue an earlier prompt: at least half of theirs was in one."""
    known = list(requests)
    return frozenset(
        request.index
        for request, shared in zip(known, _shared_tokens(known), strict=True)
        if shared >= _CONTINUED_SHARE * request.input_length
    )


def _shared_tokens(requests: Iterable[TraceRequest]) -> list[int]:
    """Return how many tokens of each prompt are in leading blocks that an earlier prompt had."""
    seen: set[int] = set()
    found = []
    for request in requests:
        num_blocks = 0
        for hash_id in request.hash_ids:
            if hash_id not in seen:
                break
            num_blocks += 1
        found.append(min(num_blocks * TRACE_BLOCK_TOKENS, request.input_length))
        seen.update(request.hash_ids)
    return found
