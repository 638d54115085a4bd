"""What an engine is made of: topology, sizes of the scheduler, simulated device, event stream, cache tiers.

The values are start-up facts: checked once in the process that a person talks to, sent to every rank as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import attrs
import msgspec

from scheduler_components import ConfigError, DecodeError, ParallelState
from scheduler_components.dp_attn import PrefillDelayer
from scheduler_components.hicache import HiCachePolicy, MooncakeAddress
from scheduler_components.input_blocker import InputLimits
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_components.page_shape import HOST_LAYOUTS, HostLayout
from scheduler_components.reference.device.model_spec import ModelSpec, TokenSpec
from scheduler_components.validators import choice_validator, integer_validator, number_validator

__all__ = [
    "DEFAULT_HOST",
    "MOONCAKE_MASTER",
    "MOONCAKE_METADATA",
    "DpAttentionConfig",
    "EngineConfig",
    "HiCacheConfig",
    "IntegrityConfig",
    "RankConfig",
    "EnginePaths",
    "SchedulerConfig",
    "StorageChecksum",
    "StorageKind",
]

DEFAULT_HOST = "127.0.0.1"
"""Token ids are in clear on the event stream, so nothing listens beyond loopback unless a person says so."""

MOONCAKE_MASTER = "127.0.0.1:50051"
MOONCAKE_METADATA = "http://127.0.0.1:8080/metadata"
"""Where ``mooncake_master --enable_http_metadata_server=true`` listens when it is told nothing else."""

_SEGMENT_BYTES = 64 << 20  # of each rank, given to the cluster
_BUFFER_BYTES = 16 << 20


_STALL_AFTER_S = 8.0

_MODEL_PACE = 1 / 8  # on two busy cores a chunk of 512 tokens takes a model of 135 million parameters up to 8 s

StorageKind: TypeAlias = Literal["none", "file", "mooncake"]
_STORAGE_KINDS = ("none", "file", "mooncake")
StorageChecksum: TypeAlias = Literal["frame", "sidecar", "none"]
_STORAGE_CHECKSUMS = ("frame", "sidecar", "none")


def _check_ratio(_: SchedulerConfig, attribute: attrs.Attribute[float], value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise ConfigError(attribute.name, value, "is not a share", "give a number from 0 to 1")


@attrs.frozen(kw_only=True)
class IntegrityConfig:
    """What keeps a scheduler's pools honest, and tells that it is stuck.

    Attributes:
        checks: how often to look at the pools, and what to do about what is found.
        owners_one_in: requests of which one is watched by the ledger of owners; 0 keeps no ledger. One of four costs a
            step less than a microsecond, and a leak that repeats soon hits one of them.
        follows_events: also compare what the events add up to with the cache; costs 60 bytes per cached block.
        stall_after_s: time in one phase of a step from which on a rank is told to be stuck; 0 for no watchdog. None for
            8 s, before the front calls the rank silent; with a slow device, as much longer.

    Raises:
        ConfigError: naming the value that cannot work.
    """

    checks: CheckPolicy = attrs.field(factory=CheckPolicy)
    owners_one_in: int = attrs.field(default=4, validator=integer_validator("is not a share", at_least=0))
    follows_events: bool = False
    stall_after_s: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(number_validator(or_zero=True))
    )

    def stall_timeout_s(self, speed: float) -> float:
        """``stall_after_s`` for a device of this speed."""
        return _STALL_AFTER_S / min(1.0, speed) if self.stall_after_s is None else self.stall_after_s


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """Sizes of one scheduler; frozen, checked at construction.

    Attributes:
        page_size: tokens per KV page; 16 as in vLLM: small enough to share prefixes, large enough to hash cheaply.
        kv_tokens: capacity of the KV pool in tokens, a multiple of ``page_size``.
        max_running_requests: request slots of a batch.
        max_prefill_tokens: prefill budget of a step over all requests. Decodes come on top: they are few.
        chunk_tokens: the most that one request prefills in a step, so that a long prompt does not hold up the
            decodes that share its batch.
        new_token_ratio: share of a request's possible output that admission reserves at first. 0.7 as in SGLang:
            few requests use all of ``max_new_tokens``.
        min_new_token_ratio: what that share decays to over 600 steps without a retraction (``NewTokenRatioTracker``).
        tokens: what the model takes: its vocabulary, its context, its end-of-sequence tokens.
        kv_metrics_every_steps: cadence of ``KvMetrics`` to the serving process. Events go out every step.
        recv_interval: weight of steps between two receives of input (``RecvSkipper``); 1 receives before every step.
        input_bounds: size, rate and number of the requests that a replica takes.
        integrity: checks of the pools, and the watchdog.

    Raises:
        ConfigError: naming the size that cannot work.
    """

    page_size: int = attrs.field(default=16, validator=integer_validator())
    kv_tokens: int = attrs.field(default=65_536, validator=integer_validator())
    max_running_requests: int = attrs.field(default=64, validator=integer_validator())
    max_prefill_tokens: int = attrs.field(default=4096, validator=integer_validator())
    chunk_tokens: int = attrs.field(default=2048, validator=integer_validator())
    new_token_ratio: float = attrs.field(default=0.7, validator=_check_ratio)
    min_new_token_ratio: float = attrs.field(default=0.1, validator=_check_ratio)
    tokens: TokenSpec = attrs.field(factory=TokenSpec)
    kv_metrics_every_steps: int = attrs.field(default=8, validator=integer_validator())
    recv_interval: int = attrs.field(default=1, validator=integer_validator("is not an interval"))
    input_bounds: InputLimits = attrs.field(factory=InputLimits)
    integrity: IntegrityConfig = attrs.field(factory=IntegrityConfig)

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
    def kv_pages(self) -> int:
        """Pages of the pool."""
        return self.kv_tokens // self.page_size


@attrs.frozen(kw_only=True)
class HiCacheConfig:
    """Tiers behind the device.

    Attributes:
        host_tokens: size of each rank's host tier.
        host_layout: which bytes of it lie together: a page's, for storage, or a layer's, for copies.
        storage: the tier behind that one. Each rank is a process of its own, so a store in memory would not be shared.
        storage_path: of ``file``: a directory that all ranks can write to; it outlives the engine.
        storage_bytes: of ``file``: most bytes in it.
        storage_deadline_s: longest wait for one operation of the storage; see ``storage_checksum`` for what has none.
        storage_checksum: copies of pages in a frame with a checksum; or the store works in the host's own pages, with a
            checksum beside each (``sidecar``) or without any (``none``), and takes as long as it needs for them. What
            was stored in frames is read in frames alone.
        mooncake_master, mooncake_metadata: of ``mooncake``: the master's ``host:port``, and the metadata server's URL.
        policy: when to write, when to stop prefetching.

    Raises:
        ConfigError: naming the value that cannot work.
    """

    host_tokens: int = attrs.field(validator=integer_validator())
    host_layout: HostLayout = attrs.field(default="page_first", validator=choice_validator(*HOST_LAYOUTS))
    storage: StorageKind = attrs.field(default="none", validator=choice_validator(*_STORAGE_KINDS))
    storage_path: str = ""
    storage_bytes: int = attrs.field(default=1 << 30, validator=integer_validator())
    # A step never waits for storage; a request may, and recomputes some thousand tokens in that time.
    storage_deadline_s: float = attrs.field(default=2.0, validator=number_validator())
    storage_checksum: StorageChecksum = attrs.field(default="frame", validator=choice_validator(*_STORAGE_CHECKSUMS))
    mooncake_master: str = MOONCAKE_MASTER
    mooncake_metadata: str = MOONCAKE_METADATA
    policy: HiCachePolicy = attrs.field(factory=HiCachePolicy)

    def __attrs_post_init__(self) -> None:
        if self.storage == "file" and not self.storage_path:
            raise ConfigError("storage_path", self.storage_path, "is empty", "name the directory to store pages in")
        if self.storage_checksum != "frame" and self.host_layout != "page_first":
            problem = f"cannot be with storage_checksum={self.storage_checksum!r}: a page is not one run of bytes"
            raise ConfigError("host_layout", self.host_layout, problem, "give page_first, or storage_checksum frame")
        if self.storage == "mooncake":
            _ = self.mooncake  # checked before any process is started

    @property
    def mooncake(self) -> MooncakeAddress:
        """Where each rank joins the Mooncake cluster, and what it gives to it."""
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
        max_delay_steps, low_usage: when their prefills wait for each other (``PrefillDelayer``).

    Raises:
        ConfigError: naming the value that cannot work.
    """

    max_delay_steps: int = 0
    low_usage: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.delayer()  # its own checks, before any process is started

    def delayer(self) -> PrefillDelayer:
        """Make the rule of one rank; it counts, so each rank has its own."""
        return PrefillDelayer(max_delay_steps=self.max_delay_steps, low_usage=self.low_usage)


@attrs.frozen(kw_only=True)
class EngineConfig:
    """One engine.

    Attributes:
        dp_size: replicas: independent KV caches under DP attention.
        attn_cp_size, attn_tp_size, pp_size: ranks per replica, along attention context and tensor parallelism, and
            pipeline stages. The simulated device of each stage answers as the last one's would.
        scheduler: sizes of each replica's scheduler.
        model: a real model, cut among the attention-TP ranks of each replica; None for a simulated device.
        speed: divides the simulated device's time.
        seed: of the simulated model's tokens.
        kv_events: configuration of the event publisher as JSON text; None publishes nothing.
        model_name: what the HTTP routes and metrics call the model.
        hicache: tiers behind the device; None for none.
        profile_directory: where each rank writes its profiles; empty for an engine that records none.
        dp_attention: replicas take every step together; None lets each step by itself.

    Raises:
        ConfigError: naming the value that cannot work.
    """

    dp_size: int = attrs.field(default=2, validator=integer_validator())
    attn_cp_size: int = attrs.field(default=2, validator=integer_validator())
    attn_tp_size: int = attrs.field(default=2, validator=integer_validator())
    pp_size: int = attrs.field(default=1, validator=integer_validator())
    scheduler: SchedulerConfig = attrs.field(factory=SchedulerConfig)
    speed: float = attrs.field(default=1.0, validator=number_validator("is not a speed"))
    seed: int = 0
    kv_events: str | None = None
    model_name: str = "simulated-8b"
    hicache: HiCacheConfig | None = None
    profile_directory: str = ""
    dp_attention: DpAttentionConfig | None = None
    model: ModelSpec | None = None

    def __attrs_post_init__(self) -> None:
        if self.model is not None:
            self._check_ranks_of_a_model()
        if self.dp_attention is not None and self.dp_size == 1:
            raise ConfigError(
                "dp_size", 1, "is a single replica, which has no other to take its steps with", "leave DP attention out"
            )

    def _check_ranks_of_a_model(self) -> None:
        for name in ("attn_cp_size", "pp_size"):
            if (size := getattr(self, name)) != 1:
                raise ConfigError(name, size, "cannot cut a real model", "give 1, and more replicas by dp_size")
        assert self.model is not None
        if (units := self.model.max_tp_size) % self.attn_tp_size:
            problem = f"does not divide the {units} parts that this model can be cut into"
            raise ConfigError("attn_tp_size", self.attn_tp_size, problem, f"give a divisor of {units}")
        if self.dp_attention is not None:
            problem = "is for replicas that share layers, and each replica of a real model has all of its own"
            raise ConfigError("dp_attention", True, problem, "leave it out")

    @property
    def relative_speed(self) -> float:
        """How fast a step is where it is slow, 1.0 at most: what waits for a rank waits longer by it."""
        return min(1.0, self.speed) if self.model is None else _MODEL_PACE

    @property
    def tp_size(self) -> int:
        """Ranks of each pipeline stage, over all replicas."""
        return self.dp_size * self.attn_cp_size * self.attn_tp_size

    @property
    def world_size(self) -> int:
        """Scheduler processes in all."""
        return self.pp_size * self.tp_size

    def parallel(self, rank: int) -> ParallelState:
        """Where rank ``rank`` of the world stands, under DP attention."""
        stage, tp_rank = divmod(rank, self.tp_size)
        return ParallelState.from_tp_rank(
            tp_rank,
            tp_size=self.tp_size,
            attn_dp_size=self.dp_size,
            attn_cp_size=self.attn_cp_size,
            pp_rank=stage,
            pp_size=self.pp_size,
        )

    def leader_rank(self, replica: int) -> int:
        """The rank that receives a replica's requests."""
        return replica * self.attn_cp_size * self.attn_tp_size

    def follower_ranks(self, replica: int) -> list[int]:
        """The other ranks of a replica, stage by stage."""
        first = self.leader_rank(replica)
        stages = range(first, first + self.world_size, self.tp_size)
        ranks = [stage + at for stage in stages for at in range(self.attn_cp_size * self.attn_tp_size)]
        return ranks[1:]


@attrs.frozen
class EnginePaths:
    """What the engine keeps in one directory that only its user can enter: ipc sockets, and the ranks' statistics.

    Attributes:
        directory: also the board: each rank that reports metrics writes its page there, and the front reads them.
    """

    directory: str

    @property
    def reports(self) -> str:
        """Every rank to the front, load reports among it; the front binds."""
        return self._address("reports")

    @property
    def outputs(self) -> str:
        """Tokens of requests from each leader to the front; the front binds."""
        return self._address("outputs")

    @property
    def kv_metrics(self) -> str:
        """KvMetrics of every reporting rank to the front; the front binds."""
        return self._address("kv-metrics")

    def commands(self, replica: int) -> str:
        """The front to the leader of ``replica``; the leader binds."""
        return self._address(f"commands-{replica}")

    def steps(self, rank: int) -> str:
        """The leader to follower ``rank``; the follower binds."""
        return self._address(f"steps-{rank}")

    def sync(self, rank: int) -> str:
        """Rank ``rank`` in agreements with the other ranks of its replica; it binds."""
        return self._address(f"sync-{rank}")

    def dp_sync(self, rank: int) -> str:
        """Rank ``rank`` in agreements with its counterparts in the other replicas; it binds."""
        return self._address(f"dp-sync-{rank}")

    def tensor_rendezvous(self, replica: int) -> Path:
        """A file in which the ranks that share the layers of ``replica`` find each other."""
        return Path(self.directory) / f"tensor-meeting-{replica}"

    def _address(self, name: str) -> str:
        return f"ipc://{Path(self.directory) / name}"


@attrs.frozen
class RankConfig:
    """All that a rank process is told: the first line of its standard input. ``rank`` is its number in the world."""

    engine: EngineConfig
    rank: int
    paths: EnginePaths

    def to_json(self) -> bytes:
        """The configuration as one line of JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> RankConfig:
        """Inverse of ``to_json``. Raises DecodeError for text that is not the configuration of a rank."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DecodeError(f"not the configuration of a rank: {error}") from error
