"""Hypothesis strategies: engines and their ranks, endpoints, configurations, events and histories, workloads, faults.

Each makes what its name says and nothing less: ``endpoints`` covers every kind of host and port, ``cache_histories`` is
what a real cache would publish, ``invalid_histories`` what no cache would.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from hypothesis import strategies as st

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch, ParallelState
from scheduler_components.cache import PrefixNamespace, RadixCache
from scheduler_components.kv_events import Endpoint
from scheduler_components.kv_events.codec import DIALECTS
from scheduler_components.kv_events.config import SEND_MODES, SEQ_BASES
from scheduler_components.kv_events.endpoints import MAX_PORT
from scheduler_components.kv_events.replay import REPLAY_FRAMINGS
from scheduler_components.testing.fakes import Fault
from scheduler_components.testing.interfaces import Workload

__all__ = [
    # engines
    "EngineRank",
    "engine_ranks",
    "engines",
    "parallel_states",
    # endpoints
    "INVALID_ENDPOINTS",
    "endpoint_like_texts",
    "colliding_endpoints",
    "endpoints",
    "local_endpoints",
    "tcp_endpoints",
    # configurations
    "invalid_config_texts",
    "config_texts",
    # events
    "HASHES",
    "cache_histories",
    "events",
    "invalid_histories",
    "removed_events",
    "stored_events",
    # requests and networks
    "fault_plans",
    "workloads",
]

EngineRank = tuple[int, ParallelState]
"""The number of the KV cache that a rank holds a part or copy of, and the rank."""

_SIZES = st.integers(1, 4)


def engine_ranks(*, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, dp_attention: bool = False) -> list[EngineRank]:
    """Every rank of one engine.

    What a KV cache is, is said here and not read from ``ParallelState``: ranks that differ in attention-DP, or in
    data parallelism without DP attention, hold different caches; pipeline, CP and TP ranks share one.

    Args:
        pp, dp, cp, tp: sizes of the pipeline, data, attention-context and attention-tensor axes.
        dp_attention: the data-parallel replicas share one tensor-parallel world.
    """
    attn_dp_size, worlds = (dp, 1) if dp_attention else (1, dp)
    ranks_per_stage = attn_dp_size * cp * tp
    ranks = []
    for world, pp_rank, tp_rank in product(range(worlds), range(pp), range(ranks_per_stage)):
        plain_dp: dict[str, Any] = {} if dp_attention else {"dp_size": dp, "dp_rank": world if dp > 1 else None}
        state = ParallelState.from_tp_rank(
            tp_rank,
            tp_size=ranks_per_stage,
            attn_dp_size=attn_dp_size,
            attn_cp_size=cp,
            pp_rank=pp_rank,
            pp_size=pp,
            **plain_dp,
        )
        ranks.append((tp_rank // (cp * tp) if dp_attention else world, state))
    return ranks


def engines() -> st.SearchStrategy[list[EngineRank]]:
    """Engines of 1 to 4 along each axis."""
    return st.builds(engine_ranks, pp=_SIZES, dp=_SIZES, cp=_SIZES, tp=_SIZES, dp_attention=st.booleans())


def parallel_states() -> st.SearchStrategy[ParallelState]:
    """One rank of some engine."""
    return engines().flatmap(st.sampled_from).map(lambda rank: rank[1])


# Endpoints: good ones, ones at the edges of what is allowed, and texts that are not endpoints.

_HOSTS = st.one_of(
    st.sampled_from(
        ["*", "0.0.0.0", "::", "localhost", "eth0", "eth0.100", "br-lan", "node_1.example.", "fe80::1%eth0"]  # noqa: S104
    ),
    st.ip_addresses().map(str),
)
_PATHS = st.from_regex(r"[a-z@/][a-z0-9/._ -]{0,40}[a-z0-9]", fullmatch=True)
_SHARED_PATHS = ["/tmp/kv", "/tmp/kv_dp1", "/tmp/kv_dp2", "/tmp/kv_dp1_dp1", "/tmp/replay"]  # noqa: S108 - never opened

INVALID_ENDPOINTS: dict[str, str] = {
    "": "no transport",
    "5557": "no transport",
    "*:5557": "no transport",
    "udp://*:5557": "transport 'udp'",
    "TCP://*:5557": "transport 'TCP'",
    " tcp://*:5557": "transport ' tcp'",
    "tcp://": "no port",
    "tcp://*": "no port",
    "tcp://localhost": "no port",
    "tcp://[::1]": "no port",
    "tcp://*:": "'' where a port",
    "tcp://:5557": "no host",
    "tcp://*:port": "'port' where a port",
    "tcp://*:5557 ": "'5557 ' where a port",
    "tcp://*: 5557": "' 5557' where a port",
    "tcp://*:+5557": "'+5557' where a port",
    "tcp://*:-1": "'-1' where a port",
    "tcp://*:55.5": "'55.5' where a port",
    "tcp://*:5557/path": "'5557/path' where a port",
    "tcp://*:\u0665\u0665": "where a port",
    "tcp://*:65536": "no port from 0 to 65535",
    "tcp://*:70000": "no port from 0 to 65535",
    "tcp://*:100000": "'100000' where a port",
    "tcp://:::5557": "more than one colon",
    "tcp://::1:5557": "more than one colon",
    "tcp://[::1:5557": "more than one colon",
    "tcp://a b:5557": "where a host",
    "tcp://me@host:5557": "where a host",
    "tcp://*.example:5557": "where a host",
    "tcp://a..b:5557": "where a host",
    "tcp://[]:5557": "where a host",
    "tcp://[eth0]:5557": "where a host",
    "tcp://[:::]:5557": "where a host",
    "tcp://[fe80::1%eth 0]:5557": "where a host",
    "tcp://" + "a" * 64 + ":5557": "where a host",
    "tcp://256.0.0.1:5557": "not an IPv4",
    "tcp://127.0.0.01:5557": "not an IPv4",
    "tcp://1.2.3:5557": "not an IPv4",
    "ipc://": "no path",
    "ipc://*": "no path",
    "ipc://@": "no path",
    "inproc://": "no path",
    "ipc:///tmp/x ": "white space",
    "ipc:///tmp/x\x00y": "control characters",
    "ipc:///tmp/" + "x" * 103: "108 bytes",
    "inproc://" + "x" * 246: "246 bytes",
}
"""Texts that must be refused, with a part of what ``ConfigError.problem`` says of each."""


def tcp_endpoints() -> st.SearchStrategy[Endpoint]:
    """Every kind of host, every port, 0 included."""
    return st.builds(Endpoint, transport=st.just("tcp"), host=_HOSTS, port=st.integers(0, MAX_PORT))


def local_endpoints() -> st.SearchStrategy[Endpoint]:
    """ipc and inproc."""
    return st.builds(Endpoint, transport=st.sampled_from(["ipc", "inproc"]), path=_PATHS)


def endpoints() -> st.SearchStrategy[Endpoint]:
    """Any endpoint."""
    return st.one_of(tcp_endpoints(), local_endpoints())


def colliding_endpoints() -> st.SearchStrategy[Endpoint]:
    """Endpoints that meet when they are offset by ranks, or pass the last port: plans just valid or just not."""
    ports = st.one_of(st.integers(5557, 5570), st.integers(MAX_PORT - 6, MAX_PORT), st.just(0))
    hosts = st.sampled_from(["*", "127.0.0.1", "::1"])
    tcp = st.builds(Endpoint, transport=st.just("tcp"), host=hosts, port=ports)
    local = st.builds(Endpoint, transport=st.sampled_from(["ipc", "inproc"]), path=st.sampled_from(_SHARED_PATHS))
    return st.one_of(tcp, local)


def endpoint_like_texts() -> st.SearchStrategy[str]:
    """Any text, often one that looks like an endpoint."""
    alike = st.from_regex(r"(tcp|ipc|inproc)://[\[\]:*%@. \x00a-f0-9]{0,12}", fullmatch=True)
    return st.one_of(st.text(), alike, st.sampled_from(sorted(INVALID_ENDPOINTS)))


# Texts of ``--kv-events-config``: valid ones, and ones with one mistake.

_COUNTS = st.integers(1, 2**31 - 1)
_STREAMS = 64
_MISTAKES: dict[str, list[Any]] = {
    "publisher": ["", 5, None],
    "endpoint": ["tcp://*", "*:5557", "tcp://*:65536", 5557],
    "replay_endpoint": ["tcp://*:5557", "udp://*:1", ""],
    "buffer_steps": [-1, "10", 1.5, True, 2**31],
    "hwm": [0, -1, "1"],
    "max_queue_size": [0, None],
    "topic": [None, 7, "\ud800", "a\0b"],
    "dialect": ["Array", "protobuf", None],
    "bind": ["true", 1],
    "replay_framing": ["seeds", ""],
    "seq_base": ["one", 0],
    "send_mode": ["thread", None],
    "seq_floor_file": ["", "a\0b", 7],
    "load_endpoint": ["tcp://*:5557", "nonsense"],
    "buffer_bytes": [0, "1G"],
    "endpiont": ["tcp://*:5557"],
}


@st.composite
def config_texts(draw: st.DrawFn) -> str:
    """A configuration of a ZMQ publisher that is valid for up to 64 streams; each setting is there or left out."""
    settings = draw(
        st.fixed_dictionaries(
            {"publisher": st.just("zmq")},
            optional={
                "endpoint": st.integers(1024, 9000).map(lambda port: f"tcp://*:{port}"),
                "replay_endpoint": st.integers(9000 + _STREAMS, 20_000).map(lambda port: f"tcp://*:{port}"),
                "load_endpoint": st.integers(20_000 + _STREAMS, 40_000).map(lambda port: f"tcp://127.0.0.1:{port}"),
                "buffer_steps": _COUNTS,
                "hwm": _COUNTS,
                "max_queue_size": _COUNTS,
                "topic": st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
                "dialect": st.sampled_from(DIALECTS),
                "bind": st.sampled_from([None, True]),
                "replay_framing": st.sampled_from(REPLAY_FRAMINGS),
                "seq_base": st.sampled_from(SEQ_BASES),
                "send_mode": st.sampled_from(SEND_MODES),
                "buffer_bytes": st.integers(1, 2**40),
            },
        )
    )
    return json.dumps(settings)


def invalid_config_texts() -> st.SearchStrategy[tuple[str, str]]:
    """(The setting that is wrong, a configuration that is valid but for it)."""
    pairs = [(name, value) for name, values in _MISTAKES.items() for value in values]
    return st.sampled_from(pairs).map(
        lambda pair: (pair[0], json.dumps({"publisher": "zmq", "endpoint": "tcp://*:5557"} | {pair[0]: pair[1]}))
    )


# Events of every shape, valid histories of a cache, and histories that no cache would publish.

HASHES = st.integers(-(2**63), 2**63 - 1)
"""Any signed 64-bit hash."""

_NAMES = st.none() | st.text(max_size=8)
_MEDIA = (None, "GPU", "CPU")
_TOKEN_IDS = st.integers(0, 2**32 - 1)
_SPACES = (None, PrefixNamespace(cache_salt="tenant"), PrefixNamespace(lora_id=1, lora_name="adapter"))


@st.composite
def stored_events(draw: st.DrawFn) -> BlockStored:
    """Any stored event that can be encoded: every optional field there or not, hashes unrelated to tokens."""
    block_size = draw(st.integers(1, 4))
    block_hashes = tuple(draw(st.lists(HASHES, max_size=4)))
    count = len(block_hashes) * block_size
    return BlockStored(
        block_hashes=block_hashes,
        parent_block_hash=draw(st.none() | HASHES),
        token_ids=tuple(draw(st.lists(_TOKEN_IDS, min_size=count, max_size=count))),
        block_size=block_size,
        lora_id=draw(st.none() | st.integers(0, 9)),
        medium=draw(_NAMES),
        lora_name=draw(_NAMES),
        extra_keys=draw(st.none() | st.lists(st.none() | st.tuples(st.text(max_size=3)), max_size=2).map(tuple)),
        group_idx=draw(st.none() | st.integers(0, 3)),
        cache_salt=draw(_NAMES),
        session_id=draw(_NAMES),
        kv_cache_spec_kind=draw(_NAMES),
        kv_cache_spec_sliding_window=draw(st.none() | st.integers(0, 9)),
        locality=draw(_NAMES),
        ownership=draw(_NAMES),
        lookahead_token_ids=draw(st.none() | st.lists(_TOKEN_IDS, max_size=3).map(tuple)),
    )


def removed_events() -> st.SearchStrategy[BlockRemoved]:
    """Any removed event that can be encoded."""
    hashes, group = st.lists(HASHES, max_size=4).map(tuple), st.none() | st.integers(0, 3)
    return st.builds(BlockRemoved, hashes, _NAMES, group, _NAMES, _NAMES)


def events() -> st.SearchStrategy[tuple[KVCacheEvent, ...]]:
    """Any events, for codecs."""
    return st.lists(stored_events() | removed_events() | st.just(AllBlocksCleared()), max_size=5).map(tuple)


@st.composite
def cache_histories(draw: st.DrawFn, *, max_steps: int = 12) -> list[KVEventBatch]:
    """A valid history: what a small real cache publishes for random requests, evictions and clears, one batch per step.

    Parents come first, what is removed stands, hashes are SGLang's chain. No batch is empty.
    """
    page_size = draw(st.integers(1, 3))
    cache = RadixCache(page_size=page_size, capacity_tokens=page_size * draw(st.integers(4, 10)), record=True)
    prompts = st.lists(st.integers(0, 1), min_size=page_size, max_size=4 * page_size)
    steps = st.tuples(prompts, st.sampled_from(_SPACES)) | st.integers(1, 3) | st.none()
    batches = []
    for number, step in enumerate(draw(st.lists(steps, max_size=max_steps))):
        if step is None:
            cache.clear()
        elif isinstance(step, int):
            cache.evict(step)
        else:
            _serve(cache, *step)
        told = cache.take_events()
        if told:
            batches.append(KVEventBatch(float(number + 1), told))
    return batches


def _serve(cache: RadixCache, tokens: list[int], space: PrefixNamespace | None) -> None:
    found = cache.match_prefix(tokens, space)
    cache.lock(found.node)
    own = cache.allocate(len(tokens) // cache.page_size - len(found.pages))
    cache.insert(tokens, [*found.pages, *own], space)
    cache.unlock(found.node)


@st.composite
def _hostile_stored(draw: st.DrawFn) -> BlockStored:
    block_hashes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)))
    tokens = tuple(token for block_hash in block_hashes for token in (block_hash, block_hash + 1))
    parent = draw(st.none() | st.integers(1, 9))
    return BlockStored(block_hashes, parent, tokens, 2, None, medium=draw(st.sampled_from(_MEDIA)))


def invalid_histories() -> st.SearchStrategy[list[KVEventBatch]]:
    """Histories that can be encoded and that no cache would publish: orphans, cycles, removals of unknown blocks.

    Nine hashes on three media, so that they meet; batches may be empty.
    """
    removed = st.builds(
        BlockRemoved, st.lists(st.integers(1, 9), max_size=4).map(tuple), medium=st.sampled_from(_MEDIA)
    )
    steps = st.lists(_hostile_stored() | removed | st.just(AllBlocksCleared()), max_size=4)
    return st.lists(steps, max_size=8).map(
        lambda batches: [KVEventBatch(float(number), tuple(each)) for number, each in enumerate(batches)]
    )


# Requests that share prefixes, in order of arrival.


@st.composite
def workloads(
    draw: st.DrawFn,
    *,
    max_requests: int = 8,
    max_prompt_tokens: int = 48,
    max_new_tokens: int = 160,
    vocabulary: int = 4,
) -> Workload:
    """Requests as ``SCHEDULER_CHECKS`` take them: (prompt, most tokens to generate) pairs.

    A prompt begins with a part of an earlier one as often as not, and few words make the rest meet too. Half of the
    answers are short; two long ones overfill ``interfaces.MIN_POOL_TOKENS``.
    """
    num_new_tokens = st.integers(1, min(8, max_new_tokens)) | st.integers(
        max(1, max_new_tokens * 3 // 4), max_new_tokens
    )
    tokens = st.integers(0, vocabulary - 1)
    prompts: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, max_requests))):
        earlier = draw(st.sampled_from([(), *prompts]))
        head = earlier[: draw(st.integers(0, len(earlier)))]
        tail = draw(st.lists(tokens, min_size=0 if head else 1, max_size=max(1, max_prompt_tokens - len(head))))
        prompts.append((head + tuple(tail))[:max_prompt_tokens])
    return tuple((prompt, draw(num_new_tokens)) for prompt in prompts)


# Plans of network faults for ``FaultyNetwork``.


def fault_plans(*, max_messages: int = 30, faults: tuple[Fault, ...] = tuple(Fault)) -> st.SearchStrategy[list[Fault]]:
    """One fault per message, most of them ``NONE``; messages beyond the plan meet none.

    Args:
        max_messages: length of a plan at most.
        faults: which may occur.
    """
    return st.lists(st.just(Fault.NONE) | st.sampled_from(faults), max_size=max_messages)
