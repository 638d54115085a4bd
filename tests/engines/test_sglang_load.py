"""The components for SGLang without SGLang: counted queues, the parallel state, hooks and settings."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from scheduler_components import ConfigError, ParallelState
from scheduler_components.engines.sglang import SglangPlugin, load_plugin
from scheduler_components.engines.sglang_components import SglangComponents, read_parallel_state
from scheduler_components.engines.sglang_load import CountedWaitingQueue, SglangQueueSource, WaitingQueueDescriptor
from scheduler_components.engines.sglang_publisher import SglangEventPublisher


@dataclass(eq=False)
class Request:
    seqlen: int
    num_matched_prefix_tokens: int = 0


@dataclass
class Rate:
    miss_rate: float | None = None


class Scheduler:
    def __init__(self, miss: Rate) -> None:
        self.miss = miss
        type(self).waiting_queue = WaitingQueueDescriptor(CountedWaitingQueue([], miss), miss)


def as_sglang_counts(waiting: list, rate: float | None) -> tuple[int, int, int]:
    """Count as the loops of SGLang do (0.5.23, ``load_inquirer.py``)."""
    uncached = 0
    for request in waiting:
        if rate is None:
            uncached += max(0, request.seqlen - request.num_matched_prefix_tokens)
        else:
            uncached += int(request.seqlen * rate)
    return len(waiting), sum(request.seqlen for request in waiting), uncached


REQUESTS = st.builds(Request, st.integers(1, 40), st.integers(0, 50))
RATES = st.one_of(st.none(), st.floats(0, 1), st.sampled_from([0.0, 1.0, 1.0 - 1 / 3]))
ACTIONS = (
    *("append", "extend", "iadd", "insert", "pop", "pop_at", "remove", "clear", "delete"),
    *("sort", "reverse", "swap", "slice", "rebind"),
)
# The operations of SGLang's scheduler and policies on the queue.
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.lists(REQUESTS, max_size=4), st.integers(0, 30), RATES, st.booleans()),
    max_size=25,
)


def apply(scheduler: Scheduler, what: str, new: list[Request], at: int) -> None:
    queue = scheduler.waiting_queue
    place = at % len(queue) if queue else 0
    if what == "append":
        for request in new[:1]:
            queue.append(request)
    elif what == "extend":
        queue.extend(new)
    elif what == "iadd":
        scheduler.waiting_queue += new
    elif what == "insert":
        for request in new[:1]:
            queue.insert(place, request)
    elif what == "clear":
        queue.clear()
    elif what == "sort":
        queue.sort(key=lambda request: request.seqlen)
    elif what == "reverse":
        queue.reverse()
    elif what == "slice":
        queue[place:] = new
    elif what == "rebind":
        scheduler.waiting_queue = [request for request in queue if request.seqlen % 3] + new
    elif queue and what == "pop":
        queue.pop()
    elif queue and what == "pop_at":
        queue.pop(place)
    elif queue and what == "remove":
        queue.remove(queue[place])
    elif queue and what == "delete":
        del queue[place]
    elif queue and what == "swap":  # during random.shuffle one request is in two places
        random.Random(at).shuffle(queue)


@given(steps=STEPS)
def test_a_counted_queue_counts_as_sglang_does_after_any_operations(steps: list) -> None:
    miss = Rate()
    scheduler = Scheduler(miss)
    for what, new, at, rate, is_asked in steps:
        apply(scheduler, what, new, at)
        queue = scheduler.waiting_queue
        if queue:
            queue[at % len(queue)].num_matched_prefix_tokens = at
            queue.recount(queue[at % len(queue)])
        miss.miss_rate = rate
        if is_asked:
            assert queue.totals() == as_sglang_counts(queue, rate)
    assert scheduler.waiting_queue.totals() == as_sglang_counts(scheduler.waiting_queue, miss.miss_rate)


class CountsReads(Request):
    """A request that counts the reads of its length."""

    num_reads = 0

    @property
    def seqlen(self) -> int:
        type(self).num_reads += 1
        return 8

    @seqlen.setter
    def seqlen(self, _: int) -> None: ...


@pytest.mark.parametrize("rate", [None, 0.5])
def test_a_report_reads_only_new_requests(rate: float | None) -> None:
    miss = Rate(rate)
    scheduler = Scheduler(miss)
    for _ in range(1_000):
        scheduler.waiting_queue.append(CountsReads(8))
    scheduler.waiting_queue.totals()
    CountsReads.num_reads = 0
    for _ in range(10):
        scheduler.waiting_queue.append(CountsReads(8))
        scheduler.waiting_queue.pop(0)
        admitted = set(scheduler.waiting_queue[:5])
        scheduler.waiting_queue = [request for request in scheduler.waiting_queue if request not in admitted]
        scheduler.waiting_queue.sort(key=id)
        scheduler.waiting_queue.totals()
    assert CountsReads.num_reads == 10


def test_a_request_that_is_queued_twice_is_counted_twice() -> None:
    queue, request = CountedWaitingQueue([], Rate()), Request(5)
    queue.totals()
    for _ in range(2):
        queue.append(request)
    assert queue.totals() == (2, 10, 10)
    queue.pop()
    request.num_matched_prefix_tokens = 2
    queue.recount(request)
    assert queue.totals() == (1, 5, 3)
    queue.pop()
    assert queue.totals() == (0, 0, 0)


def test_the_queue_source_reads_attributes_that_the_scheduler_rebinds() -> None:
    policy = SimpleNamespace(waiting_queue_prefix_matched=lambda queue: not queue)
    owner = SimpleNamespace(
        waiting_queue=[],
        running_batch=SimpleNamespace(reqs=[1]),
        chunked_req=None,
        max_running_requests=4,
        policy=policy,
        metrics_reporter=SimpleNamespace(recent_cache_hit_rate=0.25),
    )
    queues = SglangQueueSource(owner=owner)
    assert (len(queues.running), queues.num_chunked_tokens_left, queues.miss_rate) == (1, 0, None)
    owner.running_batch = SimpleNamespace(reqs=[1, 2])
    owner.chunked_req = SimpleNamespace(seqlen=100, prefix_len=36)
    owner.waiting_queue = [Request(1)]
    assert (len(queues.running), queues.num_chunked_tokens_left, queues.miss_rate) == (2, 64, 0.75)


@dataclass
class ParallelContext:
    """SGLang's context of eight ranks: two attention-DP replicas of four attention-TP ranks."""

    tp_rank: int = 5
    tp_size: int = 8
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int | None = 1
    num_dp_ranks: int = 2
    attn_tp_rank: int = 1
    attn_tp_size: int = 4
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    attn_dp_rank: int = 1
    attn_dp_size: int = 2
    moe_ep_rank: int = 0
    moe_ep_size: int = 1
    moe_dp_rank: int = 0
    moe_dp_size: int = 1
    dcp_size: int = 1
    attn_tp_group: object = field(default_factory=object)


def test_the_parallel_state_is_a_copy_of_the_context() -> None:
    context = ParallelContext()
    parallel = read_parallel_state(context, gpu_id=5)
    context.tp_rank = 0
    assert parallel == ParallelState.from_tp_rank(5, tp_size=8, attn_dp_size=2)
    assert (parallel.owns_kv_stream, parallel.kv_stream_index, parallel.kv_stream_count) == (False, 1, 2)


def test_an_inconsistent_parallel_context_raises_a_config_error() -> None:
    with pytest.raises(ConfigError, match="attn_tp_rank"):
        read_parallel_state(ParallelContext(attn_tp_rank=4))


# The plugin, over small doubles of the modules of SGLang that it imports.


class TheirConfig(BaseModel):
    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    format: str = "default"

    @classmethod
    def from_cli(cls, text: str) -> TheirConfig:
        return cls.model_validate_json(text)


class Hooks:
    """``sglang.srt.plugins.hook_registry``."""

    class HookType:
        AROUND, AFTER = "around", "after"

    def __init__(self) -> None:
        self.targets: dict[str, object] = {}
        self.HookRegistry = self

    def register(self, target: str, hook: object, hook_type: str) -> None:
        self.targets[target.rpartition(".")[2]] = hook


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    hooks = Hooks()
    theirs = SimpleNamespace(KVEventsConfig=TheirConfig, NullEventPublisher=lambda: "none")
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.kv_events", theirs)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    return hooks


@contextmanager
def closing_stream(publisher: SglangEventPublisher) -> Iterator[dict[str, object] | None]:
    """Yield the publisher's description of itself and close it afterwards."""
    try:
        yield publisher.describe_local_source(64)
    finally:
        publisher.shutdown()


def original(*_: object) -> str:
    return "SGLang"


NAMED = {"SGLANG_PLUGINS": "other, scheduler_components"}
ZMQ = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "bind": true}'
OURS = "SCHEDULER_COMPONENTS_KV_EVENTS"


def test_the_plugin_registers_hooks_only_if_sglang_plugins_names_it(hooks: Hooks) -> None:
    load_plugin({})
    load_plugin({"SGLANG_PLUGINS": "scheduler_components_of_others"})
    assert hooks.targets == {}
    load_plugin(NAMED)
    assert hooks.targets.keys() == {"create", "describe_kv_events_publisher"}
    load_plugin(NAMED | {OURS: '{"components": true}'})
    assert {"init_kv_events_publisher", "init_load_publisher", "init_load_inquirer"} < hooks.targets.keys()


def test_only_the_zmq_publisher_is_replaced(hooks: Hooks) -> None:
    load_plugin(NAMED)
    create = hooks.targets["create"]
    for config in ("", "no JSON", "[]", '{"publisher": "null"}', '{"publisher": "mine"}', '{"hwm": "many"}'):
        assert create(original, object, config, 0) == "SGLang"
    publisher = create(original, object, ZMQ, 1)
    with closing_stream(publisher) as source:
        assert source == {"dp_rank": 1, "endpoint": publisher.stream.endpoint, "topic": "", "block_size": 64}


@pytest.mark.parametrize(
    ("config", "environ", "sentence"),
    [
        ('{"publisher": "zmq", "endpiont": "tcp://*:5557"}', "", "endpiont='tcp://*:5557': is not a setting"),
        ('{"publisher": "zmq", "endpoint": "udp://*:5557"}', "", "endpoint='udp://*:5557'"),
        ('{"publisher": "zmq", "buffer_steps": -1}', "", "buffer_steps=-1: is too small"),
        (ZMQ, "{", "SCHEDULER_COMPONENTS_KV_EVENTS='{'"),
        (ZMQ, '{"component": true}', "component=True: is not a setting"),
        (ZMQ, '{"components": 1}', "components=1: is not true or false"),
        (ZMQ, '{"endpoint": "tcp://*:1"}', "give it in the engine's own --kv-events-config"),
    ],
)
def test_an_invalid_setting_logs_one_sentence_and_keeps_sglangs_publisher(
    hooks: Hooks, caplog: pytest.LogCaptureFixture, config: str, environ: str, sentence: str
) -> None:
    load_plugin(NAMED | {OURS: environ})
    assert hooks.targets["create"](original, object, config, 0) == "SGLang"
    [record] = caplog.records
    assert "SGLang publishes its KV events itself" in record.message and sentence in record.message
    assert "\n" not in record.message
    server_args = SimpleNamespace(kv_events_config=config)
    assert hooks.targets["describe_kv_events_publisher"](original, server_args) == "SGLang"


@pytest.mark.parametrize(
    "environ",
    [
        '{"auth": "required"}',
        '{"auth": "requird"}',
        '{"auth": "required", "secret_key_file": "/nowhere",',
        '{"auth": "required", "secret_key_file": "/nowhere/key", "client_keys_dir": "/nowhere"}',
    ],
)
def test_invalid_settings_that_require_keys_disable_publishing(
    hooks: Hooks, caplog: pytest.LogCaptureFixture, environ: str
) -> None:
    load_plugin(NAMED | {OURS: environ})
    assert hooks.targets["create"](original, object, ZMQ, 0) == "none"
    [record] = caplog.records
    assert "no KV events are published, because the settings require keys: " in record.message
    assert hooks.targets["describe_kv_events_publisher"](original, SimpleNamespace(kv_events_config=ZMQ)) is None


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://[2001:db8::7]:5557", True),
        ("tcp://127.0.0.1:5557", False),
        ("ipc:///tmp/events", True),
        ("inproc://events", True),
    ],
)
def test_an_address_is_bound_where_sglang_binds_it(hooks: Hooks, endpoint: str, binds: bool) -> None:
    plugin = SglangPlugin(environ={})
    config = TheirConfig(publisher="zmq", endpoint=endpoint, hwm=0, max_queue_size=-1)
    settings = plugin.publisher_settings(config.model_dump_json())
    assert settings is not None
    assert (settings.bind, settings.hwm, settings.max_queue_size) == (binds, 2**31 - 1, 2**31 - 1)
    assert (settings.endpoint, settings.replay_framing) == (endpoint, "topic")


# The components over a small scheduler.


class Shapes:
    """The double of ``load_snapshot``. Its structs are dictionaries and tuples."""

    LoadSnapshot = DisaggregationMetrics = dict
    MemoryMetrics = SpeculativeMetrics = LoRAMetrics = QueueMetrics = staticmethod(lambda *values: values)


class Batch:
    reqs = (1, 2)


class TinyScheduler:
    """The attributes of SGLang's scheduler that the adapters read. Three requests wait, one is half prefilled."""

    max_total_num_tokens, page_size, max_running_requests, kv_shard_widening = 1_000, 16, 8, 2
    is_hybrid_swa = is_hybrid_ssm = enable_hisparse = enable_hierarchical_cache = False
    total_prefill_uncached_tokens, total_prefill_busy_us, decode_moment_totals = 77, 88, [2.0, 1.0]

    def __init__(self) -> None:
        stats = SimpleNamespace(
            **dict.fromkeys(("num_grammar_queue_reqs", "num_paused_reqs", "num_retracted_reqs"), 1),
            gen_throughput=12.345,
            cache_hit_rate=0.12346,
            utilization=0.55556,
            kv_transfer_speed_gb_s=0.0,
            kv_transfer_latency_ms=0.0,
            lora_pool_slots_used=1,
            lora_pool_slots_total=2,
            lora_pool_utilization=0.5,
            spec_accept_rate=0.25,
        )
        self.metrics_reporter = SimpleNamespace(
            stats=stats, recent_cache_hit_rate=0.5, spec_total_num_accept_tokens=6, spec_total_num_forward_ct=4
        )
        self.policy = SimpleNamespace(waiting_queue_prefix_matched=lambda queue: False)
        self.running_batch, self.chunked_req = Batch(), SimpleNamespace(seqlen=100, prefix_len=36)
        self.token_to_kv_pool_allocator = SimpleNamespace(
            available_size=lambda: 600, get_kvcache=lambda: SimpleNamespace(mem_usage=1.0)
        )
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 150, take_events=list)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: False)
        self.disaggregation_mode = SimpleNamespace(value="null")
        self.tp_worker = SimpleNamespace(
            model_runner=SimpleNamespace(weight_load_mem_usage=0.12345), graph_memory_usage={}
        )
        self.ipc_channels = SimpleNamespace(send_metrics_from_scheduler=None)
        self.waiting_queue = [Request(10, 4), Request(21), Request(31)]


@pytest.fixture
def parts(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> SglangComponents:
    """Make the hooks in the second of two data-parallel replicas."""
    observability = SimpleNamespace(kv_events_config=ZMQ, load_publish_endpoint=None)
    context = SimpleNamespace(
        get_parallel=lambda: ParallelContext(
            **dict.fromkeys(("tp_rank", "attn_tp_rank", "attn_dp_rank"), 0),
            **dict.fromkeys(("tp_size", "attn_tp_size", "attn_dp_size"), 1),
        ),
        get_device=lambda: SimpleNamespace(gpu_id=0),
        get_lora=lambda: SimpleNamespace(enable_lora=True),
        get_observability=lambda: observability,
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.load_snapshot", Shapes)
    theirs = sys.modules["sglang.srt.disaggregation.kv_events"]
    monkeypatch.setattr(theirs, "resolve_load_pub_range", lambda **_: (None, None), raising=False)
    return SglangComponents(SglangPlugin(environ=NAMED).publisher_settings)


def nothing(scheduler: object) -> None:
    """The method of SGLang whose component the hook replaces."""


@pytest.fixture
def composed(parts: SglangComponents) -> Iterator[TinyScheduler]:
    class Composed(TinyScheduler):
        """A separate class, because the hook replaces an attribute of the class."""

    scheduler = Composed()
    parts.init_kv_events_publisher(nothing, scheduler)
    parts.init_load_publisher(nothing, scheduler)
    parts.init_load_inquirer(nothing, scheduler)
    yield scheduler
    scheduler.kv_events_publisher.component.shutdown()


def test_a_report_has_every_field_with_sglangs_value(composed: TinyScheduler) -> None:
    report = composed.load_inquirer.get_loads()
    assert report.pop("timestamp") > 0
    assert report == {
        "dp_rank": 1,
        "num_running_reqs": 2,
        "num_waiting_reqs": 3,
        "num_waiting_uncached_tokens": 5
        + 10
        + 15
        + 64,  # each rounded down, plus the remaining tokens of the chunked request
        "num_used_tokens": 250,
        "num_total_tokens": 250 + 62,  # without the remaining tokens of the chunked request
        "num_active_tokens": 250 + 62,
        "max_total_num_tokens": 2_000,
        "max_running_requests": 8,
        "token_usage": 0.25,
        "gen_throughput": 12.35,
        "cache_hit_rate": 0.1235,
        "utilization": 0.5556,
        "total_prefill_uncached_tokens": 77,
        "total_prefill_busy_us": 88,
        "decode_moments": [2.0, 1.0],
        "memory": (0.123, 1.0, 0, 2_000),
        "speculative": (1.5, 0.25),
        "lora": (1, 2, 0.5),
        "disaggregation": {"mode": "null", "kv_transfer_speed_gb_s": 0.0, "kv_transfer_latency_ms": 0.0},
        "queues": (3, 1, 1, 1, 0),
    }
    assert composed.load_inquirer.get_num_waiting_uncached_tokens() == 94
    assert composed.load_inquirer._get_num_pending_tokens(chunk_deduct=30) == 62 + 64 - 30
    composed.chunked_req = None
    assert composed.load_inquirer._get_num_pending_tokens() == 62


def test_a_new_prefix_match_changes_the_report(composed: TinyScheduler, parts: SglangComponents) -> None:
    composed.policy = SimpleNamespace(waiting_queue_prefix_matched=lambda queue: True)
    composed.chunked_req = None
    assert composed.load_inquirer.get_num_waiting_uncached_tokens() == 6 + 21 + 31
    composed.waiting_queue[1].num_matched_prefix_tokens = 16
    parts.after_match(None, composed.waiting_queue[1], object())
    assert composed.load_inquirer.get_num_waiting_uncached_tokens() == 6 + 5 + 31


def test_assigning_a_list_to_the_waiting_queue_keeps_it_counted(composed: TinyScheduler) -> None:
    composed.waiting_queue = composed.waiting_queue[:1]
    assert composed.waiting_queue.totals() == (1, 10, 5)


def test_events_are_published_after_each_step(composed: TinyScheduler, parts: SglangComponents) -> None:
    taken = []
    composed.kv_events_publisher.component.source = SimpleNamespace(take_events=lambda: taken.append(1) or [])
    parts.after_step(None, composed, "batch", "result")
    assert taken == [1]
    assert composed.kv_events_publisher.enable_kv_cache_events
    [source] = composed.kv_events_publisher.local_kv_event_sources(16)
    assert source["dp_rank"] == 1


def test_a_forced_report_is_published_immediately(composed: TinyScheduler) -> None:
    sent: list[object] = []
    sink = SimpleNamespace(wants_reports=True, send=sent.append, close=lambda: None)
    publisher = composed.load_publisher
    assert not publisher.enable
    publisher.component.sinks = (sink,)
    publisher.publish_load_stat(None, force=True, snapshot=object())
    composed.running_batch = SimpleNamespace(reqs=[])
    publisher.publish_load_stat(None)
    assert len(sent) == 1  # the second was too early
    publisher.publish_load_stat(None, force=True)
    assert [load.num_running_reqs for load in sent] == [2, 0]
    publisher.close()
    assert not publisher.enable


@pytest.mark.parametrize("kind", ["disaggregation_mode", "enable_hierarchical_cache"])
def test_unsupported_queues_keep_sglangs_own_inquirer(
    parts: SglangComponents, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    scheduler, called = TinyScheduler(), []
    setattr(scheduler, kind, SimpleNamespace(value="prefill"))
    parts.init_kv_events_publisher(nothing, scheduler)
    parts.init_load_publisher(called.append, scheduler)
    parts.init_load_inquirer(called.append, scheduler)
    scheduler.kv_events_publisher.component.shutdown()
    assert called == [scheduler, scheduler]
    assert type(scheduler.waiting_queue) is list
    assert [record.levelname for record in caplog.records if "remain" in record.message] == ["WARNING"]


def test_a_rank_without_a_stream_opens_no_publisher(parts: SglangComponents, monkeypatch: pytest.MonkeyPatch) -> None:
    context = sys.modules["sglang.srt.runtime_context"]
    monkeypatch.setattr(context, "get_parallel", ParallelContext)
    scheduler = TinyScheduler()
    parts.init_kv_events_publisher(nothing, scheduler)
    events = scheduler.kv_events_publisher
    assert (events.enable_kv_cache_events, events.local_kv_event_sources(16)) == (False, [])
    events.publish_kv_events()
    events.emit_kv_metrics()


def test_an_inconsistent_parallel_context_keeps_sglangs_components(
    parts: SglangComponents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context = sys.modules["sglang.srt.runtime_context"]
    monkeypatch.setattr(context, "get_parallel", lambda: ParallelContext(attn_tp_rank=4))
    scheduler, called = TinyScheduler(), []
    for hook in (parts.init_kv_events_publisher, parts.init_load_publisher, parts.init_load_inquirer):
        hook(called.append, scheduler)
    assert called == [scheduler] * 3
    [record] = caplog.records
    assert "keeps its own components: attn_tp_rank=4" in record.message
