"""Configuration of an engine: topology, scheduler sizes, device, event stream and cache tiers.

The values are start-up facts. The frontend process checks them once and sends them to every rank as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias, get_args

import attrs
import msgspec

from scheduler_components import ConfigError, DecodeError, ParallelState
from scheduler_components._internal.validators import MAX_TOKENS, choice_validator, integer_validator, number_validator
from scheduler_components.hicache import HiCachePolicy, MooncakeAddress
from scheduler_components.input_blocker import InputLimits
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_components.kv_events import KVEventsConfig
from scheduler_components.metrics.forward_pass_metrics import parse_forward_pass_endpoint
from scheduler_components.metrics.request_tracer import check_otlp_endpoint
from scheduler_components.scheduling.admission_budget import BATCH_MODES, BatchLimits, BatchMode
from scheduler_components.scheduling.dp_attn import PrefillDelayer
from scheduler_components.scheduling.preemption_policy import PREEMPTION_POLICY_NAMES
from scheduler_components.scheduling.scheduling_policy import check_policy_name
from scheduler_components.values import RequestTimeouts
from scheduler_components.values.page_shape import HOST_LAYOUTS, HostLayout
from scheduler_components.waiting.held_request import HeldRequest
from scheduler_components.waiting.lora_queue import LoraLimits, LoraQueue
from scheduler_components.waiting.sessions import SessionLimits
from scheduler_engine.device.model_spec import ModelSpec, TokenSpec
from scheduler_engine.engine.log_output import LogConfig

DEFAULT_HOST = "127.0.0.1"
"""The event stream carries token ids in clear text, so by default sockets listen on loopback only."""

MOONCAKE_MASTER = "127.0.0.1:50051"
MOONCAKE_METADATA = "http://127.0.0.1:8080/metadata"
"""Default addresses of ``mooncake_master --enable_http_metadata_server=true``."""

_SEGMENT_BYTES = 64 << 20  # that each rank contributes to the cluster
_BUFFER_BYTES = 16 << 20


_STALL_AFTER_S = 8.0

_MODEL_SPEED = 1 / 8  # on two busy cores, 135 million parameters need up to 8 s for a chunk of 512 tokens

StorageKind: TypeAlias = Literal["none", "file", "mooncake"]
DecisionLogMode: TypeAlias = Literal["off", "count", "log", "dump", "stop"]
StorageChecksum: TypeAlias = Literal["frame", "sidecar", "none"]


def _check_ratio(_: SchedulerConfig, attribute: attrs.Attribute[float], value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise ConfigError(attribute.name, value, "is not a ratio", "give a number from 0 to 1")


def _check_policy(_: SchedulerConfig, __: attrs.Attribute[str], value: str) -> None:
    check_policy_name(value)


def _read_kv_events(given: str | KVEventsConfig | None) -> KVEventsConfig | None:
    return None if given is None else KVEventsConfig.read(given)


@attrs.frozen(kw_only=True)
class IntegrityConfig:
    """Checks of a scheduler's pools, and its watchdog.

    Attributes:
        checks: how often to check the pools, and what to do with a violation.
        owners_one_in: the allocation log records one in this many requests; 0 disables the log. One in four costs less
            than a microsecond per step, and a leak that repeats soon affects a recorded request.
        follows_events: also compare the cache with the sum of its events. Costs 60 bytes per cached block.
        decision_log: what to do when the ranks of a replica decide differently; ``off`` compares nothing.
        decision_dump_directory: where each rank then writes its recent decisions, with ``dump`` and ``stop``; empty for
            nowhere.
        stall_after_s: a step that spends this long in one phase is reported as stuck; 0 disables the watchdog. None
            means 8 s, which is less than the frontend's heartbeat timeout, and longer for a slow device.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    checks: CheckPolicy = attrs.field(factory=CheckPolicy)
    owners_one_in: int = attrs.field(default=4, validator=integer_validator("is not a sampling interval", at_least=0))
    follows_events: bool = False
    decision_log: DecisionLogMode = "stop"
    decision_dump_directory: str = ""
    stall_after_s: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(number_validator(or_zero=True))
    )

    def __attrs_post_init__(self) -> None:
        if self.decision_log == "dump" and not self.decision_dump_directory:
            hint = "give a directory with decision_dump_directory"
            raise ConfigError("decision_log", "dump", "has no place for its files", hint)

    def stall_timeout_s(self, speed: float) -> float:
        """Return ``stall_after_s`` for a device of this speed."""
        return _STALL_AFTER_S / min(1.0, speed) if self.stall_after_s is None else self.stall_after_s


@attrs.frozen(kw_only=True)
class GrammarConfig:
    """Grammars that constrain outputs.

    Attributes:
        timeout_s: longest wait for a grammar. A rank compiles one at a time, most of them in milliseconds; a rank that
            still reads its tokenizer takes a second more.
        max_waiting: requests that may wait for a grammar.
        max_cached: compiled grammars that each rank keeps.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    timeout_s: float = attrs.field(default=30.0, validator=number_validator("is not a time"))
    max_waiting: int = attrs.field(default=256, validator=integer_validator())
    max_cached: int = attrs.field(default=128, validator=integer_validator())


@attrs.frozen(kw_only=True)
class AdapterSpec:
    """An adapter that is registered when the engine starts.

    Attributes:
        name: by which requests name it.
        path: folder with its files. A simulated device reads none.
        pinned: it is never evicted.

    Raises:
        ConfigError: the name or the path is empty.
    """

    name: str
    path: str
    pinned: bool = False

    def __attrs_post_init__(self) -> None:
        for field, value in (("lora_name", self.name), ("lora_path", self.path)):
            if not value:
                raise ConfigError(field, value, "is empty", "give NAME=PATH")


@attrs.frozen(kw_only=True)
class LoraConfig:
    """LoRA adapters of an engine.

    Attributes:
        limits: of loaded and registered adapters, and of requests that wait for them.
        adapters: registered when the engine starts; a request that names one loads it.

    Raises:
        ConfigError: two adapters have one name, or too many are given or pinned.
    """

    limits: LoraLimits = attrs.field(factory=LoraLimits)
    adapters: tuple[AdapterSpec, ...] = ()

    def __attrs_post_init__(self) -> None:
        queue = LoraQueue[HeldRequest](limits=self.limits)
        for each in self.adapters:  # raises ConfigError before any process is started
            queue.register(each.name, each.path, is_pinned=each.pinned)


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """Sizes of one scheduler.

    Attributes:
        page_size: tokens per KV page. 16 as in vLLM: small enough to share prefixes, large enough to hash cheaply.
        kv_tokens: capacity of the KV pool in tokens, a multiple of ``page_size``.
        max_running_requests: request slots of a batch; `num_request_slots` of them can be used.
        max_prefill_tokens: prefill tokens of a step over all requests. Decode tokens are not counted: they are few.
        chunk_tokens: prefill tokens of one request in a step, so that a long prompt does not delay the decodes of its
            batch.
        new_token_ratio: share of a request's possible output that admission reserves initially. 0.7 as in SGLang,
            because few requests use all of ``max_new_tokens``.
        min_new_token_ratio: the share after 600 steps without a retraction (``NewTokenRatioTracker``).
        schedule_policy: which waiting request is next: a name of SGLang's, or ``module:name`` (``make_policy``).
        preemption_policy: which running request gives up its pages (``make_preemption_policy``).
        batch_mode: ``mixed`` or ``prefill_first`` (``BatchLimits``).
        tokens: vocabulary, context and end-of-sequence tokens of the model.
        kv_metrics_every_steps: steps between two ``KvMetrics``, for a scheduler with a ``ReportSink`` for them.
        queue_timeout_s, timeout_s: limits until a request is admitted and until its end, if its client sets none; None
            for no limit.
        recv_interval: weight of steps between two receives of input (``RecvSkipper``); 1 receives before every step.
        input_bounds: limits of size, rate and number of the requests that a replica admits.
        integrity: checks of the pools, and the watchdog.
        grammar: limits of grammars; None refuses requests with one.
        sessions: limits of sessions. Their pages are at most half of the pool, whatever ``max_pages`` says.
        lora: adapters; None refuses requests with one.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    page_size: int = attrs.field(default=16, validator=integer_validator())
    kv_tokens: int = attrs.field(default=65_536, validator=integer_validator())
    max_running_requests: int = attrs.field(default=64, validator=integer_validator())
    max_prefill_tokens: int = attrs.field(default=4096, validator=integer_validator(at_most=MAX_TOKENS))
    chunk_tokens: int = attrs.field(default=2048, validator=integer_validator(at_most=MAX_TOKENS))
    new_token_ratio: float = attrs.field(default=0.7, validator=_check_ratio)
    min_new_token_ratio: float = attrs.field(default=0.1, validator=_check_ratio)
    schedule_policy: str = attrs.field(default="fcfs", validator=_check_policy)
    preemption_policy: str = attrs.field(default="latest-arrival", validator=choice_validator(*PREEMPTION_POLICY_NAMES))
    batch_mode: BatchMode = attrs.field(default="mixed", validator=choice_validator(*BATCH_MODES))
    tokens: TokenSpec = attrs.field(factory=TokenSpec)
    kv_metrics_every_steps: int = attrs.field(default=8, validator=integer_validator())
    queue_timeout_s: float | None = attrs.field(default=None, validator=attrs.validators.optional(number_validator()))
    timeout_s: float | None = attrs.field(default=None, validator=attrs.validators.optional(number_validator()))
    recv_interval: int = attrs.field(default=1, validator=integer_validator("is not an interval"))
    input_bounds: InputLimits = attrs.field(factory=InputLimits)
    integrity: IntegrityConfig = attrs.field(factory=IntegrityConfig)
    grammar: GrammarConfig | None = None
    sessions: SessionLimits = attrs.field(factory=SessionLimits)
    lora: LoraConfig | None = None

    def __attrs_post_init__(self) -> None:
        whole_tokens = self.kv_tokens // self.page_size * self.page_size
        if whole_tokens != self.kv_tokens:
            hint = f"give {max(whole_tokens, self.page_size)}"
            raise ConfigError("kv_tokens", self.kv_tokens, f"is not a multiple of page_size={self.page_size}", hint)
        if self.min_new_token_ratio > self.new_token_ratio:
            raise ConfigError(
                "min_new_token_ratio",
                self.min_new_token_ratio,
                f"is above new_token_ratio={self.new_token_ratio}",
                f"give at most {self.new_token_ratio}",
            )

    @property
    def timeouts(self) -> RequestTimeouts:
        """The limits of requests whose client sets none."""
        return RequestTimeouts(self.queue_timeout_s, self.timeout_s)

    @property
    def kv_pages(self) -> int:
        """Number of pages of the KV pool."""
        return self.kv_tokens // self.page_size

    @property
    def session_limits(self) -> SessionLimits:
        """The limits of sessions in this pool."""
        return attrs.evolve(self.sessions, max_pages=min(self.sessions.max_pages, self.kv_pages // 2))

    @property
    def batch_limits(self) -> BatchLimits:
        """The sizes that the batcher reads."""
        return BatchLimits(
            max_running_requests=self.num_request_slots,
            max_prefill_tokens=self.max_prefill_tokens,
            chunk_tokens=self.chunk_tokens,
            mode=self.batch_mode,
            head_of_line_blocking=self.schedule_policy == "fcfs",
        )

    @property
    def num_request_slots(self) -> int:
        """Number of requests that may run together: at most one per page, because each of them computes in its own."""
        return min(self.max_running_requests, self.kv_pages)


@attrs.frozen(kw_only=True)
class HiCacheConfig:
    """Host and storage tiers behind the device.

    Attributes:
        host_tokens: size of each rank's host tier, in tokens.
        host_layout: which bytes are contiguous: those of a page, for storage, or those of a layer, for copies.
        storage: kind of the storage tier. None is in memory, because each rank is a process.
        storage_path: for ``file``: a directory that all ranks can write to. The engine does not remove it.
        storage_bytes: for ``file``: size limit of the directory.
        storage_deadline_s: longest wait for one storage operation that copies. Zero-copy operations have no deadline.
        storage_checksum: ``frame`` copies each page into a frame with a checksum. ``sidecar`` and ``none`` are
            zero-copy: the store reads and writes the host's pages, with a checksum next to each page or with none.
            Pages stored in frames can be read in frames only.
        mooncake_master, mooncake_metadata: for ``mooncake``: ``host:port`` of the master, URL of the metadata server.
        policy: when to write, prefetch and load pages.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    host_tokens: int = attrs.field(validator=integer_validator())
    host_layout: HostLayout = attrs.field(default="page_first", validator=choice_validator(*HOST_LAYOUTS))
    storage: StorageKind = attrs.field(default="none", validator=choice_validator(*get_args(StorageKind)))
    storage_path: str = ""
    storage_bytes: int = attrs.field(default=1 << 30, validator=integer_validator())
    # Only a request waits for storage, never a step. Recomputing a thousand tokens takes about as long.
    storage_deadline_s: float = attrs.field(default=2.0, validator=number_validator())
    storage_checksum: StorageChecksum = attrs.field(
        default="frame", validator=choice_validator(*get_args(StorageChecksum))
    )
    mooncake_master: str = MOONCAKE_MASTER
    mooncake_metadata: str = MOONCAKE_METADATA
    policy: HiCachePolicy = attrs.field(factory=HiCachePolicy)

    def __attrs_post_init__(self) -> None:
        if self.storage == "file" and not self.storage_path:
            raise ConfigError("storage_path", self.storage_path, "is empty", "name the directory to store pages in")
        if self.storage_checksum != "frame" and self.host_layout != "page_first":
            problem = f"has no contiguous pages, which storage_checksum={self.storage_checksum!r} needs"
            raise ConfigError("host_layout", self.host_layout, problem, "give page_first, or storage_checksum frame")
        if self.storage == "mooncake":
            _ = self.mooncake  # raises ConfigError before any process is started

    @property
    def mooncake(self) -> MooncakeAddress:
        """The address of the Mooncake cluster, and the memory that each rank contributes to it."""
        return MooncakeAddress(
            master=self.mooncake_master,
            metadata=self.mooncake_metadata,
            segment_bytes=_SEGMENT_BYTES,
            buffer_bytes=_BUFFER_BYTES,
        )


@attrs.frozen(kw_only=True)
class DpAttentionConfig:
    """Replicas that take every step together, because they share the layers behind attention.

    Attributes:
        max_delay_steps, low_usage: when prefills of one replica wait for the others (``PrefillDelayer``).

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    max_delay_steps: int = 0
    low_usage: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.delayer()  # raises ConfigError before any process is started

    def delayer(self) -> PrefillDelayer:
        """Make the delayer of one rank. It has state, so each rank needs its own."""
        return PrefillDelayer(max_delay_steps=self.max_delay_steps, low_usage=self.low_usage)


@attrs.frozen(kw_only=True)
class TelemetryConfig:
    """What an engine sends to planners and collectors. By default nothing.

    Attributes:
        forward_pass_endpoint: base address of the forward-pass metrics: replica r binds port + r, or the path ``.r``.
        forward_pass_worker_id: name of the engine in these metrics, as its reader's discovery knows it.
        otlp_traces_endpoint: URL of the collector to which the spans of requests are exported.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    forward_pass_endpoint: str = ""
    forward_pass_worker_id: str = ""
    otlp_traces_endpoint: str = ""

    def __attrs_post_init__(self) -> None:
        if self.otlp_traces_endpoint:
            check_otlp_endpoint(self.otlp_traces_endpoint)
        if self.forward_pass_worker_id and not self.forward_pass_endpoint:
            worker_id, hint = self.forward_pass_worker_id, "give forward_pass_endpoint, too"
            raise ConfigError("forward_pass_worker_id", worker_id, "has no effect by itself", hint)

    def check_ranks(self, num_ranks: int) -> None:
        """Check that ``num_ranks`` replicas have an address each.

        Raises:
            ConfigError: the base address is invalid, or too high.
        """
        if self.forward_pass_endpoint:
            parse_forward_pass_endpoint(self.forward_pass_endpoint, num_ranks=num_ranks)


@attrs.frozen(kw_only=True)
class EngineConfig:
    """Configuration of one engine.

    Attributes:
        dp_size: number of replicas, which are independent KV caches under DP attention.
        attn_cp_size, attn_tp_size, pp_size: ranks per replica, along attention context parallelism, attention tensor
            parallelism and pipeline stages. The simulated device of each stage returns what the last one would.
        moe_dp_size: data-parallel copies of the experts, over all ranks of a stage. It only enters the ranks'
            ``ParallelState``, because the simulated device has no experts.
        scheduler: sizes of each replica's scheduler.
        model: a real model; the attention-TP ranks of each replica share its layers, the attention-CP ranks the rows of
            prefills. None for a simulated device.
        speed: divides the simulated device's time.
        seed: seed of the simulated model's tokens.
        kv_events: configuration of the event publisher, also as JSON text; None publishes nothing.
        model_name: name of the model in HTTP routes and metrics.
        hicache: tiers behind the device, or None.
        profile_directory: directory for the ranks' profiles; empty disables profiles.
        dp_attention: replicas take every step together; None lets each replica step by itself.
        logs: level and format of the log of every process.
        telemetry: forward-pass metrics and spans of requests.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    dp_size: int = attrs.field(default=2, validator=integer_validator())
    attn_cp_size: int = attrs.field(default=2, validator=integer_validator())
    attn_tp_size: int = attrs.field(default=2, validator=integer_validator())
    pp_size: int = attrs.field(default=1, validator=integer_validator())
    moe_dp_size: int = attrs.field(default=1, validator=integer_validator())
    scheduler: SchedulerConfig = attrs.field(factory=SchedulerConfig)
    speed: float = attrs.field(default=1.0, validator=number_validator("is not a speed"))
    seed: int = 0
    kv_events: KVEventsConfig | None = attrs.field(default=None, converter=_read_kv_events)
    model_name: str = "simulated-8b"
    hicache: HiCacheConfig | None = None
    profile_directory: str = ""
    dp_attention: DpAttentionConfig | None = None
    model: ModelSpec | None = None
    logs: LogConfig = attrs.field(factory=LogConfig)
    telemetry: TelemetryConfig = attrs.field(factory=TelemetryConfig)

    def __attrs_post_init__(self) -> None:
        self.telemetry.check_ranks(self.dp_size)
        load = None if self.kv_events is None else self.kv_events.port_plan(self.dp_size).load
        if load is not None:
            load.check_leaves_process(field="load_endpoint")
        if self.model is not None:
            self._check_model_ranks(self.model)
        if self.model is not None and self.scheduler.lora is not None and self.attn_tp_size > 1:
            hint = "give 1, or leave adapters out"
            raise ConfigError("attn_tp_size", self.attn_tp_size, "cannot shard the layers of adapters", hint)
        if self.hicache is not None and self.hicache.storage != "none" and self.scheduler.lora is not None:
            problem = "would keep pages of adapters, whose numbers begin again in the next engine"
            raise ConfigError("hicache_storage", self.hicache.storage, problem, "give none, or leave adapters out")
        if self.scheduler.lora is not None and self.model_name in (each.name for each in self.scheduler.lora.adapters):
            raise ConfigError(
                "lora_paths", self.model_name, "is the name of the model", "give the adapter another name"
            )
        if self.tp_size % self.moe_dp_size:
            problem = f"does not divide the {self.tp_size} ranks of a stage"
            raise ConfigError("moe_dp_size", self.moe_dp_size, problem, f"give a divisor of {self.tp_size}")
        if self.dp_attention is not None and self.dp_size == 1:
            hint = "give 2 or more replicas, or leave DP attention out"
            raise ConfigError("dp_size", 1, "is too few replicas for DP attention", hint)

    def _check_model_ranks(self, model: ModelSpec) -> None:
        if self.pp_size != 1:
            hint = "give 1, and raise attn_tp_size or attn_cp_size"
            raise ConfigError("pp_size", self.pp_size, "is not supported with a real model", hint)
        if self.moe_dp_size != 1:
            raise ConfigError("moe_dp_size", self.moe_dp_size, "is not supported with a real model", "give 1")
        if (units := model.max_tp_size) % self.attn_tp_size:
            problem = f"does not divide the {units} parts into which this model can be sharded"
            raise ConfigError("attn_tp_size", self.attn_tp_size, problem, f"give a divisor of {units}")
        if self.dp_attention is not None:
            problem = "needs replicas that share layers, but each replica of a real model has all layers"
            raise ConfigError("dp_attention", True, problem, "leave it out")

    @property
    def relative_speed(self) -> float:
        """Speed of a step relative to a simulated device, at most 1.0. Timeouts are divided by it."""
        return min(1.0, self.speed) if self.model is None else _MODEL_SPEED

    @property
    def tp_size(self) -> int:
        """Number of ranks of each pipeline stage, over all replicas."""
        return self.dp_size * self.attn_cp_size * self.attn_tp_size

    @property
    def world_size(self) -> int:
        """Number of scheduler processes."""
        return self.pp_size * self.tp_size

    def parallel(self, rank: int) -> ParallelState:
        """Return the ``ParallelState`` of a world rank, under DP attention."""
        stage, tp_rank = divmod(rank, self.tp_size)
        return ParallelState.from_tp_rank(
            tp_rank,
            tp_size=self.tp_size,
            attn_dp_size=self.dp_size,
            attn_cp_size=self.attn_cp_size,
            moe_dp_size=self.moe_dp_size,
            pp_rank=stage,
            pp_size=self.pp_size,
        )

    def leader_rank(self, replica: int) -> int:
        """Return the rank that receives a replica's requests."""
        return replica * self.attn_cp_size * self.attn_tp_size

    def follower_ranks(self, replica: int) -> list[int]:
        """Return the other ranks of a replica, stage by stage."""
        first = self.leader_rank(replica)
        stages = range(first, first + self.world_size, self.tp_size)
        ranks = [stage + index for stage in stages for index in range(self.attn_cp_size * self.attn_tp_size)]
        return ranks[1:]


@attrs.frozen
class EnginePaths:
    """Paths in the engine's private directory, which only its user can enter: ipc sockets and statistics.

    Attributes:
        directory: the private directory. Each rank that reports metrics writes its page of the board there.
    """

    directory: str

    @property
    def reports(self) -> str:
        """Reports of every rank; the frontend binds."""
        return self._address("reports")

    @property
    def outputs(self) -> str:
        """Output batches of each leader; the frontend binds."""
        return self._address("outputs")

    def commands(self, replica: int) -> str:
        """Commands to the leader of ``replica``; the leader binds."""
        return self._address(f"commands-{replica}")

    def steps(self, rank: int) -> str:
        """Step inputs from the leader to follower ``rank``; the follower binds."""
        return self._address(f"steps-{rank}")

    @property
    def tokenizer(self) -> Path:
        """Tokenizer of the model, as JSON; written before the ranks start. Ranks read it to compile grammars."""
        return Path(self.directory) / "tokenizer.json"

    def sync(self, rank: int) -> str:
        """Collectives of ``rank`` with the other ranks of its replica; ``rank`` binds."""
        return self._address(f"sync-{rank}")

    def dp_sync(self, rank: int) -> str:
        """Collectives of ``rank`` with its counterparts in the other replicas; ``rank`` binds."""
        return self._address(f"dp-sync-{rank}")

    def model_rendezvous(self, replica: int, axis: str, line: int) -> Path:
        """Rendezvous file of the ranks of ``replica`` that differ along ``axis`` only, ``"tp"`` or ``"cp"``.

        ``line`` is their rank along the other axis.
        """
        return Path(self.directory) / f"model-{replica}-{axis}-{line}"

    def _address(self, name: str) -> str:
        return f"ipc://{Path(self.directory) / name}"


@attrs.frozen
class RankConfig:
    """The first line of a rank's standard input. ``rank`` is its rank in the world."""

    engine: EngineConfig
    rank: int
    paths: EnginePaths

    def to_json(self) -> bytes:
        """Encode the configuration as one line of JSON."""
        return msgspec.json.encode(self, enc_hook=_encode_kv_events)

    @classmethod
    def from_json(cls, text: bytes) -> RankConfig:
        """Decode the result of ``to_json``. Raises DecodeError for any other text."""
        try:
            return msgspec.json.decode(text, type=cls, dec_hook=_decode_kv_events)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DecodeError(f"the text is not the configuration of a rank: {error}") from error


def _encode_kv_events(value: object) -> object:
    if isinstance(value, KVEventsConfig):
        return value.model_dump(exclude_unset=True)
    raise NotImplementedError(type(value))


def _decode_kv_events(_: type, given: dict[str, object]) -> KVEventsConfig:
    return KVEventsConfig.read(given)
